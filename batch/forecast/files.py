"""Writes output files that are either complete or absent.

A file that cannot be written is refused before the work begins, and an existing one is replaced at once.
`batch.cli.forecast` alone uses this module, which knows nothing of forecasts.
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
    """The error of a file that cannot be written; it says which and why."""


class OutputFile:
    """A file that gets its name when it is complete.

    Entering makes a temporary file next to it, under `temporary`; `complete` gives it its name. Leaving without that
    removes it, and an existing file stays as it was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path
        self._complete = False

    def __enter__(self) -> Self:
        """Make the temporary file. Raises Unwritable if that cannot be done there."""
        if self.path.is_dir():
            raise Unwritable(f"cannot write {self.path}: it is a directory")
        with self._refusing():
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=self.path.suffix, dir=self.path.parent)
            os.close(handle)
        self.temporary = Path(name)
        return self

    def complete(self) -> None:
        """Put the temporary file, which is complete, in place. Raises Unwritable if that fails."""
        with self._refusing():
            # Only the owner may read a temporary file; this one becomes like any other file.
            umask = os.umask(0)
            os.umask(umask)
            self.temporary.chmod(0o666 & ~umask)
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
