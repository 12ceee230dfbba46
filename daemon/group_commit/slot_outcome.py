"""What became of a log slot that was sent: the decisions, from the answers (L1, L10).

Owns: what to do after each answer, and what a slot that is certain confirms.
Does not own: sending, asking, waiting, time (`log_writer`), what is in the slot (`own_log`).

    created, and one copy was sent                  -> certain; confirms when it was sent
    created, and more copies were sent              -> look at the next number: a fence: lost; else certain
    exists, no answer, an error                     -> HEAD
        this slot                                   -> certain; confirms when the first copy was sent
        a fence                                     -> lost
        none                                        -> the same bytes again, after a pause

A copy that was created where several were sent may have landed in a number that was emptied: an earlier copy was there,
a fence behind it, and a collector has deleted what the fence covers. The fence is never deleted.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias

from daemon.errors import Corruption
from storage_backends.formats.log_slot_format import LogSlotKind, SlotIdentity


@dataclasses.dataclass(frozen=True, slots=True)
class Certain:
    """The slot is stored for good. `confirmed_at_s`: at that monotonic time the log was this daemon's for certain."""

    confirmed_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """Another process has ended the log at slot `fence`."""

    fence: int


class Next(enum.Enum):
    """`SEND_AGAIN`: the same bytes, after a pause. `ASK`: HEAD of the slot. `LOOK`: HEAD of the number behind it."""

    SEND_AGAIN = enum.auto()
    ASK = enum.auto()
    LOOK = enum.auto()


Decision: TypeAlias = Certain | Lost | Next


class SlotOutcome:
    """One slot from its first copy to its outcome. Copies may be sent side by side: a hedge is one like any other."""

    def __init__(self, log_id: str, number: int, identity: SlotIdentity) -> None:
        self._log_id = log_id
        self._number = number
        self._identity = identity
        self._sent_at_s: list[float] = []
        self._created_sent_at_s: float | None = None

    @property
    def copies(self) -> int:
        """How many were sent."""
        return len(self._sent_at_s)

    def sent(self, at_s: float) -> None:
        """A copy is about to be sent, at that monotonic time."""
        self._sent_at_s.append(at_s)

    def created(self, sent_at_s: float) -> Decision:
        """The store says that the copy which was sent then is what was created."""
        if len(self._sent_at_s) == 1:
            return Certain(sent_at_s)
        self._created_sent_at_s = sent_at_s
        return Next.LOOK

    def open(self) -> Decision:
        """A copy was answered in any other way, or not at all."""
        return Next.ASK

    def asked(self, found: SlotIdentity | None) -> Decision:
        """What HEAD of the slot has shown. Raises Corruption for a slot that nobody can have written."""
        if found is None:
            return Next.SEND_AGAIN
        if found == self._identity:
            return Certain(self._sent_at_s[0])
        if found.kind is LogSlotKind.FENCE:
            return Lost(self._number)
        raise Corruption(
            f"log {self._log_id}: slot {self._number} holds a {found.kind.name} that this daemon did not write, and "
            "nobody else writes there: the log's end was given up (tarryd give-up), the store does not honour "
            "conditional writes, or a log id was used twice"
        )

    def looked(self, behind: SlotIdentity | None) -> Decision:
        """What HEAD of the number behind it has shown, after a copy was created."""
        if behind is not None and behind.kind.ends:
            return Lost(self._number + 1)
        if behind is not None or self._created_sent_at_s is None:
            raise Corruption(
                f"log {self._log_id}: slot {self._number + 1} exists before slot {self._number} was certain"
            )
        return Certain(self._created_sent_at_s)
