"""A topic and the oracle side by side, while rows are cancelled and rescheduled.

Owns: the rules for that.
Does not own: rows that come and go (`row_machine`), and how a request comes to its moment (`withdrawing`).
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.daemon.core._support import withdrawing
from tests.daemon.core._support.journaled_topic import Position
from tests.daemon.core._support.oracle import Withdrawn
from tests.daemon.core._support.row_machine import DELAYS_MS, FAR_MS, RowMachine, batches, owners, picks, positions

chosen_positions = st.lists(positions, min_size=1, max_size=8, unique=True)
# Positions once each, with a new time from now and a key hash.
new_times = st.lists(
    st.tuples(positions, st.sampled_from(DELAYS_MS), st.sampled_from((0, 0, 3))),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each[0],
)


class WithdrawingMachine(RowMachine):
    """Rows leave before they are due."""

    @rule(chosen=chosen_positions, to=owners, now=st.booleans())
    def cancel(self, chosen: list[Position], to: int, now: bool) -> None:
        own = self.decidable(chosen, to)
        expected = self.oracle.cancel(chosen, own)
        result, records = withdrawing.stage_cancel(self.topic, chosen, own)
        self.check(result, expected)
        assert sum(record.row_count for record in records) == sum(map(len, expected.leaving.values()))
        if now:
            self.commit()

    @rule(chosen=new_times, to=owners, keyed=st.booleans(), now=st.booleans())
    def reschedule(self, chosen: list[tuple[Position, int, int]], to: int, keyed: bool, now: bool) -> None:
        own = self.decidable([at for at, _, _ in chosen], to)
        now_ms = self.topic.now_ms
        # Rows with ids keep theirs only if the request names one.
        keyed = keyed or self.with_ids
        rows = [(at, max(0, now_ms + delay_ms), key_hash if keyed else 0) for at, delay_ms, key_hash in chosen]
        expected, raised = self.oracle.reschedule(rows, own)
        result, _ = withdrawing.stage_reschedule(
            self.topic,
            [at for at, _, _ in rows],
            [deliver_at_ms for _, deliver_at_ms, _ in rows],
            own,
            key_hash=[key_hash for _, _, key_hash in rows] if keyed else None,
            schedule_ids=self.ids_of([key_hash for _, _, key_hash in rows]) if keyed else None,
        )
        self.check(result, expected)
        assert dict(zip(result.raised, result.raised_deliver_at_ms, strict=True)) == raised
        if now:
            self.commit()

    @rule(batch=batches, to=owners, chosen=new_times, ahead_ms=st.sampled_from((0, FAR_MS)), cancelled=st.booleans())
    def rows_are_sealed_and_withdrawn(
        self,
        batch: list[tuple[Position, int, int]],
        to: int,
        chosen: list[tuple[Position, int, int]],
        ahead_ms: int,
        cancelled: bool,
    ) -> None:
        self.a_bucket_is_filled_and_sealed(batch, to, ahead_ms)
        if cancelled:
            self.cancel([at for at, _, _ in chosen], 0, now=True)
        else:
            self.reschedule(chosen, 0, keyed=True, now=True)

    @rule(chosen=new_times, pick=picks, step_ms=st.sampled_from((3, 700, 3_000)))
    def time_comes_for_what_is_leaving(self, chosen: list[tuple[Position, int, int]], pick: int, step_ms: int) -> None:
        self.reschedule(chosen, 0, keyed=False, now=False)
        self.topic.now_ms += step_ms
        if self.oracle.subscribers:
            self.drain_one(self.number(pick))

    def decidable(self, chosen: list[Position], to: int) -> int | None:
        """Everything due has been passed, and nothing staged names the positions. The index, None for every one."""
        self.passing(self.topic.pass_all)
        if self.oracle.is_staged(chosen):
            self.commit()
            self.passing(self.topic.pass_all)
        return self.number(to) if to and self.oracle.subscribers else None

    def check(self, result: withdrawing.Result, expected: Withdrawn) -> None:
        assert result.left == len(expected.leaving)
        assert result.not_found == tuple(expected.not_found)
        assert result.already_due == tuple(expected.already_due)
        assert result.in_flight == tuple(expected.in_flight)
