"""Every order of two committers, a collector and a network that loses answers, within bounds; and every planted bug is
found in one of them.

Invariants, after each run: a reported commit is in the lineage of the tip, nothing is applied twice, a failure that is
certain was not applied, and the newest manifest tells the same history as its lineage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from storage_backends import commit
from storage_backends.formats import names
from storage_backends.object_store import StoreError
from tests._support import parts
from tests.planted import registry
from tests.storage_backends._support import interleavings
from tests.storage_backends._support.interleavings import Bounds, Broken, Choices, Run, SteppedStore
from tests.storage_backends._support.small_manifest import PREFIX, Append, Words, log_of, newest, put


def commits_of(
    run: Run, name: str, count: int, reported: list[str], failed: list[str], *, listed: bool
) -> Callable[[], None]:
    """A committer: its commits one after the other, each behind the tip of the one before, with a rest between;
    `listed`: each behind the highest number that a listing showed, which is read once.
    """

    def act() -> None:
        log, tip = log_of(SteppedStore(run), run.clock, name=name), None
        for number in range(count):
            word = f"{name}{number}"
            if tip is not None:
                run.step("rest")
            try:
                if listed:
                    tip = _listed_tip(log)
                tip = put(log, Append(word), warm=tip, just_read=listed, deadline_s=5.0)
            except commit.CommitOutcomeUnknown:
                return
            except StoreError:
                failed.append(word)
                return
            if word not in tip.manifest.words:
                raise Broken(f"{word} was reported with a tip that does not have it: {tip.manifest.words}")
            reported.append(word)

    return act


def _listed_tip(log: commit.ManifestLog[Words]) -> commit.Tip[Words] | None:
    listed_at = log.monotonic()
    highest = max(names.number_of(entry.key) for entry in log.store.list(PREFIX))
    return log.read_at(highest, listed_at)


def explore(bounds: Bounds, commits: Mapping[str, int], *, listed: bool = False) -> int:
    """Makes every run; how many there were. Raises Broken with the steps that led to it."""

    def once(choices: Choices) -> None:
        run = Run(choices, bounds, PREFIX)
        reported: list[str] = []
        failed: list[str] = []
        before = put(log_of(run.store, run.clock, name="before"), Append("before"))
        assert before.number == 1
        try:
            run.run(
                {name: commits_of(run, name, count, reported, failed, listed=listed) for name, count in commits.items()}
            )
            check(newest(run.store), ["before", *reported], failed)
        except Broken as broken:
            broken.add_note(" | ".join(run.trace))
            raise

    return interleavings.explore(once)


def check(tip: Words, reported: list[str], failed: list[str]) -> None:
    missing = set(reported) - set(tip.words)
    if missing:
        raise Broken(f"reported, and not in the lineage: {missing}")
    if len(set(tip.words)) < len(tip.words):
        raise Broken(f"applied twice: {tip.words}")
    if set(failed) & set(tip.words):
        raise Broken(f"reported as failed, and applied: {failed}")
    if len(tip.head.lineage) != len(tip.words) or len(tip.words) != tip.head.number:
        raise Broken(f"{tip.head.number} manifests, words {tip.words}, lineage {tip.head.lineage}")


# ---- planted bugs: each breaks one rule of the primitive


class WithoutHead(commit._Commit[Words]):
    """R2 broken: an answer other than success is taken for somebody else's number, and the work begins anew."""

    def _holder(self, key: str) -> str | None:
        self._commit_id = self._log.new_id()
        return ""


class AbsenceIsEvidence(commit._Commit[Words]):
    """R2 broken: a manifest that HEAD does not see has failed."""

    def _holder(self, key: str) -> str | None:
        holder = super()._holder(key)
        if holder is None:
            self._uncertain = False
            self._deadline_at = 0.0
        return holder


