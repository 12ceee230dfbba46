"""A root as DataFrames: what the tables say, what a filter keeps from being read, and the page that documents it."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type

from batch.engine import root as job_root
from batch.tables import datasource, tables, u64
from batch.tables.tables import Wanted
from examples.processes import REPOSITORY
from storage_backends.formats import index_ids, slot_format
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import LiveBucket, Subscription
from storage_backends.formats.row_columns import Rows
from storage_backends.local_directory import LocalDirectory
from storage_backends.object_log import ObjectLogs
from storage_backends.storage_settings import SettingsError
from storage_backends.topic_manifest import SetSubscriptions
from tests.batch.engine._support.roots import HOUR_MS, NOW_MS, StoredTopic, make_root
from tests.batch.engine._support.stored_logs import LogDaemon
from tests.daemon.group_commit._support.log_walk import AtOnce

PAGE = REPOSITORY / "docs" / "DATA_SOURCE.md"
HIGH = (1 << 63) + 5
BEYOND_MS = (1 << 64) - 1
S, OTHER = 1, 2


def rows(ledger: int, entries: list[int], due_ms: list[int], *, hashes: list[int] | None = None) -> Rows:
    return Rows(
        np.array(due_ms, np.uint64),
        np.full(len(entries), ledger, np.uint64),
        np.array(entries, np.uint64),
        None if hashes is None else np.array(hashes, np.uint32),
    )


class Root:
    """Two topics. `t`: a bucket of ledger 1 (one row gone), one of a high ledger, one of batch parts of `s`; rows in no
    bucket; subscriptions `s` and `other`. `u`: one bucket.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.store = LocalDirectory(str(place))
        make_root(self.store)
        t, u = StoredTopic(self.store, "t"), StoredTopic(self.store, "u")
        stored = (
            Subscription(subscription_id=S, name="s", since_ms=0, created_slot=ShardSlot(0)),
            Subscription(subscription_id=OTHER, name="other", since_ms=NOW_MS + HOUR_MS, created_slot=ShardSlot(0)),
        )
        t.commit(
            SetSubscriptions(subscriptions=stored, last_subscription_id=OTHER, epoch=t.epoch, delete_after_ms=NOW_MS)
        )
        first = t.write(rows(1, [0, 1, 2], [NOW_MS, NOW_MS + HOUR_MS, NOW_MS + 2 * HOUR_MS], hashes=[7, 8, 1 << 31]))
        high = t.write(rows(HIGH, [HIGH], [BEYOND_MS]))
        parts = t.write(rows(1, [(9 << 16) | 3], [NOW_MS]), index=index_ids.batch_parts_of(S))
        t.seal([first, high, parts], gone={first.object.name: {1: [1]}})
        self.buckets: dict[str, LiveBucket] = {"first": first, "high": high, "parts": parts}
        self._write_slot(t, rows(2, [5], [NOW_MS + 3 * HOUR_MS]))
        self.buckets["u"] = u.add([3], 4)[0]

    def _write_slot(self, topic: StoredTopic, added: Rows) -> None:
        """A slot behind the seal, and before it slots that it covers."""
        owner = LogDaemon(self.store, ObjectLogs(self.store, AtOnce()), "one")
        owner.claim(topic.shard)
        for slot in range(1, topic.slot + 2):
            owner.write(
                {topic.shard: (slot_format.AddRecord(topic.topic_id, 1, 0, added),) if slot > topic.slot else ()}
            )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    made = Root(tmp_path_factory.mktemp("stored") / "root")
    yield made
    made.store.close()


@pytest.fixture
def registered(spark: SparkSession) -> SparkSession:
    datasource.register(spark)
    return spark


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    """A session in which filters are pushed down."""
    spark.conf.set(datasource.PUSHDOWN, "true")
    datasource.register(spark)
    yield spark
    spark.conf.unset(datasource.PUSHDOWN)
    datasource.register(spark)


def load(spark: SparkSession, stored: Root, table: str = "rows", **options: str) -> DataFrame:
    return spark.read.format("tarry").options(store=str(stored.place), table=table, **options).load()


def identities(frame: DataFrame) -> set[tuple[str, int, int]]:
    return {(row.topic, row.ledger_id, row.entry_id) for row in frame.collect()}


def test_rows_are_those_that_are_not_gone_in_buckets_and_beside_them(registered: SparkSession, stored: Root) -> None:
    found = {(row.topic, row.ledger_id, row.entry_id): row for row in load(registered, stored).collect()}
    signed = HIGH - (1 << 64)
    of_u = {("u", 3, entry) for entry in range(4)}
    assert found.keys() == {("t", 1, 0), ("t", 1, 2), ("t", signed, signed), ("t", 1, 9), ("t", 2, 5)} | of_u
    first = found["t", 1, 0]
    assert (first.subscription, first.batch_index, first.key_hash) == (None, None, 7)
    assert first.bucket == stored.buckets["first"].object.name
    assert (first.deliver_at.timestamp() * 1000, first.deliver_at_ms) == (NOW_MS, NOW_MS)
    part = found["t", 1, 9]
    assert (part.subscription, part.batch_index, part.key_hash) == ("s", 3, None)
    high = found["t", signed, signed]
    assert (high.deliver_at, high.deliver_at_ms) == (None, -1)
    assert found["t", 2, 5].bucket is None


