"""The schedule id of a row stays with it, whatever happens to the row, and a row without one has none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.position_keys import KeyedRows, bitmap_of
from daemon.errors import InvalidArgument
from storage_backends.formats import requirements
from tests.daemon.core._support import merges
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, batch_of
from tests.daemon.core._support.nacking import nack, stage_nack, stage_overdue, stage_replay, terms
from tests.daemon.core._support.oracle import Claim
from tests.daemon.core._support.withdrawing import cancel, reschedule
from tests.storage_backends.formats._support.known_ids import known_ids

NOW_MS = 1_000_000
DUE_MS = NOW_MS + 10_000
POSITIONS = [(7, entry) for entry in range(12)]


@pytest.fixture(autouse=True)
def _known() -> object:
    with known_ids():
        yield


def id_of(at: Position) -> bytes:
    """Every third row has none, and one has as many bytes as an id may have."""
    if at[1] % 3 == 2:
        return b""
    return b"o" * 256 if at == (7, 4) else b"order-%d/%d" % at


class Topic(JournaledTopic):
    """With one subscription, and rows of these ids that are due in 10 s."""

    def __init__(self) -> None:
        super().__init__(now_ms=NOW_MS, requires=requirements.SCHEDULE_IDS)
        self.create_subscription()
        self.add_with_ids(POSITIONS)

    @property
    def state(self) -> SubscriptionState:
        return next(iter(self.core.subscriptions.values()))

    def add_with_ids(self, positions: list[Position], due_ms: int = DUE_MS) -> None:
        ids = [id_of(at) for at in positions]
        self.stage_add(batch_of(positions, deliver_at_ms=[due_ms] * len(positions), schedule_ids=ids))
        self.commit()

    def received(self, dispatcher: int = 1, *, after_ms: int = 10_000) -> dict[Position, bytes]:
        """What is handed out then, each position once, with its id."""
        self.now_ms += after_ms
        if not self.state.dispatchers:
            self.core.open(self.state, dispatcher)
        found: dict[Position, bytes] = {}
        for rows in self.drain(self.state, dispatcher):
            found |= ids_of(rows)
        return found

    def recover(self) -> None:
        self.crash_and_recover()


def ids_of(rows: KeyedRows) -> dict[Position, bytes]:
    columns = zip(rows.rows.ledger_id.tolist(), rows.rows.entry_id.tolist(), rows.rows.listed_ids(), strict=True)
    return {(ledger, entry): each for ledger, entry, each in columns}


EXPECTED = {at: id_of(at) for at in POSITIONS}
CLAIMS = [(at, DUE_MS) for at in POSITIONS]


def sealed(topic: Topic) -> None:
    topic.seal(near_ms=0)


def sealed_into_memory(topic: Topic) -> None:
    topic.seal(near_ms=DUE_MS)


def merged(topic: Topic) -> None:
    topic.seal(near_ms=0)
    topic.add_with_ids([(8, 0)])
    topic.seal(near_ms=0)
    planned = merges.plan(topic, merges.runs(topic, 2)[0])
    assert merges.commit(topic, planned) is None
    assert merges.adopt(topic) == 1


def being_sealed(topic: Topic) -> None:
    topic.begin_seal()


def checkpointed(topic: Topic) -> None:
    topic.take_checkpoint()
    topic.slots.clear()


def as_they_are(topic: Topic) -> None:
    pass


PLACES = (as_they_are, sealed, sealed_into_memory, merged, being_sealed, checkpointed)
CRASHES: tuple[Callable[[Topic], None], ...] = (as_they_are, Topic.recover)


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("place", PLACES)
def test_rows_come_with_their_ids_from_wherever_they_lie(
    place: Callable[[Topic], None], crash: Callable[[Topic], None]
) -> None:
    topic = Topic()
    place(topic)
    crash(topic)
    found = topic.received()
    assert {at: found[at] for at in POSITIONS} == EXPECTED


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("after", [as_they_are, sealed, checkpointed])
@pytest.mark.parametrize("before", [as_they_are, sealed])
def test_rows_that_were_nacked_come_again_with_their_ids(
    before: Callable[[Topic], None], after: Callable[[Topic], None], crash: Callable[[Topic], None]
) -> None:
    topic = Topic()
    before(topic)
    assert topic.received() == EXPECTED
    nack(topic, topic.state, CLAIMS, delay_ms=1_000)
    after(topic)
    crash(topic)
    assert topic.received(2, after_ms=2_000) == EXPECTED


@pytest.mark.parametrize("crash", CRASHES)
def test_rows_that_were_held_too_long_come_again_with_their_ids(crash: Callable[[Topic], None]) -> None:
    topic = Topic()
    assert topic.received() == EXPECTED
    topic.elapsed_ms += 1_000
    stage_overdue(topic, topic.state, topic.elapsed_ms, terms(topic.now_ms, delay_ms=1_000), 100)
    topic.commit()
    crash(topic)
    assert topic.received(2, after_ms=2_000) == EXPECTED


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("place", [as_they_are, sealed, checkpointed])
def test_dead_letters_have_the_ids_of_their_rows_and_are_replayed_with_them(
    place: Callable[[Topic], None], crash: Callable[[Topic], None]
) -> None:
    topic = Topic()
    assert topic.received() == EXPECTED
    nack(topic, topic.state, CLAIMS, reject=True)
    place(topic)
    crash(topic)
    dead = topic.state.dead_letters.freeze().rows()
    assert dead.schedule_ids is not None
    positions = zip(dead.ledger_id.tolist(), dead.entry_id.tolist(), strict=True)
    assert dict(zip(positions, dead.schedule_ids.tolist(), strict=True)) == EXPECTED
    stage_replay(topic, topic.state, dead, topic.now_ms)
    topic.commit()
    crash(topic)
    assert topic.received(2, after_ms=1) == EXPECTED


@pytest.mark.parametrize("crash", CRASHES)
def test_a_message_of_a_batch_has_the_id_of_its_entry(crash: Callable[[Topic], None]) -> None:
    topic = Topic()
    assert topic.received() == EXPECTED
    nack(topic, topic.state, [Claim((7, 4), DUE_MS, 3), Claim((7, 5), DUE_MS, 1)], delay_ms=1_000)
    # The messages, which were nacked since, stay.
    assert topic.acknowledge(topic.state, [Claim(at, DUE_MS, None, 0) for at in POSITIONS]) == 0
    crash(topic)
    found = topic.received(2, after_ms=2_000)
    assert sorted(found.values()) == [b"", id_of((7, 4))]


def test_what_was_forwarded_and_failed_later_comes_with_the_id_that_its_nack_brings() -> None:
    topic = Topic()
    assert topic.received() == EXPECTED
    assert topic.acknowledge(topic.state, CLAIMS) == 0
    claims = [Claim((7, 0), DUE_MS), Claim((7, 1), DUE_MS, 2)]
    ids = [id_of((7, 0)), id_of((7, 1))]
    stage_nack(topic, topic.state, claims, terms(topic.now_ms), forwarded=True, schedule_ids=ids)
    topic.commit()
    assert list(topic.received(after_ms=1).values()) == ids


@pytest.mark.parametrize("place", [as_they_are, sealed, merged])
def test_a_reschedule_names_the_id_of_the_row_or_is_refused(place: Callable[[Topic], None]) -> None:
    topic = Topic()
    place(topic)
    with pytest.raises(
        InvalidArgument, match="schedule_id is empty for ledger 7, entry 0, whose row has a schedule id"
    ):
        reschedule(topic, [(7, 2), (7, 0)], DUE_MS + 1)
    assert reschedule(topic, [(7, 2)], DUE_MS + 1).left == 1
    ids = [id_of(at) for at in POSITIONS]
    assert reschedule(topic, POSITIONS, DUE_MS + 5_000, schedule_ids=ids).left == len(POSITIONS)
    topic.crash_and_recover()
    found = topic.received(after_ms=15_000)
    assert {at: found[at] for at in POSITIONS} == EXPECTED


@pytest.mark.parametrize("place", [as_they_are, sealed])
def test_a_position_that_is_added_again_has_the_id_of_its_new_row(place: Callable[[Topic], None]) -> None:
    topic = Topic()
    place(topic)
    assert topic.received() == EXPECTED
    assert topic.acknowledge(topic.state, CLAIMS) == 0
    again = [(7, 0), (7, 1), (7, 2)]
    batch = batch_of(again, deliver_at_ms=[DUE_MS] * 3, schedule_ids=[b"another", b"", b"order-2"])
    topic.stage_add(batch)
    topic.commit()
    index = topic.core.index
    asked = bitmap_of(index.pages.find(np.array([7] * 12, np.uint64), np.arange(12, dtype=np.uint64)))
    assert len(index.with_ids_among(asked)) == 2
    assert topic.received(after_ms=1) == {(7, 0): b"another", (7, 1): b"", (7, 2): b"order-2"}


def test_a_row_that_takes_the_place_of_a_cancelled_one_comes_with_its_own_id() -> None:
    topic = Topic()
    again = [(7, 0), (7, 1), (7, 2)]
    assert cancel(topic, again).left == 3
    topic.stage_add(batch_of(again, deliver_at_ms=[DUE_MS] * 3, schedule_ids=[b"another", b"", b"order-2"]))
    topic.commit()
    assert topic.received() == {**EXPECTED, (7, 0): b"another", (7, 1): b"", (7, 2): b"order-2"}


def test_rows_without_ids_have_no_column_of_them_anywhere() -> None:
    topic = JournaledTopic(now_ms=NOW_MS)
    state = topic.create_subscription()
    topic.add(POSITIONS, NOW_MS + 1_000)
    topic.core.open(state, 1)
    topic.now_ms += 1_000
    (rows,) = topic.drain(state, 1)
    assert rows.rows.schedule_ids is None
    nack(topic, state, [(at, NOW_MS + 1_000) for at in POSITIONS[:6]], delay_ms=1)
    nack(topic, state, [(at, NOW_MS + 1_000) for at in POSITIONS[6:]], reject=True)
    nacked, _ = state.nacks.freeze().rows()
    assert nacked.rows.schedule_ids is None
    assert state.dead_letters.freeze().rows().schedule_ids is None
    topic.add([(8, 0)], NOW_MS + 9_000)
    topic.seal()
    assert [bucket.with_ids for bucket in topic.core.indexes.buckets] == [None, None]
    assert all(data[4] == 1 for data in topic.slots)
