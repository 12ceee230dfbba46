"""Every order of two committers, a collector and a network that loses answers, within bounds; and every planted bug is
found in one of them.

Each operation of the store is a step. Before each step the running committer may be pre-empted, garbage may be
collected (a day passes, and every manifest but the last is deleted), a held back PUT may arrive; and a step may lose
its answer. How often each of these happens in one run is bounded, all runs within the bounds are made, by depth-first
search. `--hypothesis-profile=search` makes the runs of wider bounds too.

Invariants, after each run: a reported commit is in the lineage of the tip, nothing is applied twice, a failure that is
certain was not applied, and the newest manifest tells the same history as its lineage.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from storage_backends import commit
from storage_backends.memory import MemoryStore
from storage_backends.object_store import (
    AlreadyExists,
    ListedObject,
    ObjectInfo,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
)
from tests.storage_backends.small_manifest import PREFIX, Append, Words, log_of, newest, put
from tests.support.virtual_clock import VirtualClock

DAY_S = 86_400.0
HANDOVER_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How often each kind of trouble may happen in one run."""

    preemptions: int = 2
    lost_puts: int = 1
    failed_heads: int = 0
    collections: int = 1


class Broken(AssertionError):
    """An invariant does not hold."""


class Choices:
    """The decisions of one run: first those of `prefix`, then always the first option."""

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self._prefix = prefix
        self.made: list[tuple[int, int]] = []

    def pick(self, options: int) -> int:
        place = len(self.made)
        choice = self._prefix[place] if place < len(self._prefix) else 0
        self.made.append((choice, options))
        return choice

    def next_prefix(self) -> tuple[int, ...] | None:
        """The decisions of the next run in depth-first order; None after the last."""
        while self.made:
            choice, options = self.made.pop()
            if choice + 1 < options:
                return (*(each for each, _ in self.made), choice + 1)
        return None


class Run:
    """One run: the store, the clock and whose turn it is. A thread runs only while it holds the turn."""

    def __init__(self, choices: Choices, bounds: Bounds) -> None:
        self._choices = choices
        self.store = MemoryStore()
        self.clock = VirtualClock()
        self.trace: list[str] = []
        self._preemptions = bounds.preemptions
        self._lost_puts = bounds.lost_puts
        self._failed_heads = bounds.failed_heads
        self._collections = bounds.collections
        self._held_back: Callable[[], None] | None = None
        self._turns: dict[str, threading.Semaphore] = {}
        self._done = threading.Semaphore(0)
        self._failures: list[BaseException] = []

    def run(self, actors: Mapping[str, Callable[[], None]]) -> None:
        self._turns = {name: threading.Semaphore(0) for name in actors}
        threads = [threading.Thread(target=self._act, args=(name, act), name=name) for name, act in actors.items()]
        for thread in threads:
            thread.start()
        self._hand_over(next(iter(actors)))
        if not self._done.acquire(timeout=HANDOVER_TIMEOUT_S):
            raise TimeoutError(f"a run does not end: {self.trace}")
        for thread in threads:
            thread.join(HANDOVER_TIMEOUT_S)
        if self._failures:
            raise self._failures[0]
        self._arrive()

    def _act(self, name: str, act: Callable[[], None]) -> None:
        self._wait(name)
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            self._failures.append(error)
        del self._turns[name]
        if self._turns:
            self._hand_over(next(iter(self._turns)))
        else:
            self._done.release()

    def _wait(self, name: str) -> None:
        if not self._turns[name].acquire(timeout=HANDOVER_TIMEOUT_S):
            raise TimeoutError(f"{name} never got its turn: {self.trace}")

    def _hand_over(self, name: str) -> None:
        self._turns[name].release()

    def step(self, label: str) -> None:
        """Called by the running committer before an operation: what happens first."""
        name = threading.current_thread().name
        while True:
            options = ["go on"]
            if self._preemptions:
                options += [other for other in self._turns if other != name]
            if self._collections and sum(1 for _ in self.store.list(PREFIX)) > 1:
                options.append("collect")
            if self._held_back is not None:
                options.append("arrive")
            chosen = options[self._choices.pick(len(options))]
            self.trace.append(f"{name}: {label}" if chosen == "go on" else chosen)
            if chosen == "go on":
                return
            if chosen == "collect":
                self._collect()
            elif chosen == "arrive":
                self._arrive()
            else:
                self._preemptions -= 1
                self._hand_over(chosen)
                self._wait(name)

    def _collect(self) -> None:
        self._collections -= 1
        self.clock.now_s += DAY_S
        for entry in sorted(self.store.list(PREFIX), key=lambda entry: entry.key)[:-1]:
            self.store.delete(entry.key)

    def _arrive(self) -> None:
        write, self._held_back = self._held_back, None
        if write is not None:
            write()

    def loses_put(self, write: Callable[[], None]) -> bool:
        """Whether the answer of a PUT is lost; then it has landed, or will arrive later or, at the end, never."""
        if not self._lost_puts or self._held_back is not None:
            return False
        chosen = self._choices.pick(3)
        if not chosen:
            return False
        self._lost_puts -= 1
        self.trace.append(["", "answer lost", "held back"][chosen])
        if chosen == 1:
            write()
        else:
            self._held_back = write
        return True

    def fails_head(self) -> bool:
        if not self._failed_heads or not self._choices.pick(2):
            return False
        self._failed_heads -= 1
        self.trace.append("HEAD fails")
        return True


