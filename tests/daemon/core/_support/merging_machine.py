"""A topic and the oracle side by side, while its buckets are merged: by whoever plans from the manifest, committed
later, and taken over by the owner later still, with everything else between.

Owns: the rules for that.
Does not own: everything else that may happen (`topic_machine`), and how a merge is made here (`merges`).
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.daemon.core._support import merges
from tests.daemon.core._support.journaled_topic import Position
from tests.daemon.core._support.row_machine import FAR_MS, batches, owners, picks
from tests.daemon.core._support.topic_machine import TopicMachine


class MergingMachine(TopicMachine):
    """Merges beside everything else that may happen to a topic."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[merges.Planned] = []
        self.merged = 0

    # ---- a great deal at once

    @rule(each=st.lists(batches, min_size=2, max_size=3), to=owners, ahead_ms=st.sampled_from((0, FAR_MS)))
    def buckets_are_filled(self, each: list[list[tuple[Position, int, int]]], to: int, ahead_ms: int) -> None:
        for batch in each:
            self.a_bucket_is_filled_and_sealed(batch, to, ahead_ms)

    @precondition(lambda self: self.oracle.subscribers)
    @rule(
        batch=batches,
        pick=picks,
        acknowledged=st.lists(picks, max_size=6),
        length=st.sampled_from((2, 3)),
        stored=st.sampled_from((None, "checkpoint", "progress")),
        crash=st.booleans(),
    )
    def rows_come_and_go_between_plan_and_commit(
        self,
        batch: list[tuple[Position, int, int]],
        pick: int,
        acknowledged: list[int],
        length: int,
        stored: str | None,
        crash: bool,
    ) -> None:
        """What left is stored under the names of the sources before the owner knows of the merge."""
        self.a_bucket_is_filled_and_sealed(batch, 0, 0)
        self.plan_a_merge(pick, length)
        self.rows_come_and_go(batch, 0, pick, acknowledged)
        if stored == "checkpoint":
            self.checkpoint()
        elif stored == "progress":
            self.a_bucket_is_filled_and_sealed(batch, 0, 0)
        if self.planned:
            self.commit_a_merge(pick, None, False)
        if crash:
            self.crash()
        else:
            self.rows_come_and_go(batch, 0, pick, acknowledged)
            self.the_owner_learns(0, bool(pick % 2))

    # ---- step by step

    @precondition(lambda self: len(self.topic.tip.live) > 1 and len(self.planned) < 3)
    @rule(pick=picks, length=st.sampled_from((2, 2, 3, 5)))
    def plan_a_merge(self, pick: int, length: int) -> None:
        runs = merges.runs(self.topic, length)
        if runs:
            self.planned.append(merges.plan(self.topic, runs[pick % len(runs)]))

    @precondition(lambda self: self.planned)
    @rule(pick=picks, ahead_ms=st.sampled_from((None, None, 0, 500, FAR_MS)), settled=st.booleans())
    def commit_a_merge(self, pick: int, ahead_ms: int | None, settled: bool) -> None:
        """`ahead_ms`: None when the owner does not learn of it at once."""
        planned = self.planned.pop(pick % len(self.planned))
        live = {bucket.object.name: bucket for bucket in self.topic.tip.live}
        reason = merges.commit(self.topic, planned)
        may = all(name in live and not live[name].quarantined for name in planned.sources)
        # Sealed buckets may have come between them.
        assert reason is None or not may or "lie between" in reason, reason
        assert reason is not None or may
        if reason is None:
            self.merged += 1
            if ahead_ms is not None:
                self.the_owner_learns(ahead_ms, settled)

    @precondition(lambda self: self.merged)
    @rule(ahead_ms=st.sampled_from((0, 500, FAR_MS)), settled=st.booleans())
    def the_owner_learns(self, ahead_ms: int, settled: bool) -> None:
        if settled:
            self.passing(self.topic.pass_all)
        merges.adopt(self.topic, ahead_ms=ahead_ms)

    @precondition(lambda self: len(self.topic.tip.live) > 1)
    @rule(ahead_ms=st.sampled_from((0, 500, FAR_MS)), settled=st.booleans())
    def everything_is_merged(self, ahead_ms: int, settled: bool) -> None:
        merges.adopt(self.topic)
        live = [bucket for bucket in self.topic.tip.live if not bucket.quarantined]
        if len(live) > 1 and merges.runs(self.topic, len(live)):
            planned = merges.plan(self.topic, merges.runs(self.topic, len(live))[0])
            assert merges.commit(self.topic, planned) is None
            self.the_owner_learns(ahead_ms, settled)

    # ---- before what the manifest says is relied on, the owner learns what else it says

    @rule()
    def drop_empty_buckets(self) -> None:
        merges.adopt(self.topic)
        super().drop_empty_buckets()

    @precondition(lambda self: self.topic.core.index.sealed)
    @rule(pick=picks, really=st.sampled_from((False, True)))
    def a_bucket_is_damaged(self, pick: int, really: bool) -> None:
        merges.adopt(self.topic)
        if self.topic.core.index.sealed:
            super().a_bucket_is_damaged(pick, really)

    def teardown(self) -> None:
        if hasattr(self, "topic"):
            merges.adopt(self.topic)
        super().teardown()
