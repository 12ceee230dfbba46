"""The port: the slots of one log, numbered from 1 on.

Owns: the operations, what each promises, and their errors beside those of a store.
Does not own: what is in a slot (`log_slot_format`), who may write which slot, and when one may go (the callers).

Every implementation is synchronous and may be called from any number of threads.

Promised, by every implementation:
- `create` has at most one winner for a number, whoever asks, from whichever process.
- What was created, and what `head`, `read` or `highest` has shown, survives a crash of the machine.
- A slot is seen whole or not at all; what is damaged since is told apart from what is absent.
- `highest`, `numbers` and `log_ids` show everything that was there before they began.

Not promised:
- That a number which was deleted stays empty: a copy of a slot that was sent before may land there later.
- That what is listed, read or shown is still so when the caller hears of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from storage_backends import object_store
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import SlotIdentity


class LogHeld(object_store.StoreUnavailable):
    """Another process may write to the log as long as it lives. `holder`: which one and since when, for people."""

    def __init__(self, log_id: str, holder: str) -> None:
        super().__init__(names.log_prefix(log_id), f"it is held by {holder}, which lives: end that process first")
        self.holder = holder


class ReadSlot(NamedTuple):
    """A slot as it is stored. `body`: its bytes, in which the sections may be damaged; None when nothing of it can be
    read, and `damage` says why.
    """

    number: int
    body: bytes | None
    damage: str = ""


class SlotLog(ABC):
    """One log. `log_id`: a ULID. Any operation may raise `StoreUnavailable` or `StoreRefused`."""

    def __init__(self, log_id: str) -> None:
        self.log_id = log_id

    @abstractmethod
    def create(self, number: int, slot: bytes) -> None:
        """Write the slot if nothing has its number. It is sent once; nothing beneath this call repeats it.

        Raises `AlreadyExists`, which some forms do for a number that was deleted, too; `OutcomeUnknown`: then `head`
        decides.
        """

    @abstractmethod
    def head(self, number: int) -> SlotIdentity | None:
        """Which slot has the number; None when none has. Raises `Damaged`."""

    @abstractmethod
    def read(self, after: int, through: int) -> list[ReadSlot]:
        """The slots with after < number <= through that are there, ascending."""

    @abstractmethod
    def highest(self) -> int | None:
        """The highest number; None when the log has no slot. Raises `Damaged` for what cannot be in a log."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """The numbers of all slots, ascending; those of damaged ones too. Raises `Damaged` as `highest`."""

    @abstractmethod
    def delete_through(self, number: int) -> None:
        """Delete OPEN and DATA up to this number; it may leave some of them. FENCE and CLOSE stay.

        May be repeated after an error. Raises ValueError when that would be the highest slot.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up files and locks; no operation may follow. May be repeated."""


class SlotLogs(Protocol):
    """The logs of a root."""

    def log(self, log_id: str) -> SlotLog:
        """One of them, whether or not it has slots."""
        ...

    def log_ids(self) -> frozenset[str]:
        """Those that have slots."""
        ...
