"""A store of ledgers that fails until the last retry, and what its deletions do meanwhile: they follow their schedule
exactly.

The first attempt is made at once, and each of the ten retries as long after the answer before it as the settings say;
the last failure makes a dead letter, which says why. A retry from there succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from daemon.core.deletions.ledger_deletions import ListedState
from daemon.ledger_deletion.deletion_values import DeletionFilter
from daemon.ledger_stores.ledger_stores import LedgerStores
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import StoreUnavailable
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Call, Fault, FaultStore, Pause
from tests._support.ledger_owner_server import ledger_owner_server
from tests._support.owned_ledgers import in_use, offloaded_in
from tests.daemon.ledger_deletion._support.deletion_stories import TOPIC, AtTheirOwner, InObjects, Place, Story, listed
from tests.simulation.deletion_truth import Recorded, Standing

# Longer than a time-out and a takeover take.
RECONSUME_LATER_S = 120
MAX_RETRY_DELETE_COUNT = 10
ATTEMPTS = MAX_RETRY_DELETE_COUNT + 1
SETTINGS = (f"deletion.reconsume_later_seconds={RECONSUME_LATER_S}", "journal.checkpoint_slots=5")
# What is due begins as soon as its slot is durable.
LATE_MAX_MS = 100
# How long a request waits that nobody answers.
TIME_OUT_S = 30.0


class Troubled(InObjects):
    """Ledgers in a store that fails, by `trouble`, until somebody says otherwise."""

    def __init__(self, trouble: str, machines: EngineFixture) -> None:
        super().__init__(MemoryStore())
        self.reason = "SlowDown" if trouble == "throttling" else "fault"
        self._trouble: str | None = trouble
        self._machines = machines

    def end(self) -> None:
        self._trouble = None

    def stores(self) -> LedgerStores:
        place = self

        class Waiting(FaultStore):
            """A call is answered late, if at all."""

            def _begin(self, operation: str, key: str) -> tuple[Call, Fault]:
                if place._trouble == "time-outs":
                    place._machines.loop.block(TIME_OUT_S)
                if place._trouble == "throttling":
                    raise StoreUnavailable(key, "503 SlowDown")
                return super()._begin(operation, key)

        return offloaded_in(Waiting(self._failing))

    def _decide(self, call: Call) -> Fault | Pause:
        if self._trouble == "deleted and lost" and call.operation == "delete":
            # From here on nothing is reached.
            self._trouble = "errors"
            return Fault.FAIL_AFTER
        faults = {"errors": Fault.FAIL_BEFORE, "time-outs": Fault.FAIL_BEFORE, "refusals": Fault.REFUSE}
        if self._trouble == "lost answers":
            return Fault.FAIL_AFTER
        return faults.get(self._trouble or "", Fault.NONE)


class TroubledOwner(AtTheirOwner):
    """Ledgers of an owner that answers 503 until somebody says otherwise."""

    reason = "503"

    def end(self) -> None:
        self._server.status = 200


TROUBLES = ("errors", "refusals", "time-outs", "throttling", "lost answers", "deleted and lost", "an owner's 503")


@pytest.fixture
def place(request: pytest.FixtureRequest, machines: EngineFixture) -> Iterator[Troubled | TroubledOwner]:
    if request.param == "an owner's 503":
        with ledger_owner_server() as server:
            server.status = 503
            yield TroubledOwner(server)
    else:
        yield Troubled(request.param, machines)


class Outage:
    """The doomed ledgers of a story, while their store is in trouble."""

    def __init__(self, machines: EngineFixture, place: Place, *settings: str) -> None:
        self.story = Story(machines, place, LedgerComponent.MANAGED_LEDGER, *SETTINGS, *settings)
        self._machines = machines

    @property
    def deletions(self) -> list[Recorded]:
        return list(self.story.truth.recorded.values())

    async def begin(self, daemon_id: str = "one") -> Daemon:
        daemon = await self.story.serving(daemon_id)
        assert await self.story.record(daemon, self.story.doomed)
        return daemon

    async def given_up(self) -> None:
        """Returns when each is a dead letter."""
        await self.story.until(lambda: all(one.standing is Standing.DEAD for one in self.deletions), look_s=1.0)

    def check_schedule(self, *, jitter: float = 0.0) -> None:
        assert not self.story.breaches, self.story.breaches
        low, high = ((1 + sign * jitter) * 1000 * RECONSUME_LATER_S for sign in (-1, 1))
        for one in self.deletions:
            *failed, last = one.failed
            assert [answer.outcome for answer in failed] == [DeletionOutcome.FAILED] * MAX_RETRY_DELETE_COUNT
            assert last.outcome is DeletionOutcome.GIVEN_UP
            for answer in failed:
                assert low <= answer.retry_at_ms - answer.at_ms <= high + 1
                # An attempt that was begun when a daemon ended is made again, and is no retry.
                (begun, *_) = [at_ms for at_ms in one.begun_at_ms if at_ms > answer.at_ms]
                assert answer.retry_at_ms <= begun <= answer.retry_at_ms + LATE_MAX_MS

    async def retry(self, daemon: Daemon) -> None:
        """From the dead letters; it succeeds."""
        requests = daemon.engine.deletion_requests
        assert await daemon.call(requests.retry_dead(DeletionFilter(topic=TOPIC), all=False)) == len(self.deletions)
        await self.story.over()
        assert not self.story.breaches, self.story.breaches
        assert not self.story.place.held(self.story.doomed)
        assert not await listed(daemon, ListedState.DEAD)
        assert [each.deletion.failures for each in await listed(daemon)] == [0] * len(self.deletions)


def outcomes(outage: Outage) -> set[DeletionOutcome]:
    return {one.outcome for one in outage.deletions}


@pytest.mark.parametrize("place", TROUBLES, indirect=True)
async def test_trouble_until_the_last_retry_ends_with_dead_letters_that_say_why_and_a_retry_succeeds(
    machines: EngineFixture, place: Troubled | TroubledOwner
) -> None:
    outage = Outage(machines, place, "deletion.jitter=0")
    daemon = await outage.begin()
    began_s = machines.elapsed_s()
    await outage.given_up()
    assert machines.elapsed_s() - began_s >= MAX_RETRY_DELETE_COUNT * RECONSUME_LATER_S
    outage.check_schedule()
    assert all(len(one.begun_at_ms) == ATTEMPTS for one in outage.deletions)
    dead = await listed(daemon, ListedState.DEAD)
    assert len(dead) == len(outage.deletions)
    for each in dead:
        assert place.reason in each.deletion.text
        assert each.deletion.failures == ATTEMPTS
    stats = await daemon.call(daemon.engine.deletion_requests.stats(TOPIC))
    assert (stats.in_flight, stats.given_up) == (0, len(dead))
    await asyncio.sleep(2 * RECONSUME_LATER_S)
    assert all(len(one.begun_at_ms) == ATTEMPTS for one in outage.deletions), "nobody retries a dead letter by itself"
    place.end()
    await outage.retry(daemon)


async def test_jitter_spreads_the_retries_within_its_bounds(machines: EngineFixture) -> None:
    place = Troubled("errors", machines)
    outage = Outage(machines, place, "deletion.jitter=0.25")
    await outage.begin()
    await outage.given_up()
    outage.check_schedule(jitter=0.25)
    waits = [answer.retry_at_ms - answer.at_ms for one in outage.deletions for answer in one.failed[:-1]]
    assert len(set(waits)) > len(waits) // 2
    middle_ms = 1000 * RECONSUME_LATER_S
    assert min(waits) < middle_ms * 11 / 12
    assert max(waits) > middle_ms * 13 / 12


async def test_what_was_deleted_though_nobody_was_told_is_found_to_be_gone(machines: EngineFixture) -> None:
    place = Troubled("deleted and lost", machines)
    outage = Outage(machines, place)
    daemon = await outage.begin()
    await outage.given_up()
    assert any(one.maybe_deleted for one in outage.deletions)
    stated = await daemon.call(
        daemon.engine.deletion_requests.record_in_use(TOPIC, in_use(outage.story.doomed), replace=False)
    )
    late = {row for row, one in enumerate(outage.deletions) if one.maybe_deleted}
    assert set(stated.being_deleted) == late, "what may have been deleted cannot be used"
    place.end()
    await daemon.call(daemon.engine.deletion_requests.forget_in_use(TOPIC, in_use(outage.story.doomed)))
    await outage.retry(daemon)
    assert outcomes(outage) <= {DeletionOutcome.DELETED, DeletionOutcome.ALREADY_GONE}


@pytest.mark.parametrize("trouble", ["errors", "time-outs"])
@pytest.mark.parametrize("end", ["crash", "orderly"])
async def test_a_takeover_in_the_middle_counts_and_loses_no_attempt(
    machines: EngineFixture, trouble: str, end: str
) -> None:
    place = Troubled(trouble, machines)
    outage = Outage(machines, place, "deletion.jitter=0")
    first = await outage.begin()
    # In the middle of attempts, or between them.
    await outage.story.until(lambda: any(len(one.begun_at_ms) == ATTEMPTS // 2 for one in outage.deletions), look_s=1.0)
    if end == "crash":
        first.kill()
    else:
        await first.stop()
    second = await outage.story.serving("two")
    await outage.given_up()
    outage.check_schedule()
    for one in outage.deletions:
        assert len(one.failed) == ATTEMPTS, "a crash is no failure of the store"
        assert len(one.begun_at_ms) <= ATTEMPTS + 1
    place.end()
    await outage.retry(second)
