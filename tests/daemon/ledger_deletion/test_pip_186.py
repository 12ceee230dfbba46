"""The examples and the rules of PIP-186, as its text has them, on the engine.

The PIP calls what is answered "recorded" a message that was sent. Its second example ends with a list that its own rule
does not give: of [1, 2, 3, 4, 5] the ledger whose message was sent is taken out, which leaves [2, 3, 4, 5].
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from daemon import settings
from daemon.core.deletions.ledger_deletions import ListedState
from daemon.errors import TarryError
from daemon.ledger_stores.ledger_owner import Owner
from daemon.ledger_stores.ledger_stores import LedgerStores
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, LedgerType
from storage_backends.memory_store import MemoryStore
from tests._support import owned_ledgers
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests._support.ledger_owner_server import ledger_owner_server
from tests._support.owned_ledgers import OwnedLedger
from tests.daemon.ledger_deletion._support.deletion_stories import TOPIC, listed


class ManagedLedger:
    """A topic with ledgers 1 to 5, all of them offloaded; its metadata names those that it has."""

    def __init__(self, machines: EngineFixture) -> None:
        self.store = MemoryStore()
        machines.ledger_stores = lambda daemon: owned_ledgers.offloaded_in(self.store)
        self.metadata = [OwnedLedger(TOPIC, LedgerComponent.MANAGED_LEDGER, (number, 1, 2)) for number in range(1, 6)]
        for ledger in self.metadata:
            ledger.write(self.store)

    @property
    def numbers(self) -> list[int]:
        return [ledger.ledger[0] for ledger in self.metadata]

    @property
    def stored(self) -> list[int]:
        """Ledgers of which anything is there."""
        return sorted({int(listed.key.split("-ledger-")[1].removesuffix("-index")) for listed in self.store.list("")})

    async def trim(self, daemon: Daemon, numbers: Sequence[int]) -> None:
        """The first phase: a record for each ledger; those that were recorded leave the metadata, in one change."""
        sent = [ledger for ledger in self.metadata if ledger.ledger[0] in numbers and await _sent(daemon, ledger)]
        self.metadata = [ledger for ledger in self.metadata if ledger not in sent]

    async def say_what_is_in_use(self, daemon: Daemon) -> None:
        columns = owned_ledgers.in_use(self.metadata)
        await daemon.call(daemon.engine.deletion_requests.record_in_use(TOPIC, columns, replace=True))


async def _sent(daemon: Daemon, ledger: OwnedLedger) -> bool:
    try:
        recorded = await daemon.call(
            daemon.engine.deletion_requests.record_pending_deletes(TOPIC, [ledger.pending_delete()])
        )
    except TarryError:
        return False
    return recorded.recorded == 1


async def over(daemon: Daemon) -> None:
    """Returns when nothing is in flight (getEstimatedInflightDeletionLedgerCount is 0)."""
    for _ in range(1_000):
        stats = await daemon.call(daemon.engine.deletion_requests.stats(""))
        if not stats.in_flight:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("deletions stay in flight")


async def ended(daemon: Daemon) -> dict[int, DeletionOutcome]:
    return {each.deletion.pending_delete.ledger_id: each.deletion.outcome for each in await listed(daemon)}


async def test_when_everything_up_to_ledger_2_is_consumed_ledger_1_leaves_and_is_deleted(
    machines: EngineFixture,
) -> None:
    topic = ManagedLedger(machines)
    daemon = await machines.served_by()
    await topic.say_what_is_in_use(daemon)
    await topic.trim(daemon, [1])
    assert topic.numbers == [2, 3, 4, 5]
    await topic.say_what_is_in_use(daemon)
    await over(daemon)
    assert topic.stored == [2, 3, 4, 5]
    assert await ended(daemon) == {1: DeletionOutcome.DELETED}


@pytest.mark.parametrize("failure", ["the store is away", "the slot lands and nobody is told"])
async def test_of_ledgers_1_and_2_the_one_that_was_recorded_leaves_and_the_other_one_stays(
    machines: EngineFixture, failure: str
) -> None:
    topic = ManagedLedger(machines)
    first = await machines.served_by("one")
    await topic.say_what_is_in_use(first)
    await topic.trim(first, [1])
    if failure == "the store is away":
        first.store.go_down()
    else:
        held = first.pause("put_if_absent", JOURNAL, then=Fault.FAIL_AFTER)
        first.loop.call_later(1.0, held.release)
        first.loop.call_later(1.0, first.kill)
    trimming = asyncio.ensure_future(topic.trim(first, [2]))
    await asyncio.wait([trimming], timeout=60)
    # The PIP prints [1, 3, 4, 5].
    assert topic.numbers == [2, 3, 4, 5]
    first.kill()
    second = await machines.served_by("two")
    await topic.say_what_is_in_use(second)
    await over(second)
    assert topic.stored == [2, 3, 4, 5]
    await topic.trim(second, [2])
    assert topic.numbers == [3, 4, 5]
    await topic.say_what_is_in_use(second)
    await over(second)
    assert topic.stored == [3, 4, 5]


async def test_a_ledger_that_was_recorded_and_never_left_the_metadata_is_in_use_and_is_not_deleted(
    machines: EngineFixture,
) -> None:
    topic = ManagedLedger(machines)
    daemon = await machines.served_by()
    await topic.say_what_is_in_use(daemon)
    assert await _sent(daemon, topic.metadata[0])
    await over(daemon)
    assert await ended(daemon) == {1: DeletionOutcome.IN_USE}
    assert topic.stored == topic.numbers == [1, 2, 3, 4, 5]
    assert not await listed(daemon, ListedState.DEAD), "it is not tried again"


async def test_a_ledger_that_is_offloaded_too_has_two_records_and_each_ends_by_itself(machines: EngineFixture) -> None:
    with ledger_owner_server() as server:
        topic = ManagedLedger(machines)
        offloaded = topic.metadata[0]
        plain = OwnedLedger(TOPIC, LedgerComponent.MANAGED_LEDGER, (1, 0, 0))
        server.ledgers[1] = plain.metadata
        server.status = 503
        entry = settings.DeletionOwner(name="owner", topic_prefixes=("",), delete_url=server.url)
        in_objects = owned_ledgers.offloaded_in(topic.store)
        machines.ledger_stores = lambda daemon: LedgerStores(
            object_stores=in_objects._object_stores, owners=[Owner(entry)]
        )
        daemon = await machines.served_by("one", "deletion.reconsume_later_seconds=5")
        assert await _sent(daemon, offloaded)
        assert await _sent(daemon, plain)
        counted = daemon.shards[0].deletions.state
        await daemon.until(lambda: counted.counts.in_flight == 1)
        assert topic.stored == [2, 3, 4, 5]
        pending = await listed(daemon, ListedState.PENDING)
        assert [each.deletion.pending_delete.ledger_type for each in pending] == [LedgerType.LEDGER]
        server.status = 200
        await over(daemon)
        assert not server.ledgers


async def test_the_stats_say_how_many_deletions_are_in_flight(machines: EngineFixture) -> None:
    topic = ManagedLedger(machines)
    # Nowhere is configured.
    machines.ledger_stores = lambda daemon: LedgerStores()
    daemon = await machines.served_by()
    await topic.trim(daemon, [1, 2, 3])
    stats = await daemon.call(daemon.engine.deletion_requests.stats(""))
    assert (stats.in_flight, [count.in_flight for count in stats.counts]) == (3, [3])
    assert stats.oldest_ms <= machines.now_ms()


def test_the_settings_have_the_values_of_the_pip() -> None:
    deletion = settings.DeletionSettings()
    assert deletion.parallelism == 4
    assert deletion.reconsume_later_seconds == 600
    assert deletion.max_retry_delete_count == 10
