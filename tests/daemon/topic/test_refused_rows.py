"""An add of which some rows may not be stored, on whole engines: what is born, counted and there after a takeover."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from daemon.core.decisions.add_decisions import AddBatch, AddOutcome, RefusedReason
from daemon.core.quotas import Caller
from daemon.errors import DelayTooLong, NotFound, QuotaExceeded
from storage_backends.formats.manifest import TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture

TOO_LONG_MS = 1 << 60


def add(
    daemon: Daemon,
    delays_ms: Sequence[int],
    *,
    first: int = 0,
    client: str | None = None,
    return_invalid: bool = True,
) -> asyncio.Task[AddOutcome]:
    """Entries one after the other, with these delays."""
    batch = AddBatch(
        ledger_id=np.full(len(delays_ms), 7, np.uint64),
        entry_id=np.arange(first, first + len(delays_ms), dtype=np.uint64),
        deliver_at_ms=None,
        delay_ms=np.array(delays_ms, np.uint64),
        key_hash=None,
        return_already_due=False,
        return_invalid=return_invalid,
    )
    caller = None if client is None else Caller(client, 100)
    return daemon.call(daemon.engine.requests.add("t", batch, None, caller))


async def pending(daemon: Daemon) -> int:
    return (await daemon.call(daemon.engine.requests.topic_stats("t"))).pending


async def test_a_request_of_which_every_row_is_refused_bears_no_topic(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    outcome = await add(one, [TOO_LONG_MS] * 3)
    assert (outcome.accepted, outcome.duplicates) == (0, 0)
    assert outcome.refused.index.tolist() == [0, 1, 2]
    with pytest.raises(NotFound):
        await pending(one)
    assert (await add(one, [60_000, TOO_LONG_MS])).accepted == 1
    assert await pending(one) == 1
    assert len((await add(one, [TOO_LONG_MS])).refused) == 1
    assert await pending(one) == 1


async def test_a_request_that_is_refused_as_a_whole_bears_no_topic(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    with pytest.raises(DelayTooLong):
        await add(one, [60_000, TOO_LONG_MS], return_invalid=False)
    with pytest.raises(NotFound):
        await pending(one)
    assert (await add(one, [60_000], return_invalid=False)).accepted == 1
    assert await pending(one) == 1


async def test_quotas_count_the_valid_rows_alone(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.call(
        one.engine.requests.set_topic_policy("t", TopicPolicy(pending_rows_max=2, client_rows_per_second_max=2))
    )
    outcome = await add(one, [60_000, TOO_LONG_MS, 60_000, *[TOO_LONG_MS] * 5], client="a")
    assert (outcome.accepted, len(outcome.refused)) == (2, 6)
    assert set(outcome.refused.reason.tolist()) == {RefusedReason.DELAY_TOO_LONG}
    with pytest.raises(QuotaExceeded, match="pending_rows_max"):
        await add(one, [60_000], first=100, client="b")
    with pytest.raises(QuotaExceeded, match="client 'a' is 0 ahead"):
        await add(one, [60_000], first=100, client="a")


async def test_a_new_topic_is_born_where_its_valid_rows_fit_into_the_limit_of_all_topics(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", "limits.pending_rows_max=2")
    assert (await add(one, [60_000, TOO_LONG_MS, 60_000, TOO_LONG_MS])).accepted == 2
    assert await pending(one) == 2
