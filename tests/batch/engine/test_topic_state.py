"""What jobs read of a topic is what is true of it, at any moment of the life of a cluster."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from batch.engine.root import Root, TopicPlace
from batch.engine.topic_contents import TopicContents, owed_mask, rows_of
from batch.engine.topic_reading import read_states
from storage_backends.formats.position_bitmap import PositionSet
from storage_backends.formats.row_columns import Rows
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import NO_METADATA, StoreError
from tests._support.fault_places import JOURNAL
from tests.simulation import run as simulation
from tests.simulation.oracle import Oracle, TopicTruth, WatchedStore
from tests.simulation.positions import Position, in_index
from tests.simulation.run import Directed

Part = tuple[int, Rows, Mapping[int, PositionSet]]


class LookedAtStore(WatchedStore):
    """After some of the objects that land, what jobs read is compared with what is true."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self.draw = random.Random(7)
        self.every = 1
        self.looks = 0
        self.topics_looked_at = 0
        self.rows_looked_at = 0

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        super().put(key, body, metadata=metadata)
        self._landed(key)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        super().put_if_absent(key, body, metadata=metadata)
        self._landed(key)

    def _landed(self, key: str) -> None:
        if (JOURNAL in key or "/manifest/" in key) and not self.draw.randrange(self.every):
            self._look()

    def _look(self) -> None:
        failures: list[tuple[TopicPlace, StoreError]] = []
        states = list(read_states(Root.open(self), failed=lambda *failure: failures.append(failure)))
        self.looks += 1
        damaged = bool(self._oracle.objects.unreadable)
        if failures and not damaged:
            self._oracle._history.breach(f"nothing is damaged, and a job cannot read {failures}")
        read = {state.place.topic_id for state in states} | {place.topic_id for place, _ in failures}
        for topic_id, truth in self._oracle.topics.items():
            if truth.incarnation and not truth.deleted and topic_id not in read:
                self._oracle._history.breach(f"a job does not see topic {truth.name}")
        for state in states:
            self._compare(state, self._oracle.topics[state.place.topic_id], damaged=damaged)

    def _compare(self, state: TopicContents, truth: TopicTruth, *, damaged: bool) -> None:
        try:
            parts = parts_of(self, state)
        except StoreError as error:
            if not damaged:
                self._oracle._history.breach(f"topic {state.name}: nothing is damaged, and a job finds {error}")
            return
        self.topics_looked_at += 1
        for text in differences(state, parts, truth, self._oracle.latest_ms()):
            self._oracle._history.breach(f"topic {state.name}, as a job reads it: {text}")
        self.rows_looked_at += len(truth.rows)


def parts_of(store: MemoryStore, state: TopicContents) -> list[Part]:
    """Index, rows, and who acknowledged which, of everything that a topic holds."""
    parts: list[Part] = []
    for bucket in state.buckets:
        rows = rows_of(store, bucket)
        assert len(rows) == bucket.present_rows
        parts.append((bucket.index_id, rows, bucket.acknowledged))
    parts += [(each.index_id, each.rows, each.acknowledged) for each in state.unsealed]
    return parts


def positions_of(index_id: int, rows: Rows) -> list[Position]:
    columns = zip(rows.ledger_id.tolist(), rows.entry_id.tolist(), strict=True)
    return [in_index(position, index_id) for position in columns]


def differences(state: TopicContents, parts: Sequence[Part], truth: TopicTruth, latest_ms: int) -> list[str]:
    found: dict[Position, int] = {}
    owed: dict[int, set[Position]] = {each.stored.subscription_id: set() for each in state.subscriptions}
    told = []
    for index_id, rows, acknowledged in parts:
        positions = positions_of(index_id, rows)
        if found.keys() & set(positions):
            told.append(f"{found.keys() & set(positions)} have two rows")
        found.update(zip(positions, rows.deliver_at_ms.tolist(), strict=True))
        for each in state.subscriptions:
            mask = owed_mask(each.stored, index_id, rows, acknowledged).tolist()
            owed[each.stored.subscription_id] |= {
                position for position, is_owed in zip(positions, mask, strict=True) if is_owed
            }
    true_rows = {position: row.deliver_at_ms for position, row in truth.rows.items()}
    if found != true_rows:
        told.append(f"the rows are {sorted(found.items() ^ true_rows.items())} apart")
    if owed.keys() != truth.subscriptions.keys():
        told.append(f"the subscriptions are {sorted(owed)}, not {sorted(truth.subscriptions)}")
    for number, positions_owed in owed.items():
        true_owed = {position for position, row in truth.rows.items() if number in truth.owes(row)}
        if positions_owed != true_owed:
            told.append(f"what {number} is owed is {sorted(positions_owed ^ true_owed)} apart")
    return [*told, *differences_of_redeliveries(state, truth, latest_ms)]


def differences_of_redeliveries(state: TopicContents, truth: TopicTruth, latest_ms: int) -> list[str]:
    told = []
    for each in state.subscriptions:
        number = each.stored.subscription_id
        true_nacked = {
            position: row.nacked[number].redeliver_at_ms
            for position, row in truth.rows.items()
            if number in row.nacked and number in truth.owes(row)
        }
        nacked = {
            position: time_ms
            for part in each.nacked
            for position, time_ms in zip(
                positions_of(part.index_id, part.rows), part.redeliver_at_ms.tolist(), strict=True
            )
        }
        if not nacked.items() <= true_nacked.items():
            told.append(f"{number} nacked {nacked.items() - true_nacked.items()}, and it did not: {true_nacked}")
        if lost := {key for key, time_ms in true_nacked.items() if time_ms > latest_ms} - nacked.keys():
            told.append(f"{number} nacked {lost}, and that is lost")
        letters = each.dead_letters
        true_letters = truth.redeliveries.dead_letters.get(number, {})
        if letters.dead_letter_id.tolist() != sorted(true_letters):
            told.append(f"{number} has dead letters {letters.dead_letter_id.tolist()}, not {sorted(true_letters)}")
            continue
        for row, dead_letter_id in enumerate(letters.dead_letter_id.tolist()):
            true = true_letters[dead_letter_id]
            shown = (int(letters.deliver_at_ms[row]), letters.texts[int(letters.text_index[row])])
            if shown != (true.deliver_at_ms, true.text):
                told.append(f"{number} has dead letter {dead_letter_id} {shown}, it is {true}")
    return told


def looked_at(monkeypatch: pytest.MonkeyPatch, seed: int, *, every: int) -> LookedAtStore:
    """The run of a seed, which ends without a breach."""
    made: list[LookedAtStore] = []

    def make(oracle: Oracle) -> LookedAtStore:
        store = LookedAtStore(oracle)
        store.every = every
        made.append(store)
        return store

    monkeypatch.setattr(simulation, "WatchedStore", make)
    result = simulation.run(seed, directed=Directed(owners=False))
    assert not result.breaches, "\n".join((f"seed {seed}", *result.breaches, *result.lines[-20:]))
    return made[0]


@pytest.mark.rotating
@pytest.mark.parametrize("seed", [8, 16, 18])
def test_what_jobs_read_is_what_is_true_at_any_moment(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    store = looked_at(monkeypatch, seed, every=20)
    assert store.looks > 5
    assert store.topics_looked_at > 5
    assert store.rows_looked_at > 1_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_jobs_read_is_what_is_true_in_many_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(200_000, 200_200):
        looked_at(monkeypatch, seed, every=5)
