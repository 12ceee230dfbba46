"""A topic and the oracle side by side: what must hold of redelivery, whatever has happened.

Owns: the invariants for what waits, counts and dead letters, and how hand-outs are checked against them.
Does not own: those for rows (`row_invariants`), and what may happen (`redelivery_machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis.stateful import invariant

from daemon.core.backlog.dead_letter_rows import ALL, DeadLetterRows
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.position_keys import KeyedRows
from storage_backends.formats import index_ids
from tests.daemon.core._support.journaled_topic import key_hashes_of
from tests.daemon.core._support.merging_machine import MergingMachine
from tests.daemon.core._support.oracle import Claim, Place, part_of
from tests.daemon.core._support.redelivery_oracle import DeadLetter, Receiver, RedeliveryOracle

PAGE_ROWS = 2


def dead_letters(state: SubscriptionState) -> DeadLetterRows:
    """All of them, page by page."""
    pages = []
    after_id: int | None = 0
    while after_id is not None:
        page = state.dead_letters.page(ALL, after_id, PAGE_ROWS)
        assert len(page.rows) <= PAGE_ROWS
        pages.append(page.rows)
        after_id = page.next_after
    return DeadLetterRows.concat(pages)


def listed_dead_letters(rows: DeadLetterRows) -> dict[int, tuple[object, ...]]:
    """(ledger, entry, batch index, deliver_at_ms, key hash, count, dead_at_ms, reason, text) by id."""
    columns = (
        rows.ledger_id,
        rows.entry_id,
        rows.batch_index,
        rows.deliver_at_ms,
        rows.key_hash,
        rows.redelivery_count,
        rows.dead_at_ms,
        rows.reason,
    )
    texts = [rows.texts[number] for number in rows.text_index.tolist()]
    ids = rows.dead_letter_id.tolist()
    assert ids == sorted(set(ids))
    return dict(zip(ids, zip(*(column.tolist() for column in columns), texts, strict=True), strict=True))


def as_listed(dead: DeadLetter) -> tuple[object, ...]:
    index, ledger, entry = dead.place
    batch_index = index_ids.NO_BATCH_INDEX
    if index_ids.is_of_batch_parts(index):
        entry, batch_index = entry >> index_ids.BATCH_BITS, entry & index_ids.BATCH_INDEX_MAX
    counted = (dead.deliver_at_ms, dead.key_hash, dead.count, dead.dead_at_ms, dead.reason, dead.text)
    return (ledger, entry, batch_index, *counted)


class RedeliveryInvariants(MergingMachine):
    oracle: RedeliveryOracle

    def __init__(self) -> None:
        super().__init__()
        self.oracle = RedeliveryOracle()

    # ---- what is seen to happen

    def wait_no_longer(self) -> None:
        """What has left the trackers without a decision came due."""
        for number, receiver in self.oracle.subscribers.items():
            state = self.topic.core.subscriptions.get(number)
            if state is not None:
                left = receiver.nacked.keys() - self.places_in(state.nacks.keys)
                left -= receiver.nacking | receiver.acknowledging
                self.oracle.fired(number, left, self.topic.now_ms)

    def passing(self, action: Callable[[], object]) -> None:
        super().passing(action)
        self.wait_no_longer()

    def handed_out(self, number: int, dispatcher: int, rows: KeyedRows) -> None:
        self.wait_no_longer()
        super().handed_out(number, dispatcher, rows)
        receiver = self.oracle.subscribers[number]
        for at, count in zip(self.places_of(rows.keys), rows.counts().tolist(), strict=True):
            expected = receiver.counts.get(at, 0)
            assert count == expected, f"{at} comes with count {count}, not {expected}"
            receiver.held_since_ms[at] = self.topic.elapsed_ms

    def drain_one(self, number: int) -> None:
        receiver = self.oracle.subscribers[number]
        self.waited = dict(receiver.nacked)
        super().drain_one(number)
        late = {at for at, time_ms in receiver.nacked.items() if time_ms <= self.topic.now_ms}
        assert late <= receiver.nacking, f"{late} wait though their time has come"

    def come_in_order(self, number: int, batches: Sequence[KeyedRows]) -> None:
        """What waited comes first in each hand-out, and in the order of its redelivery times."""
        others = []
        times_ms = []
        for rows in batches:
            waited = [at in self.waited for at in self.places_of(rows.keys)]
            assert waited == sorted(waited, reverse=True)
            first = sum(waited)
            times_ms += [self.waited[at] for at in self.places_of(rows.keys)[:first]]
            others.append(rows.take(slice(first, None)))
        assert times_ms == sorted(times_ms)
        super().come_in_order(number, others)

    # ---- what always holds

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "topic"):
            self.wait_no_longer()
        super().all_holds()
        if hasattr(self, "topic"):
            for number, receiver in self.oracle.subscribers.items():
                self.what_waits_is_what_was_decided(self.state(number), receiver)
                self.counts_are_those_of_the_backlog(self.state(number), receiver)
                self.dead_letters_are_kept(self.state(number), receiver)

    def due_unseen(self, number: int) -> set[Place]:
        receiver = self.oracle.subscribers[number]
        return receiver.acknowledging | receiver.given_ms.keys()

    def in_no_hand(self, number: int) -> set[Place]:
        receiver = self.oracle.subscribers[number]
        return {at for at in receiver.nacked.keys() | receiver.nacking if at in self.oracle.backlog(number)}

    def what_waits_is_what_was_decided(self, state: SubscriptionState, receiver: Receiver) -> None:
        rows, times_ms = state.nacks.freeze().rows()
        waiting = dict(zip(self.places_of(rows.keys), times_ms.tolist(), strict=True))
        key_hashes = dict(zip(self.places_of(rows.keys), key_hashes_of(rows), strict=True))
        assert len(waiting) == len(rows) == len(state.nacks) == len(state.nacks.keys)
        assert waiting.keys() == self.places_in(state.nacks.keys)
        undecided = receiver.nacking | receiver.acknowledging
        decided = {at: time_ms for at, time_ms in receiver.nacked.items() if at not in undecided}
        assert {at: time_ms for at, time_ms in waiting.items() if at not in undecided} == decided
        next_due_ms = state.nacks.next_due_ms()
        assert (next_due_ms is None) == (not waiting)
        assert next_due_ms is None or next_due_ms <= min(waiting.values())
        assert self.places_in(state.nacking) == receiver.nacking
        in_hand = self.places_in(state.in_hand()) - receiver.acknowledging
        assert not in_hand & receiver.nacking, "what is being negatively acknowledged is in somebody's hand"
        for at, time_ms in waiting.items():
            row = self.oracle.rows[at]
            assert time_ms >= row.deliver_at_ms
            assert key_hashes[at] == row.key_hash

    def counts_are_those_of_the_backlog(self, state: SubscriptionState, receiver: Receiver) -> None:
        counted: dict[Place, int] = {}
        for bit, plane in enumerate(state.counts.planes()):
            for at in self.places_in(plane):
                counted[at] = counted.get(at, 0) | 1 << bit
        difference = counted.items() ^ receiver.counts.items()
        assert not difference, f"counts differ: {difference}"

    def dead_letters_are_kept(self, state: SubscriptionState, receiver: Receiver) -> None:
        assert len(state.dead_letters) == len(receiver.dead)
        kept = {number: as_listed(dead) for number, dead in receiver.dead.items()}
        assert listed_dead_letters(dead_letters(state)) == kept
        assert state.last_dead_letter_id >= receiver.last_dead_letter_id

    # ---- claims

    def claims_of_entries(self, number: int, claimed: Sequence[tuple[tuple[int, int], int]]) -> list[Claim]:
        """Of (position, how wrong the time is): with the time of a row that the subscription may have, 0 of none."""
        rows = {at[1:]: row for at, row in sorted(self.oracle.rows.items()) if at[0] in (0, number)}
        return [Claim(at, rows[at].deliver_at_ms + off_ms if at in rows else off_ms) for at, off_ms in claimed]

    def claims_of_messages(self, number: int, claimed: Sequence[tuple[tuple[int, int], int, int]]) -> list[Claim]:
        """Of (position, batch index, how wrong the time is)."""
        claims = []
        for at, batch_index, off_ms in claimed:
            (entry,) = self.claims_of_entries(number, [(at, off_ms)])
            part = self.oracle.rows.get(part_of(number, at, batch_index))
            time_ms = entry.deliver_at_ms if part is None else part.deliver_at_ms + off_ms
            claims.append(Claim(at, time_ms, batch_index))
        return claims
