"""Keeps the answer to a request true once something of it is decided.

A refusal says that nothing has changed. That holds while a request has staged no decision, committed no manifest and
changed nothing in memory that others see. From then on any failure leaves its outcome unknown, whether it awaits its
next portion, a confirmation or the end of a former owner: what was staged may land, and may be durable already.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator

from daemon.errors import Corruption, InvariantViolated, OutcomeUnknown, TarryError
from storage_backends import commit


class RequestEffects:
    """The effects of one request so far: none, or some that may last.

    A context manager around all that the request does and awaits. Once `begin` was called, it raises OutcomeUnknown in
    place of any TarryError. `failed` is called with an InvariantViolated first; without `failed` that leaves as it is.
    """

    def __init__(self, failed: Callable[[BaseException], None] | None = None, *, begun: bool = False) -> None:
        self._failed = failed
        self._begun = begun

    def begin(self) -> None:
        """Record that something of the request is staged, or in force: it can be refused no longer."""
        self._begun = True

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Begin with the commit inside, unless that is refused, or finds damage before it writes: it never lands then.

        It may land later even if this was cancelled.
        """
        try:
            yield
        except commit.Refused:
            raise
        except BaseException as error:
            if not (isinstance(error, Corruption) and error.wrote_nothing):
                self.begin()
            raise
        self.begin()

    def __enter__(self) -> RequestEffects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if not self._begun or not isinstance(error, TarryError):
            return
        if isinstance(error, InvariantViolated):
            if self._failed is None:
                return
            self._failed(error)
        unknown = OutcomeUnknown.after(error)
        if unknown is not error:
            raise unknown from error
