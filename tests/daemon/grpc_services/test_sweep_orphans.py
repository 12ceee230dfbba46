"""Sweeps over the wire."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from daemon import config
from daemon.owner.engine import Engine
from storage_backends.formats.deletion_format import LedgerComponent
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ListedObject
from tarry.v1 import ledger_deletion_pb2 as pb
from tests._support import owned_ledgers, real_engine
from tests._support.owned_ledgers import OwnedLedger
from tests.daemon.grpc_services._support import bad_deletions as bad
from tests.daemon.grpc_services._support.deletion_requests import TOPIC, faults, state, stats, until
from tests.daemon.grpc_services.conftest import Edge


class SweptStore(MemoryStore):
    """A listing waits while `go` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.listing = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        self.listing.set()
        if not self.go.wait(300):
            raise TimeoutError
        return super().list(prefix, start_after=start_after)


@pytest.fixture
def swept() -> SweptStore:
    return SweptStore()


@pytest.fixture
async def engine(settings: config.Config, swept: SweptStore) -> AsyncIterator[Engine]:
    async with real_engine.serving(settings, ledger_stores=owned_ledgers.offloaded_in(swept)) as engine:
        yield engine


async def test_an_orphan_is_shown_and_recorded_when_it_is_to_go(edge: Edge, swept: SweptStore) -> None:
    component = LedgerComponent.MANAGED_LEDGER
    OwnedLedger(TOPIC, component, (7, 1, 2)).write(swept)
    OwnedLedger(TOPIC, component, (8, 1, 2)).write(swept)
    none_but = pb.RecordInUseRequest(
        topic=TOPIC, ledger_type=pb.LEDGER_TYPE_OFFLOADED_LEDGER, ledger_id=[8], replace=True
    )
    await edge.caller.unary(bad.IN_USE, none_but)
    looked = await sweep(edge, grace_ms=0)
    assert (looked[-1].counts.orphaned.objects, looked[-1].counts.ledgers_recorded) == (2, 0)
    (orphan,) = [orphan for answer in looked for orphan in answer.orphans]
    assert (orphan.topic, orphan.pending_delete.ledger_id, orphan.unknown_topic) == (TOPIC, 7, False)
    context = orphan.pending_delete.offload_context
    assert (context.uuid_msb, context.uuid_lsb) == (1, 2)
    assert orphan.size_bytes > 0
    assert orphan.modified_ms > 0
    assert (await stats(edge)).in_flight == 0

    deleted = await sweep(edge, grace_ms=0, delete=True)
    assert (deleted[-1].counts.ledgers_recorded, deleted[-1].refused) == (1, "")
    (ended,) = await until(edge, bad.LIST_ENDED, 1)
    assert (ended.by_sweeper, ended.outcome) == (True, pb.Deletion.OUTCOME_DELETED)
    assert {listed.key for listed in swept.list("")} == set(OwnedLedger(TOPIC, component, (8, 1, 2)).keys)


async def test_young_ones_are_left_alone_by_default(edge: Edge, swept: SweptStore) -> None:
    OwnedLedger(TOPIC, LedgerComponent.MANAGED_LEDGER, (7, 1, 2)).write(swept)
    answers = await sweep(edge)
    assert (answers[-1].counts.young.objects, answers[-1].counts.orphaned.objects) == (2, 0)


async def test_of_one_store_one_sweep_is_under_way_until_its_caller_goes_away(edge: Edge, swept: SweptStore) -> None:
    swept.go.clear()
    first = asyncio.create_task(sweep(edge))
    assert await asyncio.to_thread(swept.listing.wait, 10)
    with pytest.raises(grpc.aio.AioRpcError, match="offloaded is in progress") as refused:
        await sweep(edge)
    assert refused.value.code() is grpc.StatusCode.ABORTED
    first.cancel()
    swept.go.set()
    async with asyncio.timeout(300):
        while not await answered(edge):
            pass


async def test_a_bad_sweep_is_refused(edge: Edge) -> None:
    wrong: list[str] = []
    for case in bad.BAD_SWEEPS:
        wrong += await faults(edge, case)
    assert wrong == []
    assert [len(answers.deletions) for answers in (await state(edge))[:3]] == [0, 0, 0]


async def sweep(edge: Edge, **fields: Any) -> list[pb.SweepOrphansResponse]:
    answers: list[pb.SweepOrphansResponse] = await edge.caller.answers(
        bad.SWEEP, pb.SweepOrphansRequest(store="offloaded", **fields)
    )
    assert [answer.done for answer in answers] == [False] * (len(answers) - 1) + [True]
    return answers


async def answered(edge: Edge) -> bool:
    """Whether a sweep may begin."""
    try:
        await sweep(edge)
    except grpc.aio.AioRpcError as refused:
        if refused.code() is not grpc.StatusCode.ABORTED:
            raise
        return False
    return True
