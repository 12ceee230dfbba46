"""Defines the errors of decoders: damaged bytes, and an unknown version.

The layers above decide what follows (quarantine, refusal).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class FormatError(Exception):
    """The error of damaged bytes: truncated, altered, or of another kind than expected.

    `what` names the part that was read, such as "journal slot". `offset` is where the wrong part begins in the bytes
    given to the decoder. `detail` says what is wrong with it.
    """

    def __init__(self, what: str, offset: int, detail: str) -> None:
        super().__init__(f"{what} is damaged at byte {offset}: {detail}")
        self.what = what
        self.offset = offset
        self.detail = detail


class UnsupportedVersion(FormatError):
    """The error of a format version that this release does not read.

    `found` and `supported` are format versions.
    """

    def __init__(self, what: str, offset: int, *, found: int, supported: int) -> None:
        super().__init__(what, offset, f"format version {found} is not known, this release reads version {supported}")
        self.found = found
        self.supported = supported


@contextlib.contextmanager
def reading(what: str, offset: int) -> Iterator[None]:
    """Treat any error while a value is made of stored bytes as their damage.

    Bytes with the right checksum may still make no sense. Raises FormatError in place of any other error but
    MemoryError, which says nothing about the bytes.
    """
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except Exception as error:
        detail = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise FormatError(what, offset, detail) from error
