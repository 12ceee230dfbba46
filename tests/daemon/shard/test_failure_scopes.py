"""What fails costs its own scope: a topic itself, a shard itself; the streams of all others go on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from daemon.core.decisions.topic_state import TopicState
from daemon.errors import Corruption, InvariantViolated, NotOwner, OutcomeUnknown, Unavailable
from daemon.group_commit.daemon_log import DaemonLog
from daemon.owner import heartbeat
from daemon.owner.takeover import Fences, Takeover
from daemon.owner.traces import Traces
from daemon.runtime import due_loop
from daemon.runtime.failure_scope import Failures, ShardLost, TopicFailed
from daemon.shard.checkpointing import Checkpointing
from daemon.shard.shard import ServedShard
from daemon.topic import topic_manifests
from storage_backends import commit
from storage_backends.formats import names
from storage_backends.formats.manifest import LogForm
from tests._support.bad_text import put_bad_successor, with_bad_text
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver
from tests._support.fault_store import Fault

SHARDS = 4
TOPICS = 100
SEVERAL = (f"daemon.shards={SHARDS}", "collection.interval_s=86400")


def topic_of(shard: int, number: int = 0) -> str:
    """The `number`-th topic that belongs to the shard."""
    found = (f"topic-{each}" for each in range(10_000) if names.shard_of(f"topic-{each}", SHARDS) == shard)
    return [next(found) for _ in range(number + 1)][-1]


def metric(daemon: Daemon, name: str, **labels: str) -> float:
    return daemon.metrics.registry.get_sample_value(name, labels) or 0.0


class Traffic:
    """Topics with a stream each. `check`: what is added to each now reaches its stream, which never ended."""

    def __init__(self, daemon: Daemon, receivers: dict[str, Receiver]) -> None:
        self._daemon = daemon
        self._receivers = receivers
        self._ledger = 100

    @classmethod
    async def on(cls, daemon: Daemon, topics: Iterator[str] | list[str]) -> Traffic:
        return cls(daemon, {topic: await daemon.receiver(topic) for topic in topics})

    async def check(self) -> None:
        self._ledger += 1
        await asyncio.gather(*(self._daemon.add(topic, self._ledger, range(3), 50) for topic in self._receivers))
        wanted = {(self._ledger, entry) for entry in range(3)}
        for topic, receiver in self._receivers.items():
            await self._daemon.until(lambda receiver=receiver: wanted <= receiver.positions, timeout_s=30)  # type: ignore[misc]
            assert receiver.ended is None, topic
        assert self._daemon.engine.health.serving


def breaks(monkeypatch: pytest.MonkeyPatch, topic: str, *, times: int) -> list[float]:
    """Passing due rows of the topic breaks an invariant so many times; when it did."""
    pass_due = TopicState.pass_due
    broken: list[float] = []

    def broken_pass_due(core: TopicState, now_ms: int, limit: int) -> int:
        if core.name == topic and len(broken) < times:
            broken.append(asyncio.get_running_loop().time())
            raise InvariantViolated("a row is waiting twice")
        return pass_due(core, now_ms, limit)

    monkeypatch.setattr(TopicState, "pass_due", broken_pass_due)
    return broken


# ---- a topic


async def test_a_topic_whose_manifest_makes_no_sense_is_refused_by_name_until_it_is_mended_and_nobody_else_notices(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    damaged = topic_of(2)
    await one.add(damaged, 1, range(5), 3_600_000)
    traffic = await Traffic.on(one, [f"topic-{number}" for number in range(TOPICS) if f"topic-{number}" != damaged])
    own = await one.receiver(damaged)
    key = put_bad_successor(machines.store, names.topic_manifest_prefix(2, names.topic_id(damaged)), damaged)
    written = len(machines.keys("/manifest/"))
    with pytest.raises(OutcomeUnknown):
        await one.call(one.engine.requests.seal(damaged))
    await one.until(lambda: own.ended is not None)
    assert isinstance(own.ended, Unavailable), "its stream may come again: only then it is told of the damage"
    await one.until(lambda: bool(one.shards[2].loading.damaged))
    for _ in range(3):
        await traffic.check()
        with pytest.raises(Corruption, match=f"topic {damaged}: .*{key}.*topic is not UTF-8") as refused:
            await one.add(damaged, 2, range(5))
        assert refused.value.of_topic
        await asyncio.sleep(20)
    assert len(machines.keys("/manifest/")) == written, "it is not claimed again and again"
    machines.store.delete(key)
    await one.until(lambda: not one.shards[2].loading.damaged)
    again = await one.receiver(damaged)
    await one.add(damaged, 2, range(5), 50)
    await again.received(5)
    assert one.topic(damaged).core.indexes.present_rows == 10
    await traffic.check()
    assert metric(one, "tarry_shards_lost_total", cause="damaged") == 0


async def test_a_broken_invariant_in_the_wake_of_a_topic_costs_that_topic_its_streams_and_nothing_else(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", *SEVERAL, "journal.checkpoint_slots=7")
    failing = topic_of(1)
    traffic = await Traffic.on(one, [f"topic-{number}" for number in range(20) if f"topic-{number}" != failing])
    own = await one.receiver(failing)
    await one.add(failing, 1, range(10), 50)
    rows = await own.received(10)
    await own.acknowledge(rows[:4])
    await traffic.check()
    broken = breaks(monkeypatch, failing, times=1)
    await one.add(failing, 2, range(10), 200)
    await one.until(lambda: own.ended is not None)
    assert isinstance(own.ended, TopicFailed)
    again = await one.receiver(failing)
    await again.received(16)
    assert len(broken) == 1
    assert again.positions == {(1, entry) for entry in range(4, 10)} | {(2, entry) for entry in range(10)}
    await again.acknowledge(again.rows)
    await traffic.check()
    assert metric(one, "tarry_topics_failed_total") == 1
    assert len(one.shards) == SHARDS


async def test_a_topic_that_fails_again_and_again_is_loaded_later_each_time(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    failing = topic_of(1)
    traffic = await Traffic.on(one, [topic_of(1, 1), topic_of(1, 2), topic_of(3)])
    broken = breaks(monkeypatch, failing, times=8)
    await one.add(failing, 1, range(10), 50)
    await one.until(lambda: len(broken) == 8)
    await traffic.check()
    between_s = [later - earlier for earlier, later in itertools.pairwise(broken)]
    for least_s, found_s in zip((0, 1, 2, 4, 8, 16, 30), between_s, strict=True):
        assert least_s - 0.01 <= found_s < least_s + 3
    with pytest.raises(TopicFailed, match=failing):
        await one.add(failing, 2, range(5))
    await one.until(lambda: failing in one.shards[1].topics)
    again = await one.receiver(failing)
    await again.received(10)


async def test_a_topic_that_cannot_be_loaded_by_a_bug_is_refused_meanwhile_and_the_others_are_served(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    failing = topic_of(1)
    await one.add(failing, 1, range(10), 3_600_000)
    one.kill()
    apply = TopicState.apply

    def broken_apply(core: TopicState, *args: Any, **named: Any) -> None:
        if core.name == failing:
            raise KeyError("what is not there")
        apply(core, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(TopicState, "apply", broken_apply)
        two = await machines.daemon("one", *SEVERAL).start()
        await two.until(lambda: bool(two.shards) and bool(two.shards[1].loading.failing))
        traffic = await Traffic.on(two, [topic_of(shard, 1) for shard in range(SHARDS)])
        for _ in range(3):
            with pytest.raises(TopicFailed, match=failing):
                await two.add(failing, 2, range(5))
            await traffic.check()
            await asyncio.sleep(10)
    await two.until(lambda: not two.shards[1].loading.failing)
    await two.add(failing, 2, range(5), 3_600_000)
    assert two.topic(failing).core.indexes.present_rows == 15
    await traffic.check()


async def test_a_checkpoint_never_leaves_out_a_topic_that_is_being_loaded_again(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed_while_checkpoints_are_due(machines, monkeypatch)


async def failed_while_checkpoints_are_due(machines: EngineFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await machines.served_by("one", *SEVERAL, "journal.checkpoint_slots=3")
    failing, other = topic_of(1), topic_of(1, 1)
    await one.add(failing, 1, range(10), 3_600_000)
    await one.add(failing, 2, range(1), 100)
    breaks(monkeypatch, failing, times=1)
    held = one.pause("get_with_metadata", "logs/")
    await held.reached()
    for ledger in range(12):
        await one.add(other, ledger, range(2), 3_600_000)
    one.kill()
    two = await machines.served_by("one", *SEVERAL)
    assert two.topic(failing).core.indexes.present_rows == 11


async def test_what_was_staged_when_a_topic_failed_is_answered_and_there_when_it_is_loaded_again(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    failing = topic_of(1)
    await one.add(failing, 1, range(10), 3_600_000)
    held = one.pause("put_if_absent", "logs/")
    adding = one.add(failing, 2, range(5), 3_600_000)
    await held.reached()
    topic = one.topic(failing)
    one.context.run(topic.failed, InvariantViolated("a row is waiting twice"))
    with pytest.raises(TopicFailed):
        topic.slots.check_accepting()
    held.release()
    assert (await adding).accepted == 5
    await one.until(lambda: failing in one.shards[1].topics)
    assert one.topic(failing) is not topic
    assert one.topic(failing).core.indexes.present_rows == 15


# ---- a shard


async def test_a_shard_whose_manifest_makes_no_sense_costs_that_shard_until_it_is_mended(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    traffic = await Traffic.on(one, [topic_of(shard, number) for shard in (0, 1, 3) for number in range(5)])
    own = await one.receiver(topic_of(2))
    await one.add(topic_of(2), 1, range(5), 3_600_000)
    key = put_bad_successor(machines.store, names.shard_manifest_prefix(2), "one:1")
    one.context.run(one.shards[2].checkpoints._begin)
    await one.until(lambda: 2 not in one.shards)
    assert isinstance(own.ended, ShardLost), "its stream may come again: only then it is told of the damage"
    written = len(machines.keys("/manifest/"))
    for _ in range(3):
        await traffic.check()
        with pytest.raises(Corruption, match=rf"shard 2, which topic {topic_of(2)} belongs to, .*address is not UTF-8"):
            await one.add(topic_of(2), 2, range(5))
        await asyncio.sleep(20)
    assert len(machines.keys("/manifest/")) == written
    machines.store.delete(key)
    await one.until(lambda: 2 in one.shards)
    again = await one.receiver(topic_of(2))
    await one.add(topic_of(2), 2, range(5), 50)
    await again.received(5)
    await traffic.check()


async def test_a_shard_manifest_that_makes_no_sense_at_the_start_refuses_its_shard_alone(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    await one.stop()
    newest = machines.keys(names.shard_manifest_prefix(2))[-1]
    machines.store.put(newest, with_bad_text(machines.store.get(newest), b"one"))
    two = await machines.served_by("two", *SEVERAL)
    assert sorted(two.shards) == [0, 1, 3]
    assert "shard 2 is damaged" in two.engine.health.reason
    assert not two.engine.failed.done()


async def test_a_shard_that_fails_is_taken_again_while_the_others_are_served(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    traffic = await Traffic.on(one, [topic_of(shard) for shard in (0, 1, 3)])
    await one.add(topic_of(2), 1, range(5), 3_600_000)
    lost_at_s: list[float] = []
    for _ in range(4):
        lost = one.shards[2]
        one.context.run(lost.lose, RuntimeError("a bug"))
        lost_at_s.append(machines.loop.time())
        await one.until(lambda: 2 not in one.shards)
        await traffic.check()
        await one.until(lambda lost=lost: one.shards.get(2) not in (None, lost))  # type: ignore[misc]
        assert one.shards[2].epoch == lost.epoch + 1
    between_s = [later - earlier for earlier, later in itertools.pairwise(lost_at_s)]
    assert between_s[0] < 3
    assert between_s[2] >= 2, "each time later"
    await one.until(lambda: topic_of(2) in one.shards[2].topics)
    assert one.topic(topic_of(2)).core.indexes.present_rows == 5
    await traffic.check()
    assert metric(one, "tarry_shards_lost_total", cause="failed") == 4


def commit_on(machines: EngineFixture, daemon: Daemon, shard: int, operation: Any) -> None:
    """As another daemon would."""
    commit.commit(
        topic_manifests.shard_log(daemon.environment, shard),
        operation,
        writer="two",
        created_ms=machines.now_ms(),
        deadline_s=1.0,
    )


async def test_segments_that_were_in_memory_when_a_shard_was_lost_are_read_again(machines: EngineFixture) -> None:
    # The keys of a topic are numbered anew whenever it is loaded: the first ledger is gone by then.
    one = await machines.served_by("one", *SEVERAL)
    topic, other = topic_of(1), topic_of(2)
    receiver = await one.receiver(topic)
    beside = await one.receiver(other)
    await one.add(topic, 3, range(10), 0)
    await receiver.acknowledge(await receiver.received(10))
    for ledger in (5, 1):
        await one.add(topic, ledger, range(10), 10_000)
        await one.call(one.engine.requests.seal(topic))
    await one.until(lambda: one.topic(topic).core.indexes.loaded_rows == 20)
    epoch = one.shards[1].epoch
    one.shards[1].lose(InvariantViolated("a checkpoint that makes no sense"))
    await one.until(lambda: 1 in one.shards and one.shards[1].epoch > epoch and topic in one.shards[1].topics)
    again = await one.receiver(topic)
    await one.until(lambda: {(5, 9), (1, 9)} <= again.positions, timeout_s=60)
    assert again.positions >= {(ledger, entry) for ledger in (5, 1) for entry in range(10)}
    assert beside.ended is None


async def taken_by_two(machines: EngineFixture, two: Daemon, shard: int, *, closes: bool) -> None:
    """Another daemon fences the owner of every shard, and claims this one alone."""
    logs = two.environment.open_logs(LogForm.OBJECTS)
    living = await two.call(DaemonLog.opened(logs, two.environment, lost=lambda error: None))
    manifests = [topic_manifests.shard_log(two.environment, each) for each in range(SHARDS)]
    takeover = Takeover(manifests, living, two.environment, Traces(machines.store, logs, lambda: ()))
    seen = manifests[shard].read_tip()
    await two.call(takeover.claim(shard, seen, Fences(logs, two.environment), frozenset({""})))
    if closes:
        await two.call(living.close())


async def test_a_daemon_that_lost_its_log_waits_for_who_took_a_shard_and_sends_its_callers_there(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for shard in range(SHARDS):
        await one.add(topic_of(shard), 1, range(5), 3_600_000)
    living = asyncio.ensure_future(beats(machines, "two", machines.shard_tip(2).ranges[-1].log_id))
    epochs = {number: shard.epoch for number, shard in one.shards.items()}
    two = machines.daemon("two", *SEVERAL)
    await taken_by_two(machines, two, 2, closes=False)
    living.cancel()
    living = asyncio.ensure_future(beats(machines, "two", machines.shard_tip(2).ranges[-1].log_id))
    await one.until(lambda: not one.shards, timeout_s=30)
    await one.until(lambda: "waiting for daemon two" in one.engine.health.reason)
    for _ in range(6):
        for shard in range(SHARDS):
            with pytest.raises(NotOwner) as told:
                await one.add(topic_of(shard), 2, range(5))
            assert told.value.owner_address == "two:1"
        await asyncio.sleep(5)
    location = one.engine.location_of(topic_of(2))
    assert (location.owner_address, location.served_here) == ("two:1", False)
    living.cancel()
    await one.until(lambda: len(one.shards) == SHARDS, timeout_s=60)
    assert one.shards[2].epoch == epochs[2] + 2
    await one.until(lambda: one.engine.loaded)
    for shard in range(SHARDS):
        assert one.topic(topic_of(shard)).core.indexes.present_rows == 5


async def test_a_shard_that_was_taken_into_a_log_that_was_closed_is_taken_again_at_once(
    machines: EngineFixture,
) -> None:
    """So ends a candidate that did not get every shard."""
    one = await machines.served_by("one", *SEVERAL)
    two = await machines.daemon("two", *SEVERAL).start()
    await taken_by_two(machines, two, 2, closes=True)
    await one.until(lambda: not one.shards, timeout_s=30)
    await one.until(lambda: len({*one.shards, *two.shards}) == SHARDS, timeout_s=5)
    assert not (one.shards and two.shards)
    owner = one if one.shards else two
    for shard in range(SHARDS):
        await owner.add(topic_of(shard), 1, range(5), 3_600_000)


async def test_two_daemons_that_take_shards_from_each_other_come_to_rest_with_every_shard_served_once(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    # Two suspects it wrongly, and takes all; one wakes in the middle, suspects two, and so on.
    two = await machines.daemon("two", *SEVERAL).start()
    one.freeze()
    held = two.pause("put_if_absent", names.shard_manifest_prefix(3))
    await held.reached()
    one.thaw()
    await asyncio.sleep(60)
    held.release()
    await asyncio.sleep(60)
    claims = len(machines.keys("/manifest/"))
    await asyncio.sleep(300)
    assert sorted([*one.shards, *two.shards]) == list(range(SHARDS)), "each is served by one of them"
    assert len(machines.keys("/manifest/")) == claims, "nobody takes anything from anybody any more"


async def beats(machines: EngineFixture, daemon_id: str, log_id: str) -> None:
    """A daemon lives that does nothing else."""
    for sequence in range(1_000):
        beat = heartbeat.Heartbeat(
            daemon_id=daemon_id, address=f"{daemon_id}:1", shards=(), instance="i", sequence=sequence, log_id=log_id
        )
        machines.store.put(names.daemon_key(daemon_id), msgspec.json.encode(beat))
        await asyncio.sleep(heartbeat.INTERVAL_S)


# ---- planted bugs


async def test_a_wake_whose_error_is_everybodys_is_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_loop, "_woken", lambda sleeper, now_ms: sleeper.wake(now_ms))
    one = await machines.served_by("one", *SEVERAL)
    breaks(monkeypatch, topic_of(1), times=1)
    other = await one.receiver(topic_of(3))
    await one.add(topic_of(1), 1, range(10), 50)
    await one.until(lambda: other.ended is not None)
    assert one.engine.failed.done()
    assert one.engine.failed.exception() is not None


async def test_a_checkpoint_that_leaves_out_a_topic_that_is_being_loaded_again_is_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Checkpointing._write

    async def write_without_looking(checkpoints: Checkpointing) -> None:
        shard = cast(ServedShard, checkpoints._shard)
        reloading, shard.reloading = shard.reloading, {}
        try:
            await write(checkpoints)
        finally:
            shard.reloading = reloading

    async def try_without_looking(checkpoints: Checkpointing) -> None:
        # Neither waits for the other.
        await write_without_looking(checkpoints)

    monkeypatch.setattr(Checkpointing, "_try", try_without_looking)
    with pytest.raises(AssertionError, match="== 11"):
        await failed_while_checkpoints_are_due(machines, monkeypatch)


def test_what_fails_once_is_tried_at_once_and_later_each_time_after_that_until_it_is_forgotten() -> None:
    failures = Failures()
    assert [failures.delay_s("t", now_s=second) for second in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert failures.delay_s("other", now_s=9) == 0
    assert failures.delay_s("t", now_s=1_000) == 0


async def test_a_daemon_that_loses_its_last_shard_while_it_looks_at_another_does_not_say_that_it_serves(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    one.context.run(one.shards[2].lose, RuntimeError("a bug"))
    held = one.pause("get_with_metadata", names.shard_manifest_prefix(2), then=Fault.FAIL_BEFORE)
    await held.reached()
    said: list[tuple[bool, int]] = []
    one.engine.on_health_change(lambda health: said.append((health.serving, len(one.shards))))
    for shard in list(one.shards.values()):
        one.context.run(shard.lose, RuntimeError("a bug"))
    await one.until(lambda: not one.shards)
    held.release()
    await one.until(lambda: len(one.shards) == SHARDS)
    assert (True, 0) not in said
