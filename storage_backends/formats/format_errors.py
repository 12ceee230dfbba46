"""Defines the errors of decoders: damaged bytes, and content that only a newer release reads.

The layers above decide what follows (quarantine, refusal).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class FormatError(Exception):
    """The error of damaged bytes: truncated, altered, or of another kind than expected.

    `what` names the part that was read, such as "journal slot". `offset` is where the wrong part begins in the bytes
    given to the decoder. `detail` says what is wrong with it.
    """

    def __init__(self, what: str, offset: int, detail: str) -> None:
        super().__init__(self._text(what, offset, detail))
        self.what = what
        self.offset = offset
        self.detail = detail

    @staticmethod
    def _text(what: str, offset: int, detail: str) -> str:
        return f"{what} is damaged at byte {offset}: {detail}"


class NewerFormat(FormatError):
    """The error of content that may be whole, but that only a newer release reads.

    A caller refuses it, and does nothing that it would do about damage.
    """

    @staticmethod
    def _text(what: str, offset: int, detail: str) -> str:
        return f"{what} cannot be read by this release: {detail}; use a release that knows it"


class UnsupportedVersion(NewerFormat):
    """The error of a format version that this release does not read.

    `found` and `supported` are format versions. The checksum is right: every version has it, and what it covers, in the
    same place. A version with a flipped bit is damage.
    """

    def __init__(self, what: str, offset: int, *, found: int, supported: Sequence[int]) -> None:
        known = " and ".join(map(str, supported))
        plural = "s" if len(supported) > 1 else ""
        super().__init__(
            what, offset, f"format version {found} is not known, this release reads version{plural} {known}"
        )
        self.found = found
        self.supported = tuple(supported)


class UnknownRequirement(NewerFormat):
    """The error of a manifest that requires what this release does not know; `unknown` are the names."""

    def __init__(self, what: str, offset: int, unknown: Sequence[str]) -> None:
        super().__init__(what, offset, f"it requires {', '.join(unknown)}, which is not known")
        self.unknown = tuple(unknown)


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