def test_buckets_are_what_the_manifests_say_of_them(registered: SparkSession, stored: Root) -> None:
    found = {row.bucket: row for row in load(registered, stored, "buckets").collect()}
    assert found.keys() == {live.object.name for live in stored.buckets.values()}
    first, live = found[stored.buckets["first"].object.name], stored.buckets["first"]
    assert (first.topic, first.rows, first.gone_rows, first.level) == ("t", 3, 1, 0)
    assert (first.size_bytes, first.sha256) == (live.object.size_bytes, live.object.sha256.hex())
    assert (first.hash_low % (1 << 64), first.hash_high % (1 << 64)) == (live.hash_low, live.hash_high)
    assert (first.quarantined, first.damage, first.batch_parts) == (False, None, False)
    parts = found[stored.buckets["parts"].object.name]
    assert (parts.subscription, parts.batch_parts) == ("s", True)


def test_the_backlog_counts_what_each_subscription_is_owed(registered: SparkSession, stored: Root) -> None:
    found = {row.subscription: row for row in load(registered, stored, "backlog").collect()}
    assert found.keys() == {"s", "other"}
    assert (found["s"].rows, found["other"].rows) == (5, 3)
    assert found["s"].first_deliver_at.timestamp() * 1000 == NOW_MS
    assert found["other"].first_deliver_at.timestamp() * 1000 == NOW_MS + 2 * HOUR_MS
    assert found["s"].last_deliver_at is None, "the last is due beyond the year 9999"
    assert (found["s"].nacked, found["s"].dead_letters) == (0, 0)


CONDITIONS = {
    "of a topic": "topic = 'u'",
    "of topics": "topic IN ('u', 'nobody')",
    "of a ledger": "ledger_id = 1",
    "of a high ledger": f"ledger_id = {HIGH - (1 << 64)}",
    "of low ledgers": "ledger_id >= 0 AND ledger_id < 2",
    "due soon": f"deliver_at <= timestamp_millis({NOW_MS + HOUR_MS // 2})",
    "due at a moment": f"deliver_at = timestamp_millis({NOW_MS})",
    "due beyond the year 9999": "deliver_at <=> NULL",
    "due after all others": "deliver_at_ms < 0",
    "of nobody": "topic = 'nobody'",
    "of one topic and another": "topic = 'u' AND topic = 't'",
}


def test_filters_give_the_same_rows_where_they_are_pushed_down(pushing: SparkSession, stored: Root) -> None:
    frame = load(pushing, stored)
    everything = pushing.createDataFrame(frame.collect(), frame.schema)
    for name, condition in CONDITIONS.items():
        pruned = load(pushing, stored, prune="true").where(condition)
        assert identities(pruned) == identities(everything.where(condition)), name


def test_a_filtered_query_takes_no_rows_from_the_next_one_of_the_same_frame(
    pushing: SparkSession, stored: Root
) -> None:
    frame = load(pushing, stored)
    assert identities(frame.where("topic = 'u'")) < identities(frame)
    assert frame.where("topic = 'nobody'").count() == 0
    assert frame.count() == len(identities(load(pushing, stored)))


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Root]:
    """The same, but for two buckets of low ledgers that cannot be read."""
    made = Root(tmp_path / "root")
    for name in ("first", "parts"):
        live = made.buckets[name].object
        made.store.put(live.name, b"\0" * live.size_bytes)
    yield made
    made.store.close()


def test_buckets_that_a_filter_rules_out_are_not_read(pushing: SparkSession, damaged: Root) -> None:
    later = f"deliver_at > timestamp_millis({NOW_MS + 5 * HOUR_MS // 2})"
    for condition in ("topic = 'u'", "ledger_id > 2", later):
        assert identities(load(pushing, damaged, prune="true").where(condition)), condition


def test_where_filters_stay_with_spark_every_bucket_is_read(registered: SparkSession, damaged: Root) -> None:
    with pytest.raises(PySparkException, match=re.escape("/buckets/")):
        load(registered, damaged, prune="true").where("topic = 'u'").collect()
    assert identities(load(registered, damaged, topic="u"))


