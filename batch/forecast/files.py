"""Output files that are whole or not there.

Owns: that a file which cannot be written is refused before the work begins, and that an existing one is replaced at
once. Does not own: what is written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self


class Unwritable(Exception):
    """A file cannot be written; the message says which and why."""


class OutputFile:
    """A file that comes to be when it is complete.

    Entering makes a temporary file beside it, under `temporary`; `complete` gives it its name; leaving without that
    removes it, and an existing file stays as it was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path
        self._complete = False

    def __enter__(self) -> Self:
        """
        :raises Unwritable: no such file can be made there.
        """
        if self.path.is_dir():
            raise Unwritable(f"cannot write {self.path}: it is a directory")
        with self._refusing():
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=self.path.suffix, dir=self.path.parent)
            os.close(handle)
        self.temporary = Path(name)
        return self

    def complete(self) -> None:
        """What is in the temporary file is whole.

        :raises Unwritable: it cannot be put in place.
        """
        with self._refusing():
            # A temporary file is its owner's alone; this one is as any other file.
            self.temporary.chmod(0o666 & ~_umask())
            self.temporary.replace(self.path)
        self._complete = True

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._complete:
            self.temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unwritable(f"cannot write {self.path}: {error.strerror or error}") from error


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