class SteppedStore(MemoryStore):
    """One committer's view of the store of a run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self._run.step(f"put {key[-2:]}")

        def write() -> None:
            try:
                self._run.store.put_if_absent(key, body, metadata=metadata)
            except AlreadyExists:
                pass

        if self._run.loses_put(write):
            raise OutcomeUnknown(key, "the answer is lost")
        self._run.store.put_if_absent(key, body, metadata=metadata)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        self._run.step(f"get {key[-2:]}")
        return self._run.store.get_with_metadata(key)

    def head(self, key: str) -> ObjectInfo:
        self._run.step(f"head {key[-2:]}")
        if self._run.fails_head():
            raise StoreUnavailable(key, "not now")
        return self._run.store.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        self._run.step("list")
        return self._run.store.list(prefix, start_after=start_after)


def commits_of(run: Run, name: str, count: int, reported: list[str], failed: list[str]) -> Callable[[], None]:
    """A committer: its commits one after the other, each behind the tip of the one before, with a rest between."""

    def act() -> None:
        log, tip = log_of(SteppedStore(run), run.clock, name=name), None
        for number in range(count):
            word = f"{name}{number}"
            if tip is not None:
                run.step("rest")
            try:
                tip = put(log, Append(word), warm=tip, deadline_s=5.0)
            except commit.CommitOutcomeUnknown:
                return
            except StoreError:
                failed.append(word)
                return
            if word not in tip.manifest.words:
                raise Broken(f"{word} was reported with a tip that does not have it: {tip.manifest.words}")
            reported.append(word)

    return act


def explore(bounds: Bounds, commits: Mapping[str, int]) -> int:
    """Makes every run; how many there were. Raises Broken with the steps that led to it."""
    prefix: tuple[int, ...] | None = ()
    for runs in itertools.count():
        if prefix is None:
            return runs
        choices = Choices(prefix)
        run = Run(choices, bounds)
        reported: list[str] = []
        failed: list[str] = []
        before = put(log_of(run.store, run.clock, name="before"), Append("before"))
        assert before.number == 1
        try:
            run.run({name: commits_of(run, name, count, reported, failed) for name, count in commits.items()})
            check(newest(run.store), ["before", *reported], failed)
        except Broken as broken:
            broken.add_note(" | ".join(run.trace))
            raise
        prefix = choices.next_prefix()
    raise AssertionError


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

    def run(self, warm: commit.Tip[Words] | None) -> commit.Tip[Words]:
        while True:
            try:
                return super().run(warm)
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


@pytest.mark.parametrize(("bounds", "commits"), IN_THE_GATE)
def test_in_every_order_a_reported_commit_is_in_the_lineage_and_none_is_applied_twice(
    bounds: Bounds, commits: Mapping[str, int]
) -> None:
    assert explore(bounds, commits) > 100, "the bounds leave room for what they are to try"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bounds", "commits"), IN_A_LONG_RUN)
def test_in_every_order_within_wider_bounds_the_same_holds(
    bounds: Bounds, commits: Mapping[str, int], pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--hypothesis-profile") != "search":
        pytest.skip("a long run: --hypothesis-profile=search")
    assert explore(bounds, commits) > 10_000


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_commit_is_found(
    bug: type[commit._Commit[Words]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_Commit", bug)
    with pytest.raises(Broken):
        explore(Bounds(), TWO)


@pytest.mark.parametrize("limit", ["WARM_MAX_S", "VERIFY_AFTER_S"])
def test_a_limit_on_pauses_that_is_taken_away_is_missed(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, limit, float("inf"))
    with pytest.raises(Broken):
        explore(Bounds(preemptions=2, lost_puts=0), {"a": 2, "b": 2})
