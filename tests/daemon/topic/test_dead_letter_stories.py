"""Whatever is rejected, replayed and purged, and whenever the daemon is killed: a position is in one place."""

from __future__ import annotations

import asyncio
import random

import pytest

from daemon import call_values
from daemon.topic import topic_dead_letters
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests.daemon._support.calling import Row, acknowledge, create, get, rows_of
from tests.daemon._support.dead_letter_calls import listed, nack, purge, replay, with_ids

Position = tuple[int, int]
SETTINGS = ("journal.checkpoint_slots=7", "bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")


class Story:
    """One subscription, and what is known of its positions. `unsure`: they may have left, the answer did not come."""

    def __init__(self, machines: EngineFixture, seed: int) -> None:
        self.machines = machines
        self.random = random.Random(seed)
        self.there: set[Position] = set()
        self.unsure: set[Position] = set()
        self.daemon: Daemon
        self._next_entry = 0

    async def begin(self) -> None:
        self.daemon = await self.machines.served_by("one", *SETTINGS)
        await create(self.daemon)

    async def add(self) -> None:
        entries = range(self._next_entry, self._next_entry + self.random.randrange(1, 12))
        self._next_entry = entries.stop
        ledger_id = self.random.randrange(1, 4)
        await self.daemon.add("t", ledger_id, entries, delay_ms=self.random.randrange(1, 300))
        self.there |= {(ledger_id, entry) for entry in entries}

    async def pull(self) -> None:
        """Of what is handed out some is acknowledged, some rejected, some nacked; the rest comes back by itself."""
        rows = rows_of(await get(self.daemon, self.random.randrange(1, 20), lease_ms=500))
        self.random.shuffle(rows)
        cut, end = sorted(self.random.randrange(len(rows) + 1) for _ in range(2))
        await asyncio.gather(self._acknowledge(rows[:cut]), self._nack(rows[cut:end]))

    async def _acknowledge(self, rows: list[Row]) -> None:
        if rows:
            self.unsure |= {row[:2] for row in rows}
            assert await acknowledge(self.daemon, rows) == 0
            self._left({row[:2] for row in rows})

    async def _nack(self, rows: list[Row]) -> None:
        if rows:
            reject = self.random.random() < 0.8
            await nack(self.daemon, rows, reject=reject, delay_ms=self.random.choice((0, 200, 3_000)))

    async def give_up(self) -> None:
        """Dead letters, some of them, are replayed and purged at a time."""
        page = await listed(self.daemon)
        positions = dict(zip(page.rows.dead_letter_id.tolist(), _positions(page.rows), strict=True))
        chosen = [
            sorted(number for number in positions if self.random.random() < share)
            for share in (self.random.random(), self.random.random() / 2)
        ]
        delay_ms = self.random.choice((0, 0, 2_000))
        await asyncio.gather(
            replay(self.daemon, with_ids(*chosen[0]), delay_ms=delay_ms),
            self._purge({number: positions[number] for number in chosen[1]}),
        )

    async def _purge(self, positions: dict[int, Position]) -> None:
        if positions:
            self.unsure |= set(positions.values())
            await purge(self.daemon, with_ids(*positions))
            # Which of them were replayed meanwhile only the next look tells.

    def _left(self, positions: set[Position]) -> None:
        self.there -= positions
        self.unsure -= positions

    async def kill(self) -> None:
        self.daemon.kill()
        await self._serve_again()

    async def kill_at_a_slot(self) -> None:
        """While several requests are on their way to a slot."""
        held = self.daemon.pause("put_if_absent", JOURNAL)
        work = [asyncio.ensure_future(each) for each in (self.pull(), self.give_up())]
        try:
            async with asyncio.timeout(2):
                await held.reached()
        except TimeoutError:
            pass
        if self.random.random() < 0.5:
            held.release()
            await asyncio.sleep(0.001)
        self.daemon.kill()
        await asyncio.gather(*work, return_exceptions=True)
        await self._serve_again()

    async def _serve_again(self) -> None:
        self.daemon = await self.machines.served_by("one", *SETTINGS)

    async def seal(self) -> None:
        await self.daemon.call(self.daemon.engine.requests.seal("t"))

    async def wait(self) -> None:
        await asyncio.sleep(self.random.random() * 3)

    async def check(self) -> None:
        """What is there is pending, due or dead: in one of these, once."""
        requests = self.daemon.engine.requests
        dead = _positions((await listed(self.daemon)).rows)
        backlog = (await self.daemon.call(requests.list_backlog("t", "s", None, 10_000, None))).rows
        scheduled = (await self.daemon.call(requests.list_scheduled("t", call_values.View(), 10_000, None))).rows
        found = [*dead, *_positions(backlog), *_positions(scheduled)]
        assert len(found) == len(set(found)), "in two places"
        assert self.there - self.unsure <= set(found) <= self.there
        self.there &= set(found)
        self.unsure.clear()
        (stats,) = (await self.daemon.call(requests.topic_stats("t"))).subscriptions
        assert (stats.dead_letters, stats.backlog) == (len(dead), len(backlog))


def _positions(rows: object) -> list[Position]:
    return list(zip(rows.ledger_id.tolist(), rows.entry_id.tolist(), strict=True))  # type: ignore[attr-defined]


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(25))
async def test_a_position_is_pending_due_dead_or_gone_and_only_one_of_these(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    machines.faults_may_miss = True
    story = Story(machines, seed)
    monkeypatch.setattr(topic_dead_letters, "PORTION_ROWS", story.random.choice((2, 5, 10_000)))
    await story.begin()
    steps = [story.add, story.pull, story.pull, story.give_up, story.wait, story.seal, story.kill, story.kill_at_a_slot]
    for _ in range(40):
        await story.random.choice(steps)()
        await story.check()
    await asyncio.sleep(5)
    await replay(story.daemon)
    await asyncio.sleep(5)
    await story.check()
    rows = rows_of(await get(story.daemon, 10_000))
    assert {row[:2] for row in rows} == story.there, "all of it comes out in the end"
