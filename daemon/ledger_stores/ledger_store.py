"""Defines the port for one attempt to delete one recorded ledger.

Every store promises:

- Nothing is deleted unless this attempt found it to be what the record says.
- `guard` is called after that, and before the first request that deletes anything; an error of it ends the attempt.
- A missing ledger is not a failure. An attempt may be repeated, even while an earlier one is still in flight.
- `DeletionFailed.maybe_deleted` is false only if no deletion was sent.
- An attempt ends: every request has a time-out.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from storage_backends.formats.deletion_format import DeletionOutcome, PendingDelete

Guard: TypeAlias = Callable[[], None]
"""Raises `DeletionFailed` if nothing may be deleted now."""

Step: TypeAlias = Callable[[str], None]
"""Called with the progress of an attempt; it may raise anything.

The names are those of crash points: `deletion.before_verify`, `deletion.after_verify`, `deletion.after_index_delete`,
`deletion.after_delete`.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The final result of an attempt: DELETED, ALREADY_GONE, IN_USE, METADATA_MISMATCH or MALFORMED.

    `text` explains it.
    """

    outcome: DeletionOutcome
    text: str = ""


class InUseAnswer(enum.Enum):
    """The answer of an owner about a ledger to be deleted."""

    IN_USE = "in_use"
    NOT_IN_USE = "not_in_use"
    # It cannot be in use; whether it matches the record is then decided by its metadata.
    NO_SUCH_TOPIC = "no_such_topic"


class DeletionFailed(Exception):
    """An attempt that must be repeated. `maybe_deleted` is whether it may have deleted something, or may do so yet."""

    def __init__(self, reason: str, *, maybe_deleted: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.maybe_deleted = maybe_deleted


class LedgerStore(ABC):
    """A store of ledgers. It is synchronous; any number of threads may call it."""

    @abstractmethod
    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step) -> Answer:
        """Verify, and delete what was verified. Raise `DeletionFailed` on failure."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections; no attempt may follow. May be repeated."""
