"""Fences a log: the fencer knows where the log ends, and its owner no longer writes.

The steps (L4):

    list: m is the highest slot, and read it            gone meanwhile: list again
    it is FENCE or CLOSE                                -> the log ends there
    its owner has reported a later slot                 go on from that one; it is absent: slots are lost
    create FENCE at m + 1, with the heads of m          occupied: read that one, and go on from it

A list is old when it arrives. If the owner lives, has written on and deleted what it wrote, the FENCE may stand in a
number that was emptied, and stops no daemon; therefore a claim compares it with the manifest. The caller decides when
to fence a log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, TypeAlias

from storage_backends import object_store
from storage_backends.formats import format_errors, log_slot_format, names, slot_restoring
from storage_backends.formats.log_slot_format import Heads, LogSlot, LogSlotHeader, LogSlotKind, Writer
from storage_backends.slot_log import LogHeld, ReadSlot, SlotLog, SlotLogs

log = logging.getLogger(__name__)

_PROOF: Final = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """The end of a log at `number`, where a slot of `kind` FENCE or CLOSE stands.

    `heads` say where the log ends for each shard. Only `fencing` makes one: a claim that has a fence has proof that its
    claimant has looked.
    """

    log_id: str
    number: int
    kind: LogSlotKind
    heads: Heads = dataclasses.field(repr=False)
    proof: dataclasses.InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise TypeError("a Fence is made by fencing a log, and in no other way")

    @property
    def end(self) -> int:
        """The last number before it."""
        return self.number - 1


# ---- the steps


@dataclasses.dataclass(frozen=True, slots=True)
class ListHighest:
    """The step that is answered with the highest number, or None if the log has no slot."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOne:
    """The step that is answered with the slot, or None if it is absent."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class CreateFence:
    """The step that is answered with whether a slot with these bytes has the number, by any creator."""

    number: int
    slot: bytes


Step: TypeAlias = ListHighest | ReadOne | CreateFence


def fencing(log_id: str, by: Writer, *, told: int = 0) -> Generator[Step, Any, Fence]:
    """Yield the steps that fence a log, each to be answered as its class says.

    `told` is a slot that the log's owner reported as written before the first step, or 0 if nothing is known. Raises
    Damaged if the log has lost slots.
    """
    gone: int | None = None
    listed_nothing = False
    while True:
        number = yield ListHighest()
        if number is None:
            if listed_nothing:
                raise object_store.Damaged(names.log_prefix(log_id), "the log has no slot: the store has lost it")
            listed_nothing = True
            continue
        if number == gone:
            raise object_store.Damaged(names.log_prefix(log_id), f"slot {number} is listed as the highest, but absent")
        fence = yield from _fencing_from(log_id, number, by, told)
        if fence is not None:
            return fence
        gone = number


def _fencing_from(log_id: str, number: int, by: Writer, told: int) -> Generator[Step, Any, Fence | None]:
    """Fence the log from this slot on.

    Returns None if a slot on the way is gone, since then its owner lives and deletes.
    """
    while True:
        slot = yield ReadOne(number)
        if slot is None:
            return None
        if slot.header.kind.ends and number >= told:
            return Fence(log_id, number, slot.header.kind, slot.header.heads, proof=_PROOF)
        if number < told:
            if (yield ReadOne(told)) is None:
                raise object_store.Damaged(
                    names.log_slot_key(log_id, told),
                    f"it is missing, although its daemon had written it: the store has lost slots after {number}",
                )
            # The listing lags behind.
            number = told
            continue
        heads = slot.header.heads
        header = LogSlotHeader(log_id=log_id, number=number + 1, kind=LogSlotKind.FENCE, heads=heads, writer=by)
        if (yield CreateFence(number + 1, log_slot_format.encode_log_slot(header))):
            return Fence(log_id, number + 1, LogSlotKind.FENCE, heads, proof=_PROOF)
        number += 1


# ---- performing them


def fence_log(
    slots: SlotLog, by: Writer, *, told: int = 0, delays_s: Iterator[float], sleep: Callable[[float], None]
) -> Fence:
    """Fence the log and return the fence at its end.

    Synchronous; may be repeated after any error. `told` is that of `fencing`. A transient failure is retried after each
    of `delays_s` (seconds); after the last one its error is raised. Raises LogHeld at once while a process lives that
    may write to the log, and Damaged if the newest slot cannot be read or is older than the one that the owner
    reported: then the end of the log is unknown.
    """
    steps = fencing(slots.log_id, by, told=told)
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as ended:
            fence: Fence = ended.value
            log.info("log %s ends at slot %d, a %s", fence.log_id, fence.number, fence.kind.name)
            return fence
        answer = _patiently(slots, step, delays_s, sleep)


def _patiently(slots: SlotLog, step: Step, delays_s: Iterator[float], sleep: Callable[[float], None]) -> Any:
    while True:
        try:
            if isinstance(step, ListHighest):
                return slots.highest()
            if isinstance(step, ReadOne):
                return _read_end(slots, step.number)
            return _create(slots, step)
        except LogHeld:
            raise
        except (object_store.StoreUnavailable, object_store.OutcomeUnknown) as error:
            delay_s = next(delays_s, None)
            if delay_s is None:
                raise
            log.warning("cannot fence a log, retrying: %s", error)
        sleep(delay_s)


def _read_end(slots: SlotLog, number: int) -> LogSlot | None:
    found = read_one(slots, number)
    if found is not None and found.lost:
        key = names.log_slot_key(slots.log_id, number)
        log.error("%s is damaged: it had sections of shards %s, and of no others", key, list(found.lost))
    return found


def ended_at(logs: SlotLogs, log_id: str) -> int | None:
    """Return the number of the FENCE or CLOSE that is the highest slot of the log, or None while it has no end.

    Raises Damaged, and the store's errors.
    """
    slots = logs.log(log_id)
    try:
        highest = slots.highest()
        found = None if highest is None else slots.head(highest)
        return highest if found is not None and found.kind.ends else None
    finally:
        slots.close()


def read_one(slots: SlotLog, number: int) -> LogSlot | None:
    """Read one slot and check its header and table. Returns None if it is absent. Raises Damaged.

    If they are damaged, they are restored where the slot before it and its sections show what they were, or where a
    note beside it does; by a note, its sections are damaged.
    """
    for read in slots.read(number - 1, number):
        try:
            return decoded(slots.log_id, number, read.body, read.damage)
        except object_store.Damaged as error:
            found = _restored(slots, read, error)
            if found is None:
                raise
            if not found.lost:
                log.error("restored a damaged log slot from its sections and the slot before it: %s", error)
            return found
    return None


def _restored(slots: SlotLog, read: ReadSlot, error: object_store.Damaged) -> LogSlot | None:
    # The bytes of another version are not damaged.
    may_be_lost = not isinstance(error.__cause__, format_errors.UnsupportedVersion)
    if read.number == 1:
        return slot_restoring.opening(slots.log_id, read.body) if may_be_lost and read.body is not None else None
    before = _header_of(slots, read.number - 1)
    found = None if before is None or read.body is None else slot_restoring.restored(read.body, before)
    if found is not None or before is None or not may_be_lost:
        return found
    note = slots.noted(read.number)
    return None if note is None else slot_restoring.noted(note, before, read.body or b"")


def _header_of(slots: SlotLog, number: int) -> LogSlotHeader | None:
    """Return the header of a slot, or None if it is absent or damaged."""
    for read in slots.read(number - 1, number):
        with contextlib.suppress(object_store.Damaged):
            return decoded(slots.log_id, number, read.body, read.damage).header
    return None


def decoded(log_id: str, number: int, body: bytes | None, damage: str) -> LogSlot:
    """Decode the slot of that number.

    Raises Damaged if header or table are not whole, or belong to another slot.
    """
    key = names.log_slot_key(log_id, number)
    if body is None:
        raise object_store.Damaged(key, f"the log slot cannot be read: {damage}")
    try:
        slot = log_slot_format.decode_log_slot(body)
    except format_errors.FormatError as error:
        raise object_store.unreadable(key, error) from error
    if (slot.header.log_id, slot.header.number) != (log_id, number):
        raise object_store.Damaged(key, f"it is slot {slot.header.number} of log {slot.header.log_id}")
    return slot


def _create(slots: SlotLog, step: CreateFence) -> bool:
    """Create the fence; return whether a slot with these bytes stands there.

    Raises OutcomeUnknown while that is uncertain.
    """
    try:
        slots.create(step.number, step.slot)
    except (object_store.AlreadyExists, object_store.OutcomeUnknown) as error:
        found = slots.head(step.number)
        if found is not None:
            return found == log_slot_format.identity_of(step.slot)
        # The answer was 409 and the slot is absent, or the PUT was sent and is not there yet: it may still land.
        raise object_store.OutcomeUnknown(error.key, f"cannot tell whether the fence exists: {error.reason}") from error
    return True
