"""A forecast says of each topic what its daemon says: of what comes due, of what comes back, and of what is overdue."""

from __future__ import annotations

import dataclasses
import pickle
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import pytest
from pyspark.sql import SparkSession

from batch.engine import job_settings, spark_engine
from batch.engine.engine_port import TaskEngine as Workers
from batch.engine.job_settings import store_of
from batch.engine.local_engine import LocalEngine
from batch.engine.root import Root
from batch.forecast import forecast_job
from batch.forecast.result import Forecast, TopicForecast
from batch.forecast.steps import DAY_MS, HOUR_MS, MINUTE_MS, Counts, Steps
from daemon import call_values, config
from daemon.core.decisions.add_decisions import AddBatch
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.withdrawal_decisions import RescheduleBatch
from daemon.owner.engine import Engine
from storage_backends.formats import bucket_format, index_ids
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.row_columns import Rows
from storage_backends.local_directory import LocalDirectory
from storage_backends.object_store import NotFound
from storage_backends.storage_settings import Store
from tests._support import real_engine

T = TypeVar("T")
R = TypeVar("R")

SETTINGS = (
    "daemon.id=one",
    "daemon.address=one:1",
    "daemon.shards=2",
    "bucket.min_index_count_per_bucket=200",
    "bucket.rows_max=200",
    "bucket.max_num_buckets=-1",
    "bucket.max_indexes_per_bucket_snapshot_segment=20",
    "bucket.min_indexes_per_bucket_snapshot_segment=0",
)
DAYS = 2
# Rows of a subscription's own index have ledgers of their own: a position is a row then, whatever its index.
OWN_LEDGER = 1_000


class Inline:
    """An engine that runs its tasks where it is called, with values that went through a pickle."""

    name = "inline"
    parallelism = 1

    def __init__(self) -> None:
        self.tasks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, work: Callable[[T], R], tasks: Sequence[T], done: Callable[[int], None]) -> Iterator[tuple[int, R]]:
        for place, task in enumerate(tasks):
            result: R = pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(task)))))
            self.tasks += 1
            yield place, result
            done(place + 1)


@pytest.fixture
def job(tmp_path: Path) -> job_settings.Settings:
    return job_settings.Settings(store=Store(path=str(tmp_path / "root")))


@pytest.fixture
async def served(job: job_settings.Settings) -> AsyncIterator[Engine]:
    """A daemon on the root of the job."""
    store = LocalDirectory(job.store.path)
    async with real_engine.serving(config.load(environment={}, overrides=SETTINGS), store=store) as engine:
        yield engine


def forecast(
    job: job_settings.Settings,
    now_ms: int,
    *,
    step_ms: int = MINUTE_MS,
    workers: Workers | None = None,
    topics: Sequence[str] | None = None,
) -> Forecast:
    root = Root.open(store_of(job))
    places = None if topics is None else root.topics(topics)
    steps = Steps.of_days(now_ms, step_ms, DAYS)
    with workers or Inline() as engine:
        return forecast_job.run(root, job, steps, places, engine, lambda ended, tasks: None)


async def add(engine: Engine, topic: str, rows: Rows, subscription: str | None = None) -> None:
    batch = AddBatch(
        ledger_id=rows.ledger_id,
        entry_id=rows.entry_id,
        deliver_at_ms=rows.deliver_at_ms,
        delay_ms=None,
        key_hash=None,
        return_already_due=False,
    )
    await engine.requests.add(topic, batch, subscription)


async def settled(engine: Engine, topic: str, subscription: str, rng: random.Random) -> None:
    """Of what is due some is acknowledged, some comes back later, some is in flight."""
    leased = await engine.requests.get_scheduled(topic, subscription, max_rows=60, lease_ms=0, wait_ms=0)
    rows = leased.handed_out.rows
    fate = np.array([rng.choice("aaann.") for _ in range(len(rows))])

    def held(wanted: str) -> HeldPositions:
        taken = rows.take(fate == wanted)
        return HeldPositions(taken.ledger_id, taken.entry_id, taken.deliver_at_ms)

    if (fate == "a").any():
        await engine.requests.acknowledge(topic, subscription, held("a"))
    back = held("n")
    if not len(back):
        return
    delay_ms = np.array([rng.randrange(2 * HOUR_MS, 3 * DAY_MS) for _ in back.ledger_id], np.uint64)
    nack = call_values.Nack(positions=back, delay_ms=delay_ms, delay_level=None, key_hash=None, reject=False, text="")
    await engine.requests.negative_acknowledge(topic, subscription, nack)


