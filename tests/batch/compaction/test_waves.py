"""The order of runs and how often a topic is planned."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batch.compaction.plan import Run
from batch.compaction.waves import Waves, Work
from batch.engine.root import TopicPlace
from storage_backends.formats.manifest import LiveBucket, ObjectReference

FLIGHTS, TRAINS = TopicPlace(0, "flights"), TopicPlace(1, "trains")


def run(name: str, sources: int = 2, size_bytes: int = 100) -> Run:
    live = LiveBucket(
        object=ObjectReference(name=name, base=1, size_bytes=size_bytes // sources, sha256=b""),
        rows=1,
        first_ledger_id=1,
        last_ledger_id=1,
        min_deliver_at_ms=0,
        max_deliver_at_ms=0,
        hash_low=0,
        hash_high=0,
    )
    named = [dataclasses.replace(live, object=dataclasses.replace(live.object, name=f"{name}{n}")) for n in "abcdef"]
    return Run(sources=tuple(named[:sources]), rows=sources, size_bytes=size_bytes)


def names(wave: list[Work]) -> list[str]:
    return [work.run.sources[0].object.name[:-1] for work in wave]


def test_the_most_useful_runs_of_all_topics_come_first() -> None:
    waves = Waves(attempts_max=3)
    waves.offer(FLIGHTS, [run("good", 4), run("poor", 2, 1000)])
    waves.offer(TRAINS, [run("best", 6)])
    assert names(waves.next_wave(2)) == ["best", "good"]
    assert names(waves.next_wave(2)) == ["poor"]
    assert waves.next_wave(2) == []


def test_what_does_not_fit_the_limit_on_bytes_is_passed_over_for_what_does() -> None:
    waves = Waves(attempts_max=3, bytes_max=250)
    waves.offer(FLIGHTS, [run("a", 6, 200), run("b", 3, 100), run("c", 2, 50)])
    assert names(waves.next_wave(3)) == ["a", "c"]
    assert names(waves.rest()[0]) == ["b"]


def test_a_topic_is_planned_again_when_nothing_of_it_is_under_way_and_what_waits_is_withdrawn() -> None:
    waves = Waves(attempts_max=2)
    waves.offer(FLIGHTS, [run("a", 6), run("b", 5), run("c", 4)])
    waves.offer(TRAINS, [run("t", 2)])
    first, second = waves.next_wave(2)
    assert waves.refused(first)
    assert waves.to_plan_again() == []
    assert names(waves.next_wave(2)) == ["t"], "the others of the topic are withdrawn"
    waves.settled(second)
    assert waves.to_plan_again() == [FLIGHTS]
    waves.offer(FLIGHTS, [run("d")])
    assert waves.to_plan_again() == []


def test_the_last_attempt_is_refused_for_good_and_the_others_of_the_topic_go_on() -> None:
    waves = Waves(attempts_max=1)
    waves.offer(FLIGHTS, [run("a", 6), run("b", 5)])
    (first,) = waves.next_wave(1)
    assert not waves.refused(first)
    assert waves.to_plan_again() == []
    assert names(waves.next_wave(1)) == ["b"]


def test_a_run_that_is_refused_before_it_is_read_leaves_its_bytes_to_others() -> None:
    waves = Waves(attempts_max=2, bytes_max=250)
    waves.offer(FLIGHTS, [run("a", 6, 200)])
    waves.offer(TRAINS, [run("t", 3, 100)])
    (refused,) = waves.next_wave(2)
    waves.refused(refused, read=False)
    assert names(waves.next_wave(2)) == ["t"]
    waves.offer(FLIGHTS, [run("again", 6, 200)])
    assert waves.next_wave(2) == []
    assert names(waves.rest()[0]) == ["again"]


def test_a_run_that_is_refused_at_the_last_attempt_leaves_its_bytes_to_its_topic_too() -> None:
    waves = Waves(attempts_max=1, bytes_max=250)
    waves.offer(FLIGHTS, [run("a", 6, 200), run("b", 3, 100)])
    (refused,) = waves.next_wave(2)
    assert not waves.refused(refused, read=False)
    assert names(waves.next_wave(2)) == ["b"]


def test_what_the_limit_on_bytes_left_is_withdrawn_when_its_topic_is_planned_again() -> None:
    waves = Waves(attempts_max=2, bytes_max=250)
    waves.offer(FLIGHTS, [run("a", 6, 200), run("b", 3, 100)])
    (refused,) = waves.next_wave(2)
    assert waves.refused(refused)
    waves.offer(FLIGHTS, [run("a", 6, 200)])
    assert waves.next_wave(2) == []
    assert names(waves.rest()[0]) == ["a"]


class WavesComeToAnEnd(RuleBasedStateMachine):
    """Whatever is refused: no run is under way twice, and a topic is planned as often as it may be, at most."""

    ATTEMPTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.waves = Waves(attempts_max=self.ATTEMPTS)
        self.planned = {FLIGHTS: 1, TRAINS: 1}
        self.under_way: list[Work] = []
        for place in self.planned:
            self.waves.offer(place, [run(f"{place.topic_id}-{n}-") for n in range(4)])

    @rule(size=st.integers(1, 3))
    def begin(self, size: int) -> None:
        self.under_way += self.waves.next_wave(size)

    @precondition(lambda self: self.under_way)
    @rule()
    def settle(self) -> None:
        self.waves.settled(self.under_way.pop())

    @precondition(lambda self: self.under_way)
    @rule()
    def refuse(self) -> None:
        work = self.under_way.pop()
        assert self.waves.refused(work) == (self.planned[work.topic] < self.ATTEMPTS)

    @rule(runs=st.integers(0, 3))
    def plan_again(self, runs: int) -> None:
        for place in self.waves.to_plan_again():
            assert not [work for work in self.under_way if work.topic == place]
            self.planned[place] += 1
            self.waves.offer(place, [run(f"{place.topic_id}-again-{n}-") for n in range(runs)])

    @invariant()
    def holds(self) -> None:
        assert max(self.planned.values()) <= self.ATTEMPTS
        assert len({id(work) for work in self.under_way}) == len(self.under_way)
        waiting = self.waves.rest()[1]
        assert self.waves.waiting.runs == len(waiting)
        assert not {id(work) for work in self.under_way} & {id(work) for work in waiting}


TestWavesComeToAnEnd = WavesComeToAnEnd.TestCase
