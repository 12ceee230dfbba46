"""Leaving what sends: every answer is waited for, then it is closed.

Owns: the context manager. Does not own: what is sent, flushing and closing it (`tarry.aio.add_stream`,
`tarry.aio.producer`).
"""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self


class FlushedWhenLeft(abc.ABC):
    """A context manager: leaving it waits for every answer, and raises as `flush` does."""

    _timeout_s: float

    @abc.abstractmethod
    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything is answered. Raises the first failure since the last flush, if any."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends it at once. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                # By then everything is answered or given up.
                await self.flush(self._timeout_s)
        finally:
            await self.close()
