"""Defines the port to the slots of one log, numbered from 1 on.

Callers decide who may write which slot, and when one may be deleted; `log_slot_format` defines what is in a slot. Every
implementation is synchronous and may be called from any number of threads.

Promised, by every implementation:
- `create` has at most one winner for a number, whichever process calls it.
- A slot that was created, or that `head`, `read` or `highest` has returned, survives a crash of the machine.
- A slot is seen whole or not at all; a slot that was damaged since is distinguished from an absent one.
- `highest`, `numbers` and `log_ids` show everything that was there before they began.

Not promised:
- That a number which was deleted stays empty: a copy of a slot that was sent before may land there later.
- That a listed or returned slot still exists when the caller gets the answer.

A name that no log or slot has is ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from storage_backends import object_store
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import SlotIdentity, SlotNote


class LogHeld(object_store.StoreUnavailable):
    """The error of a log that another process may write to as long as it lives.

    `holder` says which process and since when, for people.
    """

    def __init__(self, log_id: str, holder: str) -> None:
        super().__init__(names.log_prefix(log_id), f"it is held by {holder}, which is running: end that process first")
        self.holder = holder


class ReadSlot(NamedTuple):
    """A slot as it is stored.

    `body` holds its bytes, in which the sections may be damaged, or None if nothing of it can be read; then `damage`
    says why.
    """

    number: int
    body: bytes | None
    damage: str = ""


class SlotLog(ABC):
    """One log. Any operation may raise `StoreUnavailable` or `StoreRefused`.

    Raises Damaged if `log_id` is no ULID: it may come from damaged content, and names a folder.
    """

    def __init__(self, log_id: str) -> None:
        if not log_slot_format.is_log_id(log_id):
            raise object_store.Damaged(names.LOGS_PREFIX, f"log id is {log_id!r}; it must be a ULID")
        self.log_id = log_id

    @abstractmethod
    def create(self, number: int, slot: bytes) -> None:
        """Write the slot if no slot has its number.

        It is sent once; nothing beneath this call repeats it. Raises `AlreadyExists`, in some forms for a deleted
        number, too, or `OutcomeUnknown`: then `head` decides.
        """

    @abstractmethod
    def head(self, number: int) -> SlotIdentity | None:
        """Return the identity of the slot with this number, or None if there is none. Raises `Damaged`."""

    def noted(self, number: int) -> SlotNote | None:
        """Return what is stored of the slot beside its bytes, or None if nothing is, as in a form without such notes.

        It says what a damaged slot was.
        """
        return None

    @abstractmethod
    def read(self, after: int, through: int) -> list[ReadSlot]:
        """Return the slots with after < number <= through that exist, ascending."""

    @abstractmethod
    def highest(self) -> int | None:
        """Return the highest number, or None if the log has no slot."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """Return the numbers of all slots, ascending, including damaged ones."""

    @abstractmethod
    def replace(self, number: int, slot: bytes) -> None:
        """Replace the bytes of a slot below the end of the log by what an operator accepts in their place.

        May be repeated after an error. Raises `Damaged` if that needs slots that cannot be read.
        """

    @abstractmethod
    def delete_through(self, number: int) -> None:
        """Delete OPEN and DATA up to this number, perhaps not all of them.

        FENCE and CLOSE stay. May be repeated after an error. Raises ValueError if that would be the highest slot.
        """

    @abstractmethod
    def close(self) -> None:
        """Close files and release locks; no operation may follow. May be repeated."""


class SlotLogs(Protocol):
    """The logs of a root."""

    def log(self, log_id: str) -> SlotLog:
        """Return one of them, whether or not it has slots. Raises Damaged if none can have this id."""
        ...

    def log_ids(self) -> frozenset[str]:
        """Return the ids of those that have slots."""
        ...

    def foreign(self) -> list[str]:
        """Return the names that are stored among logs and slots and are neither, for people."""
        ...
