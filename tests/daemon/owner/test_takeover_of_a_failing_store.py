"""A takeover on a store that fails now and then comes to its end: a read that fails costs its own shard a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from daemon.group_commit.daemon_log import DaemonLog
from daemon.owner.candidate import Candidate, ClaimedShards
from daemon.owner.takeover import Fences, Takeover
from daemon.shard.recovery import ShardClaim
from storage_backends.formats import names
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault, seeded
from tests.planted import registry

SHARDS = 16
SEVERAL = (f"daemon.shards={SHARDS}",)
TOPICS = [f"topic-{number}" for number in range(40)]
# After four tries each, where one in three fails, and some answers are lost.
FAILING = {Fault.FAIL_BEFORE: 0.012, Fault.FAIL_AFTER: 0.006}
BACK_S = 60.0
FAR_MS = 3_600_000

Story = Callable[[EngineFixture], Awaitable[None]]
Plant = Callable[[pytest.MonkeyPatch], None]


async def with_rows(machines: EngineFixture, *settings: str) -> None:
    """A daemon has added three rows to each topic, and is dead."""
    one = await machines.served_by("one", *SEVERAL, *settings)
    await asyncio.gather(*(one.add(topic, 1, range(3), FAR_MS) for topic in TOPICS))
    await asyncio.sleep(1)
    one.kill()


async def has_every_row(daemon: Daemon) -> None:
    """Each is there, and is a duplicate therefore."""
    added = await asyncio.gather(*(daemon.add(topic, 1, range(4), FAR_MS) for topic in TOPICS))
    assert [(each.accepted, each.duplicates) for each in added] == [(1, 3)] * len(TOPICS)


async def only_the_shard_that_cannot_be_read_waits(machines: EngineFixture) -> None:
    await with_rows(machines, "journal.checkpoint_slots=1")
    two = machines.daemon("one", *SEVERAL)
    unread = names.shard_of(TOPICS[0], SHARDS) or names.shard_of(TOPICS[1], SHARDS)
    two.script.plan("get_with_metadata", Fault.FAIL_BEFORE, key_part=names.checkpoint_prefix(unread), times=40)
    await two.start()
    await two.serving()
    assert sorted(two.shards) == [number for number in range(SHARDS) if number != unread]
    assert f"shard {unread} is not served here: it cannot be read" in two.engine.health.reason
    first = {number: shard.epoch for number, shard in two.shards.items()}
    await two.until(lambda: unread in two.shards, timeout_s=BACK_S)
    epochs = {number: shard.epoch for number, shard in two.shards.items()}
    assert epochs.pop(unread) > 2, "it was claimed again"
    assert epochs == first == dict.fromkeys(first, 2), "what was won was kept"
    await two.until(lambda: two.engine.loaded)
    await has_every_row(two)


async def everything_comes_back(machines: EngineFixture, seed: int = 0) -> None:
    await with_rows(machines)
    two = machines.daemon("one", *SEVERAL)
    two.decide = seeded(random.Random(seed), FAILING)
    await two.start()
    await two.until(lambda: len(two.shards) == SHARDS and two.engine.health.serving, timeout_s=BACK_S)
    two.decide = two.script
    await two.until(lambda: two.engine.loaded)
    await has_every_row(two)


async def test_a_shard_that_the_store_does_not_give_is_claimed_again_and_the_others_are_served(
    machines: EngineFixture,
) -> None:
    await only_the_shard_that_cannot_be_read_waits(machines)


@pytest.mark.parametrize("seed", range(3))
async def test_a_takeover_comes_to_its_end_though_many_requests_fail(machines: EngineFixture, seed: int) -> None:
    await everything_comes_back(machines, seed)


def a_shard_that_cannot_be_read_gives_all_others_up(patch: pytest.MonkeyPatch) -> None:
    claim_all = Candidate._claim_all

    async def all_or_none(
        self: Candidate, living: DaemonLog, fences: Fences, gone_owners: frozenset[str]
    ) -> ClaimedShards:
        claimed = await claim_all(self, living, fences, gone_owners)
        for error in claimed.unread.values():
            raise error
        return claimed

    patch.setattr(Candidate, "_claim_all", all_or_none)


def a_shard_that_cannot_be_read_is_left_alone(patch: pytest.MonkeyPatch) -> None:
    async def never(self: Candidate, takeover: Takeover, shard: int, gone_owners: frozenset[str]) -> ShardClaim:
        await asyncio.Event().wait()
        raise AssertionError

    patch.setattr(Candidate, "claim", never)


PLANTED: list[tuple[Plant, Story]] = [
    (a_shard_that_cannot_be_read_gives_all_others_up, only_the_shard_that_cannot_be_read_waits),
    (a_shard_that_cannot_be_read_is_left_alone, only_the_shard_that_cannot_be_read_waits),
]


@pytest.mark.parametrize(("plant", "story"), PLANTED, ids=lambda each: each.__name__)
async def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Story, machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    machines.faults_may_miss = True
    with pytest.raises((AssertionError, TimeoutError)):
        await story(machines)


registry.register("takeovers on a store that fails", (plant for plant, _ in PLANTED))