async def parts_come_back(engine: Engine, topic: str, subscription: str, rng: random.Random) -> None:
    """Messages of batches that were never added come back, too."""
    count = 5
    positions = HeldPositions(
        np.full(count, 5_000, np.uint64),
        np.arange(count, dtype=np.uint64),
        np.zeros(count, np.uint64),
        np.arange(count, dtype=np.uint32),
    )
    delay_ms = np.array([rng.randrange(2 * HOUR_MS, DAY_MS) for _ in range(count)], np.uint64)
    nack = call_values.Nack(
        positions=positions, delay_ms=delay_ms, delay_level=None, key_hash=None, reject=False, text=""
    )
    await engine.requests.negative_acknowledge(topic, subscription, nack)


def random_rows(rng: random.Random, count: int, ledger_id: int, now_ms: int, *, past: bool) -> Rows:
    """Due within three days, many at whole minutes; of some, where `past`, in the last hour."""
    offsets = [rng.randrange(HOUR_MS, 3 * DAY_MS) for _ in range(count)]
    times = [now_ms + each if rng.random() < 0.8 else (now_ms + each) // MINUTE_MS * MINUTE_MS for each in offsets]
    if past:
        times = [each if rng.random() < 0.7 else now_ms - rng.randrange(HOUR_MS) for each in times]
    return Rows(np.array(times, np.uint64), np.full(count, ledger_id, np.uint64), np.arange(count, dtype=np.uint64))


async def lived(engine: Engine, topic: str, subscriptions: Sequence[str], seed: int) -> None:
    """A topic that has seen everything."""
    rng = random.Random(seed)
    now_ms = _now_ms()
    early = [each for each in subscriptions if each != "late"]
    for subscription in early:
        await engine.requests.create_subscription(topic, subscription)
    for ledger_id in range(1, 6):
        await add(engine, topic, random_rows(rng, 300, ledger_id, now_ms, past=bool(subscriptions)))
        entries = rng.sample(range(300), 60)
        for chosen, moved in ((entries[:30], False), (entries[30:], True)):
            ledgers, entry_id = np.full(30, ledger_id, np.uint64), np.array(chosen, np.uint64)
            if moved:
                to = random_rows(rng, 30, ledger_id, now_ms, past=False).deliver_at_ms
                await engine.requests.reschedule(
                    topic,
                    None,
                    RescheduleBatch(
                        ledger_id=ledgers, entry_id=entry_id, deliver_at_ms=to, delay_ms=None, key_hash=None
                    ),
                )
            else:
                await engine.requests.cancel(topic, None, ledgers, entry_id)
        if ledger_id == 3:
            await engine.requests.seal(topic)
    for number, subscription in enumerate(early):
        rows = random_rows(rng, 100, OWN_LEDGER + number, now_ms, past=True)
        await add(engine, topic, rows, subscription)
    await engine.requests.seal(topic)
    for subscription in early:
        await settled(engine, topic, subscription, rng)
    for subscription in subscriptions:
        # It is owed nothing of what is due by now.
        await engine.requests.create_subscription(topic, subscription)
        await parts_come_back(engine, topic, subscription, rng)
    await engine.requests.merge(topic, 3)
    for subscription in subscriptions:
        await settled(engine, topic, subscription, rng)
    # What is in no sealed bucket.
    await add(engine, topic, random_rows(rng, 50, 7, now_ms, past=bool(subscriptions)))
    await engine.requests.cancel(topic, None, np.full(10, 7, np.uint64), np.arange(10, dtype=np.uint64))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def histogram(engine: Engine, topic: str, steps: Steps) -> call_values.Histogram:
    view = call_values.View(from_ms=steps.begin_ms(0), until_ms=steps.until_ms)
    return await engine.requests.histogram(topic, view, steps.step_ms)


@dataclasses.dataclass
class Backlog:
    """`overdue`: rows, by position; `back`: when what was negatively acknowledged comes back."""

    overdue: set[tuple[int, int, int]]
    back: list[int]


async def backlog(engine: Engine, topic: str, subscription: str, now_ms: int) -> Backlog:
    found, after = Backlog(set(), []), None
    while True:
        page = await engine.requests.list_backlog(topic, subscription, None, 0, after)
        times = page.redeliver_at_ms if page.redeliver_at_ms is not None else np.zeros(len(page.rows), np.uint64)
        parts = page.batch_index
        if parts is None:
            parts = np.full(len(page.rows), index_ids.NO_BATCH_INDEX, np.uint32)
        rows = zip(page.rows.ledger_id.tolist(), page.rows.entry_id.tolist(), parts.tolist(), strict=True)
        for row, time_ms in zip(rows, times.tolist(), strict=True):
            if time_ms > now_ms:
                found.back.append(time_ms)
            else:
                found.overdue.add(row)
        if page.next_after is None:
            return found
        after = page.next_after


def by_step(counts: Counts) -> dict[int, int]:
    return dict(zip(counts.step.tolist(), counts.rows.tolist(), strict=True))


async def check(engine: Engine, found: TopicForecast, subscriptions: Sequence[str], steps: Steps) -> None:
    """That the forecast of a topic is what the daemon says."""
    shown = await histogram(engine, found.topic, steps)
    rows = Counts.merged([owed.rows for owed in found.owed])
    assert rows.dense(steps.count).tolist() == shown.rows.tolist()
    assert rows.beyond_rows == shown.rows_after
    assert {owed.subscription for owed in found.owed} == {None, *subscriptions}
    overdue: set[tuple[int, int, int]] = set()
    for owed in found.owed:
        if owed.subscription is None:
            assert owed.receivers == len(subscriptions)
            continue
        waiting = await backlog(engine, found.topic, owed.subscription, steps.now_ms)
        overdue |= waiting.overdue
        wanted = Counter(steps.of(np.array(waiting.back, np.uint64)).tolist())
        assert owed.redeliveries.beyond_rows == wanted.pop(steps.count, 0)
        assert by_step(owed.redeliveries) == wanted
        assert wanted
    if subscriptions:
        assert found.overdue_rows == len(overdue)


SUBSCRIPTIONS = {"nobody": (), "one": ("s",), "two": ("s", "t"), "with_a_late_one": ("late", "s", "t")}


@pytest.mark.parametrize(("seed", "step_ms"), [(1, MINUTE_MS), (2, HOUR_MS), (3, MINUTE_MS)])
async def test_a_forecast_says_what_the_daemons_say(
    served: Engine, job: job_settings.Settings, seed: int, step_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_job, "TASK_BYTES", 200_000)
    monkeypatch.setattr(forecast_job, "WAVE_TASKS", 2)
    for topic, subscriptions in SUBSCRIPTIONS.items():
        await lived(served, topic, subscriptions, seed)
    workers = Inline()
    found = forecast(job, _now_ms(), step_ms=step_ms, workers=workers)
    assert [each.topic for each in found.topics] == sorted(SUBSCRIPTIONS)
    for each in found.topics:
        await check(served, each, SUBSCRIPTIONS[each.topic], found.steps)
    assert workers.tasks > 4
    assert found.unread == ()
    assert found.effort.buckets >= found.effort.buckets_opened > 0
    assert found.effort.segments >= found.effort.segments_read > 0


async def test_named_topics_alone_are_read(served: Engine, job: job_settings.Settings) -> None:
    now_ms = _now_ms()
    for topic in ("a", "b", "c"):
        await add(served, topic, random_rows(random.Random(1), 10, 1, now_ms, past=False))
    found = forecast(job, now_ms, topics=["b", "absent"])
    assert [each.topic for each in found.topics] == ["b"]


async def test_what_lies_within_one_step_is_not_read(
    served: Engine, job: job_settings.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = _now_ms()
    begin = now_ms // HOUR_MS * HOUR_MS + 5 * HOUR_MS
    for ledger_id in (1, 2):
        times = np.arange(150, dtype=np.uint64) * np.uint64(10_000) + np.uint64(begin)
        rows = Rows(times, np.full(150, ledger_id, np.uint64), np.arange(150, dtype=np.uint64))
        await add(served, "t", rows)
        await served.requests.seal("t")
    # Some of it is gone.
    await served.requests.cancel("t", None, np.full(7, 1, np.uint64), np.arange(7, dtype=np.uint64))
    workers = Inline()
    found = forecast(job, now_ms, step_ms=HOUR_MS, workers=workers)
    assert by_step(found.load) == {5: 293}
    assert (workers.tasks, found.effort.buckets, found.effort.buckets_opened) == (0, 2, 0)


async def test_a_topic_whose_buckets_were_merged_meanwhile_is_counted_again(
    served: Engine, job: job_settings.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = _now_ms()
    for ledger_id in (1, 2, 3):
        await add(served, "t", random_rows(random.Random(ledger_id), 150, ledger_id, now_ms, past=False))
        await served.requests.seal("t")
    await add(served, "other", random_rows(random.Random(9), 150, 1, now_ms, past=False))
    await served.requests.seal("other")
    wanted = forecast(job, now_ms)
    place = Root.open(store_of(job)).place_of("t")
    workers, counted = Inline(), forecast_job.count_bucket

    def missing_at_first(*arguments: Any) -> Any:
        """As it is when a merge was committed after the topic was read, and what it merged was collected."""
        live: LiveBucket = arguments[2]
        if workers.tasks == 0 and place.topic_id in live.object.name:
            raise NotFound(live.object.name, "it was collected")
        return counted(*arguments)

    monkeypatch.setattr(forecast_job, "count_bucket", missing_at_first)
    again = forecast(job, now_ms, workers=workers)
    assert workers.tasks > 1
    assert by_step(again.load) == by_step(wanted.load)
    assert again.unread == ()


async def test_what_is_damaged_is_left_out_and_named(served: Engine, job: job_settings.Settings) -> None:
    now_ms = _now_ms()
    for topic in ("good", "bad"):
        await add(served, topic, random_rows(random.Random(1), 150, 1, now_ms, past=False))
        await served.requests.seal(topic)
    place = Root.open(store_of(job)).place_of("bad")
    store = LocalDirectory(job.store.path)
    (key,) = [each.key for each in store.list(place.prefix) if "/buckets/" in each.key]
    body = bytearray(store.get(key))
    footer = bucket_format.decode_footer(bytes(body[-bucket_format.FOOTER_BYTES :]), len(body))
    table = bucket_format.decode_table(bytes(body[footer.offset : footer.offset + footer.length]), footer)
    for segment in table.segments:
        body[segment.offset + 20] ^= 1
    store.put(key, bytes(body))
    found = forecast(job, now_ms)
    bad, good = found.topics
    assert (bad.topic, bad.unread_rows, bad.load.rows_within) == ("bad", 150, 0)
    assert good.load.rows_within + good.load.beyond_rows == 150
    (unread,) = found.unread
    assert (unread.topic, unread.bucket, unread.rows, unread.damaged) == ("bad", key, 150, True)
    assert "damaged" in unread.reason


async def test_a_topic_that_cannot_be_read_is_left_out_and_named(served: Engine, job: job_settings.Settings) -> None:
    now_ms = _now_ms()
    for topic in ("good", "bad"):
        await add(served, topic, random_rows(random.Random(1), 50, 1, now_ms, past=False))
    place = Root.open(store_of(job)).place_of("bad")
    store = LocalDirectory(job.store.path)
    tip = max(each.key for each in store.list(place.prefix) if "/manifest/" in each.key)
    store.put(tip, b"no manifest")
    found = forecast(job, now_ms)
    assert [each.topic for each in found.topics] == ["good"]
    (unread,) = found.unread
    assert (unread.topic, unread.damaged) == (place.topic_id, True)


async def test_local_processes_and_spark_say_the_same(
    served: Engine, job: job_settings.Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_job, "TASK_BYTES", 200_000)
    await lived(served, "t", ("s", "t"), 4)
    now_ms = _now_ms()
    inline = forecast(job, now_ms)
    local = forecast(job, now_ms, workers=LocalEngine(parallelism=2, preload=("batch.forecast.forecast_job",)))
    by_spark = forecast(job, now_ms, workers=spark_engine.SparkEngine.of_session(spark))
    for other in (local, by_spark):
        assert by_step(other.load) == by_step(inline.load)
        assert (other.overdue_rows, other.beyond_rows) == (inline.overdue_rows, inline.beyond_rows)
        assert other.effort == inline.effort
