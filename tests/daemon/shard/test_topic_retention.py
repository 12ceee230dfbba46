"""What a topic needs of its log, as the engine tells it: by the owner alone, in pages, and in stats once a minute."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from daemon import call_values
from daemon.core.index import retention
from daemon.errors import InvalidArgument, NotFound, TarryError
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.calling import create, trim, up_to

SMALL = ("bucket.min_index_count_per_bucket=5", "bucket.rows_max=5")


def retained(
    daemon: Daemon, ledgers: list[int] | None = None, *, page_size: int = 0, after: int | None = None
) -> asyncio.Task[call_values.RetentionPage]:
    asked = None if ledgers is None else np.array(ledgers, np.uint64)
    return daemon.call(daemon.engine.requests.retained("t", asked, page_size, after))


def needed(page: call_values.RetentionPage) -> dict[int, int]:
    return dict(zip(page.ledger_id.tolist(), page.lowest_entry_id.tolist(), strict=True))


async def test_the_lowest_entry_of_each_ledger_is_told_in_pages(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOOKS_A_TURN", 1)
    one = await machines.served_by("one", *SMALL)
    await create(one)
    for ledger_id in (9, 3, 7, 5):
        await one.add("t", ledger_id, range(ledger_id, ledger_id + 4), delay_ms=1_000)
    await trim(one, up_to(8, 7))
    first = await retained(one, page_size=2)
    assert (needed(first), first.next_after) == ({3: 3, 5: 5}, 5)
    rest = await retained(one, page_size=2, after=5)
    assert (needed(rest), rest.next_after) == ({7: 9, 9: 9}, None)
    assert needed(await retained(one, [9, 4, 3])) == {3: 3, 9: 9}
    with pytest.raises(InvalidArgument, match="ledger_id names ledger 3 twice"):
        await retained(one, [3, 3])
    with pytest.raises(NotFound):
        await one.call(one.engine.requests.retained("nothing", None, 0, None))


async def test_what_a_log_is_needed_for_is_said_only_by_the_owner(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 5, [1])
    await asyncio.sleep(0.1)
    one.freeze()
    asked = retained(one)
    two = await machines.served_by("two")
    await two.add("t", 2, [1])
    one.thaw()
    with pytest.raises(TarryError):
        await asked


async def test_stats_look_at_most_once_a_minute_and_only_where_something_has_changed(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    surveyed = retention.surveyed

    def counted(*arguments):  # type: ignore[no-untyped-def]
        nonlocal looks
        looks += 1
        return surveyed(*arguments)

    monkeypatch.setattr(retention, "surveyed", counted)
    one = await machines.served_by("one")
    await create(one)

    async def shown() -> tuple[tuple[int, int] | None, int]:
        survey = (await one.call(one.engine.requests.topic_stats("t"))).survey
        return survey.lowest, survey.ledgers

    await one.add("t", 5, [3])
    assert await shown() == ((5, 3), 1)
    await one.add("t", 4, [8])
    assert await shown() == ((5, 3), 1), "it is as of a minute ago at most"
    await asyncio.sleep(61)
    assert await shown() == ((4, 8), 2)
    assert looks == 2
    await asyncio.sleep(200)
    assert await shown() == ((4, 8), 2)
    assert looks == 2, "nothing has changed"
    await trim(one, up_to(99, 4, 5))
    assert await shown() == (None, 0)


async def test_a_scrape_makes_no_look_at_a_topic_of_very_many_ledgers(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.topic.served_topic.GLANCE_PAGES_MAX", 2)
    one = await machines.served_by("one")

    async def scraped() -> list[tuple[tuple[int, int] | None, int]]:
        return [(each.lowest, each.ledgers) for each in await one.call(one.engine.requests._topic_numbers())]

    await one.add("t", 5, [3])
    assert await scraped() == [((5, 3), 1)]
    for ledger_id in (1, 2):
        await one.add("t", ledger_id, [0])
    await asyncio.sleep(61)
    assert await scraped() == [((5, 3), 1)]
    await one.call(one.engine.requests.topic_stats("t"))
    assert await scraped() == [((1, 0), 3)]
