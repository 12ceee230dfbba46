"""The calls on dead letters of a daemon, for tests: burying, listing, replaying, purging."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from daemon import call_values
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.core.decisions.claims import HeldPositions
from tests._support.engine_fixture import Daemon
from tests._support.outcomes import Counts, counts_of
from tests.daemon._support.calling import Row, get, rows_of

ALL = DeadLetterFilter()


def nack(
    daemon: Daemon,
    rows: Sequence[Row],
    *,
    delay_ms: int | None = 0,
    reject: bool = False,
    text: str = "",
    batch_index: int | None = None,
    topic: str = "t",
    subscription: str = "s",
) -> asyncio.Task[Counts]:
    """Rows as they were handed out; `delay_ms`: None is by the policy."""
    ledger_id, entry_id, deliver_at_ms = (np.array([row[place] for row in rows], np.uint64) for place in range(3))
    parts = None if batch_index is None else np.full(len(rows), batch_index, np.uint32)
    asked = call_values.Nack(
        positions=HeldPositions(ledger_id, entry_id, deliver_at_ms, parts),
        delay_ms=None if delay_ms is None else np.full(len(rows), delay_ms, np.uint64),
        delay_level=None,
        key_hash=None,
        reject=reject,
        text=text,
    )
    return daemon.call(counts_of(daemon.engine.requests.negative_acknowledge, topic, subscription, asked))


async def reject(daemon: Daemon, rows: Sequence[Row], text: str = "", *, subscription: str = "s") -> None:
    """They become dead letters."""
    nacked = await nack(daemon, rows, reject=True, text=text, subscription=subscription)
    assert (nacked.ignored, nacked.dead_lettered) == (0, len(rows))


async def buried(
    daemon: Daemon, count: int, *, ledger_id: int = 1, text: str = "", subscription: str = "s"
) -> list[Row]:
    """Entries of a ledger that came due, were handed out and rejected."""
    await daemon.add("t", ledger_id, range(count), delay_ms=1)
    await asyncio.sleep(1)
    rows = rows_of(await get(daemon, count, subscription=subscription))
    assert len(rows) == count
    await reject(daemon, rows, text, subscription=subscription)
    return rows


def listed(
    daemon: Daemon,
    asked: DeadLetterFilter = ALL,
    page_size: int = 0,
    after_id: int = 0,
    *,
    subscription: str = "s",
) -> asyncio.Task[call_values.DeadLetterPage]:
    return daemon.call(daemon.engine.requests.list_dead_letters("t", subscription, asked, page_size, after_id))


def replay(
    daemon: Daemon, asked: DeadLetterFilter = ALL, delay_ms: int = 0, *, subscription: str = "s"
) -> asyncio.Task[call_values.Replayed]:
    return daemon.call(daemon.engine.requests.replay_dead_letters("t", subscription, asked, delay_ms))


def purge(daemon: Daemon, asked: DeadLetterFilter = ALL, *, subscription: str = "s") -> asyncio.Task[int]:
    return daemon.call(daemon.engine.requests.purge_dead_letters("t", subscription, asked))


def with_ids(*ids: int) -> DeadLetterFilter:
    return DeadLetterFilter(ids=np.array(ids, np.uint64))


def ids_of(page: call_values.DeadLetterPage) -> list[int]:
    ids: list[int] = page.rows.dead_letter_id.tolist()
    return ids


def positions_of(page: call_values.DeadLetterPage) -> list[tuple[int, int]]:
    return list(zip(page.rows.ledger_id.tolist(), page.rows.entry_id.tolist(), strict=True))


def texts_of(page: call_values.DeadLetterPage) -> list[str]:
    return [page.rows.texts[number] for number in page.rows.text_index.tolist()]
