"""The own log: which sections a slot has, with which shard slots, and how far the log is certain."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from daemon.errors import InvariantViolated
from daemon.group_commit.daemon_log import Encoded, FrozenSlot, LogCursor, SlotDraft
from storage_backends.formats import log_slot_format
from storage_backends.formats.log_slot_format import Head, LogSlotKind
from tests.storage_backends._support.log_slots import LOG_ID, OWNER


def encode(head: Head) -> bytes:
    return f"{head.epoch} {head.last_slot}".encode()


def refuse(head: Head) -> bytes:
    raise OverflowError(f"shard slot {head.last_slot} cannot be encoded")


def frozen(log: LogCursor, filling: SlotDraft) -> Encoded[FrozenSlot]:
    made = filling.freeze()
    log.frozen(made.slot)
    return made


def write(log: LogCursor, filling: SlotDraft) -> log_slot_format.LogSlot:
    made = frozen(log, filling)
    assert made.slot is not None
    log.certain()
    return log_slot_format.decode_log_slot(made.slot.body)


def fill(log: LogCursor, shards: Iterable[int]) -> SlotDraft:
    return log.fill(dict.fromkeys(shards, encode))


@pytest.fixture
def log() -> LogCursor:
    """An open log with shards 0 and 1, whose next shard slots are 5 and 1."""
    log = LogCursor(LOG_ID, OWNER)
    write(log, log.open())
    log.begin(0, Head(3, 4))
    log.begin(1, Head(1, 0))
    return log


def test_a_log_begins_with_open_of_its_owner() -> None:
    log = LogCursor(LOG_ID, OWNER)
    assert log.last_certain == 0
    slot = write(log, log.open())
    assert (slot.header.kind, slot.header.number, slot.header.writer) == (LogSlotKind.OPEN, 1, OWNER)
    assert log.last_certain == 1


def test_shard_slots_are_dense_for_each_shard(log: LogCursor) -> None:
    first = write(log, fill(log, [0]))
    second = write(log, fill(log, [0, 1]))
    assert first.header.heads == {0: Head(3, 5)}
    assert second.header.heads == {0: Head(3, 6), 1: Head(1, 1)}
    assert (second.section(0), second.section(1)) == (b"3 6", b"1 1")
    assert log.end().heads == second.header.heads
    assert (log.head(1), log.head(2)) == (Head(1, 1), None)


def test_a_section_that_cannot_be_encoded_uses_up_nothing(log: LogCursor) -> None:
    made = frozen(log, log.fill({0: refuse, 1: encode}))
    assert made.slot is not None
    assert made.slot.section_bytes == {1: len(b"1 1")}
    assert list(made.unencodable) == [0]
    log.certain()
    assert write(log, fill(log, [0])).header.heads[0] == Head(3, 5)


def test_a_slot_of_which_nothing_can_be_encoded_is_not_sent(log: LogCursor) -> None:
    made = frozen(log, log.fill({0: refuse}))
    assert made.slot is None
    assert log.rests
    assert write(log, fill(log, [0])).header.number == 2


def test_heads_name_a_shard_for_ever(log: LogCursor) -> None:
    write(log, fill(log, [0]))
    assert log.stop(0) == Head(3, 5)
    assert write(log, fill(log, [1])).header.heads == {0: Head(3, 5), 1: Head(1, 1)}
    log.begin(0, Head(6, 9))
    assert write(log, fill(log, [0])).header.heads[0] == Head(6, 10)


def test_close_has_the_heads_and_nothing_follows(log: LogCursor) -> None:
    write(log, fill(log, [0]))
    slot = write(log, log.close())
    assert (slot.header.kind, slot.header.heads) == (LogSlotKind.CLOSE, {0: Head(3, 5)})
    with pytest.raises(InvariantViolated, match="DATA begins after slot 3"):
        fill(log, [0])


NOT_NOW: dict[str, Callable[[LogCursor], object]] = {
    "another slot begins": lambda log: fill(log, [1]),
    "its end was asked for": lambda log: log.end(),
    "CLOSE begins": lambda log: log.close(),
    "the shard of its section stops": lambda log: log.stop(0),
}


@pytest.mark.parametrize("act", NOT_NOW.values(), ids=NOT_NOW)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_while_a_slot_is_under_way_this_is_refused(
    log: LogCursor, act: Callable[[LogCursor], object], is_frozen: bool
) -> None:
    filling = fill(log, [0])
    if is_frozen:
        frozen(log, filling)
    with pytest.raises(InvariantViolated, match="not certain"):
        act(log)


def test_a_shard_without_a_section_under_way_may_stop(log: LogCursor) -> None:
    frozen(log, fill(log, [0]))
    assert log.stop(1) == Head(1, 0)


NEVER: dict[str, Callable[[LogCursor], object]] = {
    "a shard that was not claimed": lambda log: fill(log, [2]),
    "no shard at all": lambda log: fill(log, []),
    "a claim of a shard that was not stopped": lambda log: log.begin(0, Head(4, 4)),
    "certain without a slot": lambda log: log.certain(),
    "frozen without a slot": lambda log: log.frozen(None),
    "OPEN again": lambda log: log.open(),
}


@pytest.mark.parametrize("act", NEVER.values(), ids=NEVER)
def test_this_is_refused(log: LogCursor, act: Callable[[LogCursor], object]) -> None:
    with pytest.raises(InvariantViolated):
        act(log)


def test_a_shard_that_was_stopped_has_no_sections(log: LogCursor) -> None:
    log.stop(0)
    with pytest.raises(InvariantViolated, match=r"shards \[0\] stage before their claim or after their stop"):
        fill(log, [0, 1])


def test_no_shard_is_claimed_for_a_log_that_is_not_open() -> None:
    with pytest.raises(InvariantViolated, match="before OPEN was certain"):
        LogCursor(LOG_ID, OWNER).begin(0, Head(1, 0))