def test_topics_can_be_named(registered: SparkSession, stored: Root) -> None:
    assert {row.topic for row in load(registered, stored, topic="u").collect()} == {"u"}
    assert {row.topic for row in load(registered, stored, topics='["u", "t"]').collect()} == {"u", "t"}
    assert load(registered, stored, topic="nobody").collect() == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tabel": "rows"}, "option tabel is unknown"),
        ({"table": "row"}, "option table is row; it must be one of rows, buckets, backlog"),
        ({"prune": "yes"}, "option prune is yes; it must be true or false"),
        ({"topics": "u"}, "option topics is u; it must be a JSON list"),
        ({"topic": "u", "topics": '["t"]'}, "option topic and option topics are both set"),
        ({"store": "a", "path": "b"}, "option store and a path are both set"),
        ({"set.store.pth": "x"}, "store.pth"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        datasource.TarryDataSource(options)


def test_a_place_without_a_root_is_refused(registered: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="the store has no root"):
        registered.read.format("tarry").load(str(tmp_path)).collect()
    assert not list(tmp_path.rglob("FORMAT*"))


def test_u64_are_ordered_and_shown_as_such(spark: SparkSession) -> None:
    values = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    frame = spark.range(1).select(F.explode(F.array(*[u64.literal(value) for value in reversed(values)])).alias("n"))
    shown = frame.orderBy(u64.unsigned_order("n")).select(u64.decimal("n"), u64.hexadecimal(frame.n)).collect()
    assert [int(row[0]) for row in shown] == values
    assert [int(row[1], 16) for row in shown] == values
    for value in (-1, 1 << 64):
        with pytest.raises(ValueError, match="is not between"):
            u64.literal(value)


# ---- without Spark


def test_what_travels_to_tasks_holds_no_credentials(stored: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    on_s3 = datasource.TarryDataSource({"store": "s3://delays/root", "set.store.s3.region": "eu-west-1"})
    here = datasource.TarryDataSource({"store": str(stored.place)})
    reader = here.reader(here.schema())
    sent = pickle.dumps([on_s3, on_s3.reader(on_s3.schema()), reader, reader.partitions()])
    assert b"eu-west-1" in sent
    assert b"the-secret" not in sent
    assert b"the-name" not in sent


@pytest.mark.parametrize(
    ("first", "last", "ranges"),
    [
        (0, 5, ((0, 5),)),
        (-1, -1, (((1 << 64) - 1, (1 << 64) - 1),)),
        (-2, 1, ((0, 1), ((1 << 64) - 2, (1 << 64) - 1))),
        (3, 2, ()),
        (-(1 << 70), 1 << 70, ((0, (1 << 63) - 1), (1 << 63, (1 << 64) - 1))),
    ],
)
def test_a_range_of_bit_views_is_at_most_two_of_u64(first: int, last: int, ranges: tables.Ranges) -> None:
    assert tables.of_bit_view(first, last) == ranges


def test_a_segment_that_a_filter_rules_out_is_not_read(tmp_path: Path) -> None:
    with LocalDirectory(str(tmp_path)) as store:
        make_root(store)
        topic = StoredTopic(store, "t")
        (live,) = topic.add([1], 20_000)
        root = job_root.Root.open(store)
        middle = (live.min_deliver_at_ms + live.max_deliver_at_ms) // 2
        wanted = Wanted().only_due(((0, middle),))
        (part,) = tables.parts_of("rows", root, None, wanted)
        read = sum(batch.num_rows for batch in tables.read(part, store, wanted))
        everything = sum(batch.num_rows for batch in tables.read(part, store))
        assert everything == 20_000
        assert 9_000 < read < 16_000


# ---- the page


def documented(table: str) -> str:
    """A table of the page."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for column in tables.TABLES[table]:
        lines.append(f"| `{column.name}` | `{from_arrow_type(column.type).simpleString()}` | {column.meaning} |")
    return "\n".join(lines)


@pytest.mark.parametrize("table", tables.TABLES)
def test_the_page_has_the_columns_of_each_table(table: str) -> None:
    assert f"## {table}\n" in PAGE.read_text()
    assert documented(table) in PAGE.read_text()


@pytest.mark.parametrize("table", tables.TABLES)
def test_spark_sees_these_columns(registered: SparkSession, stored: Root, table: str) -> None:
    schema = load(registered, stored, table).schema
    expected = [(each.name, from_arrow_type(each.type), each.nullable) for each in tables.TABLES[table]]
    assert [(field.name, field.dataType, field.nullable) for field in schema] == expected


def test_the_example_of_the_page_runs_as_it_stands(
    spark: SparkSession, stored: Root, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    example = found[1]
    assert len([line for line in example.splitlines() if line]) == 10
    monkeypatch.setattr(sys, "argv", ["example.py", str(stored.place)])
    exec(compile(example, str(PAGE), "exec"), {})
    shown = capsys.readouterr().out
    assert "topic" in shown
    assert str(HIGH) in shown