class GivesUpTheNumber(commit._Commit[Words]):
    """R1 broken: a number whose PUT stays without an answer is left, and a new commit is made instead."""

    def _holder(self, key: str) -> str | None:
        holder = super()._holder(key)
        if holder is None:
            self._commit_id = self._log.new_id()
            self._begun_anew = True
        return holder

    def _put(self, number: int, body: bytes, begun_at: float) -> commit._Outcome:
        self._begun_anew = False
        return super()._put(number, body, begun_at)

    def _pause(self, delay_s: float, error: StoreError) -> float:
        if getattr(self, "_begun_anew", False):
            self._begun_anew = False
            raise _BeginAnew
        return super()._pause(delay_s, error)

    def run(self, warm: commit.Tip[Words] | None, *, just_read: bool) -> commit.Tip[Words]:
        while True:
            try:
                return super().run(warm, just_read=just_read)
            except _BeginAnew:
                continue


class _BeginAnew(Exception):
    pass


class WithoutVerify(commit._Commit[Words]):
    """R3 broken: what was created is committed."""

    def _put(self, number: int, body: bytes, begun_at: float) -> commit._Outcome:
        outcome = super()._put(number, body, begun_at)
        return commit._Outcome.CREATED if outcome is commit._Outcome.VERIFY else outcome


class WithoutLineage(commit._Commit[Words]):
    """Nobody looks whether the commit is among the tip's ancestors."""

    def _has_landed(self, tip: commit.Tip[Words]) -> bool:
        return self._operation.landed(tip.manifest)


ONE, TWO = {"a": 1, "b": 1}, {"a": 2, "b": 1}
IN_THE_GATE = [
    (Bounds(preemptions=3, lost_puts=0, collections=1), TWO),
    (Bounds(preemptions=2, lost_puts=0, collections=1), {"a": 2, "b": 2}),
    (Bounds(preemptions=1, lost_puts=1, collections=1), TWO),
    (Bounds(preemptions=3, lost_puts=1, collections=0), ONE),
    (Bounds(preemptions=1, lost_puts=1, failed_heads=1, collections=1), ONE),
]
IN_A_LONG_RUN = [
    (Bounds(preemptions=2, lost_puts=1, collections=1), TWO),
    (Bounds(preemptions=1, lost_puts=2, collections=1), TWO),
    (Bounds(preemptions=2, lost_puts=2, failed_heads=1, collections=1), ONE),
]
BUGS = [WithoutHead, AbsenceIsEvidence, GivesUpTheNumber, WithoutVerify, WithoutLineage]


@pytest.mark.parametrize(("bounds", "commits"), parts.first_and_rotating(IN_THE_GATE))
def test_in_every_order_a_reported_commit_is_in_the_lineage_and_none_is_applied_twice(
    bounds: Bounds, commits: Mapping[str, int]
) -> None:
    assert explore(bounds, commits) > 100, "the bounds leave room for what they are to try"


@pytest.mark.parametrize(
    ("bounds", "commits"),
    parts.first_and_rotating(
        [(Bounds(preemptions=2, lost_puts=0), TWO), (Bounds(preemptions=2, lost_puts=1, collections=1), ONE)]
    ),
)
def test_the_same_holds_where_the_number_of_the_tip_was_listed_and_it_is_read_once(
    bounds: Bounds, commits: Mapping[str, int]
) -> None:
    assert explore(bounds, commits, listed=True) > 100


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bounds", "commits"), IN_A_LONG_RUN)
def test_in_every_order_within_wider_bounds_the_same_holds(bounds: Bounds, commits: Mapping[str, int]) -> None:
    assert explore(bounds, commits) > 10_000


@pytest.mark.rotating
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_commit_is_found(
    bug: type[commit._Commit[Words]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_Commit", bug)
    with pytest.raises(Broken):
        explore(Bounds(), TWO)


@pytest.mark.parametrize(
    ("limit", "listed"), [("WARM_MAX_S", False), ("VERIFY_AFTER_S", False), ("VERIFY_AFTER_S", True)]
)
def test_a_limit_on_pauses_that_is_taken_away_is_missed(
    limit: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, limit, float("inf"))
    with pytest.raises(Broken):
        explore(Bounds(preemptions=2, lost_puts=0), {"a": 2, "b": 2}, listed=listed)


registry.register("orders of two committers", BUGS)
