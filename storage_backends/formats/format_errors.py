"""What a decoder says of bytes it cannot read.

Owns: the error of damaged bytes and the error of a version that is not known here.
Does not own: what follows from it (quarantine, refusal); the layers above decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class FormatError(Exception):
    """Stored bytes are damaged: truncated, altered, or not what they are taken for.

    `what`: the part that was read, such as "journal slot". `offset`: where in the bytes given to the decoder the
    part that is wrong begins. `detail`: what is wrong with it.
    """

    def __init__(self, what: str, offset: int, detail: str) -> None:
        super().__init__(f"{what} is damaged at byte {offset}: {detail}")
        self.what = what
        self.offset = offset
        self.detail = detail


class UnsupportedVersion(FormatError):
    """Stored bytes are of a format version that this release does not read.

    `found` and `supported` are format versions.
    """

    def __init__(self, what: str, offset: int, *, found: int, supported: int) -> None:
        super().__init__(what, offset, f"format version {found} is not known, this release reads version {supported}")
        self.found = found
        self.supported = supported


@contextlib.contextmanager
def reading(what: str, offset: int) -> Iterator[None]:
    """Whatever goes wrong while a value is made of stored bytes is their damage: bytes with the right checksum may
    still say what makes no sense. Raises FormatError in place of anything else but MemoryError, which says nothing of
    bytes.
    """
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except Exception as error:
        detail = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise FormatError(what, offset, detail) from error
