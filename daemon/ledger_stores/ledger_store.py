"""The port: one attempt to delete one ledger that was recorded.

Owns: what an attempt may come to, and what every store promises.
Does not own: which store has a ledger (`ledger_stores`), when an attempt is made, and what follows from its failure.

Promised, by every store:
- Nothing is deleted that was not found, in this attempt, to be what the record says.
- `guard` is called after that, and before the first request that deletes anything; what it raises ends the attempt.
- What is gone is no failure. An attempt may be made again, also while an earlier one is still on its way.
- `DeletionFailed.maybe_deleted` is false only when nothing that deletes was sent.
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
"""Raises `DeletionFailed` when nothing may be deleted now."""

Step: TypeAlias = Callable[[str], None]
"""Told how far an attempt is, by the names of crash points: `deletion.before_verify`, `deletion.after_verify`,
`deletion.after_index_delete`, `deletion.after_delete`. It may raise anything."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an attempt that needs no other: DELETED, ALREADY_GONE, IN_USE, METADATA_MISMATCH or MALFORMED.

    `text`: for people.
    """

    outcome: DeletionOutcome
    text: str = ""


class InUseAnswer(enum.Enum):
    """What an owner says of a ledger that is to be deleted."""

    IN_USE = "in_use"
    NOT_IN_USE = "not_in_use"
    # Nobody can be using it; whether it is the record's own is still to be seen from its metadata.
    NO_SUCH_TOPIC = "no_such_topic"


class DeletionFailed(Exception):
    """An attempt that has to be made again. `maybe_deleted`: it may have deleted something, or may do so yet."""

    def __init__(self, reason: str, *, maybe_deleted: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.maybe_deleted = maybe_deleted


class LedgerStore(ABC):
    """Synchronous; any number of threads may call it."""

    @abstractmethod
    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step) -> Answer:
        """Verify, and delete what was verified. Raises `DeletionFailed`."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections; no attempt may follow. May be repeated."""
