"""Implements `spark.read.format("tarry")`: a root as tables for analysts.

    datasource.register(spark)
    spark.read.format("tarry").option("store", "/var/lib/tarry").option("table", "rows").load()

Spark refuses a source that takes filters while `spark.sql.python.filterPushdown.enabled` is off, so `register` checks
that. A filter only passes over parts of which no row can satisfy it: Spark filters the rest in any case. But Spark 4.3
keeps the parts of a filtered query for the next query of the same DataFrame, which then silently lacks rows. Therefore
filters count only if the option `prune` says that there is one query.

Neither options, nor parts, nor plans hold credentials: every process has its own, from its environment. `tables` reads
the tables.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from batch.engine import job_settings
from batch.engine.job_settings import Settings, store_of
from batch.engine.root import Root
from batch.tables import tables
from batch.tables.tables import EVERYTHING, Ranges, Wanted
from storage_backends.storage_settings import SettingsError

FORMAT: Final = "tarry"
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"

_TABLE: Final = "table"
_OVERRIDE: Final = "set."
_PRUNE: Final = "prune"
_OPTIONS: Final = (_TABLE, "store", "path", "config", "topic", "topics", _PRUNE)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)


class TarryDataSource(DataSource):
    """The tables of a root.

    The options are `table` (`rows`, `buckets` or `backlog`; default `rows`); the place of the root, as `store` or the
    path of `load` (a local path or `s3://bucket/prefix`), `config` (the daemon's file) and `set.<section>.<key>` (one
    of its settings); the topics, as `topic` (one name) or `topics` (a JSON list of names); and `prune` (`true` or
    `false`), which says that the DataFrame is for one query, whose filters limit the reads.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        given = {name.lower(): value for name, value in options.items()}
        unknown = [name for name in given if name not in _OPTIONS and not name.startswith(_OVERRIDE)]
        if unknown:
            raise SettingsError(
                f"option {unknown[0]} is unknown; the options are {', '.join(_OPTIONS)} and {_OVERRIDE}<section>.<key>"
            )
        self._table = given.get(_TABLE, "rows")
        if self._table not in tables.TABLES:
            raise SettingsError(f"option {_TABLE} is {self._table}; it must be one of {', '.join(tables.TABLES)}")
        if "store" in given and "path" in given:
            raise SettingsError("option store and a path are both set; set only one")
        if "topic" in given and "topics" in given:
            raise SettingsError("option topic and option topics are both set; set only one")
        prune = given.get(_PRUNE, "false")
        if prune.lower() not in ("true", "false"):
            raise SettingsError(f"option {_PRUNE} is {prune}; it must be true or false")
        self._prune = prune.lower() == "true"
        self._topics = (given["topic"],) if "topic" in given else _topics_of(given.get("topics"))
        self._settings = job_settings.load(
            Path(given["config"]) if "config" in given else None,
            [f"{name.removeprefix(_OVERRIDE)}={value}" for name, value in given.items() if name.startswith(_OVERRIDE)],
            store=given.get("store", given.get("path")),
        )

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return from_arrow_schema(tables.schema_of(self._table))

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(self._table, self._settings, self._topics)


class PushingTarryDataSource(TarryDataSource):
    """The tables of a root, for a Spark that may push filters down."""

    def reader(self, schema: StructType) -> DataSourceReader:
        kind = _PushingReader if self._prune else _Reader
        return kind(self._table, self._settings, self._topics)


def register(spark: SparkSession) -> None:
    """Register the format with a session.

    Call it again after the session's `filterPushdown` was changed.
    """
    pushing = str(spark.conf.get(PUSHDOWN)).lower() == "true"
    spark.dataSource.register(PushingTarryDataSource if pushing else TarryDataSource)


def _topics_of(listed: str | None) -> tuple[str, ...] | None:
    if listed is None:
        return None
    try:
        found = json.loads(listed)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise SettingsError(f"option topics is {listed}; it must be a JSON list of names")
    return tuple(found)


class _Reader(DataSourceReader):
    def __init__(self, table: str, settings: Settings, topics: Sequence[str] | None) -> None:
        self._table = table
        self._settings = settings
        self._topics = topics
        self._wanted = EVERYTHING

    def partitions(self) -> Sequence[InputPartition]:
        root = Root.open(store_of(self._settings))
        return [InputPartition(part) for part in tables.parts_of(self._table, root, self._topics, self._wanted)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without any part Spark asks once, for nothing.
        if partition is None or partition.value is None:
            return
        yield from tables.read(partition.value, store_of(self._settings), self._wanted)


class _PushingReader(_Reader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Leave every filter to Spark as well; filters of a column that has a type of its own only narrow the reads."""
        for each in filters:
            self._wanted = narrowed(self._wanted, each, of_rows=self._table == "rows")
            yield each


# ---- filters


def narrowed(wanted: Wanted, condition: Filter, *, of_rows: bool) -> Wanted:
    """Return the limit on wanted rows when this condition holds, too.

    With `of_rows` the table is that of rows; in the others only topics are passed over.
    """
    attribute = getattr(condition, "attribute", ())
    if attribute == ("topic",):
        topics = _values(condition)
        return wanted if topics is None else wanted.only_topics(each for each in topics if isinstance(each, str))
    if not of_rows:
        return wanted
    if attribute == ("ledger_id",):
        return wanted.only_ledgers(_ranges(condition))
    if attribute == ("deliver_at_ms",):
        return wanted.only_due(_ranges(condition))
    if attribute == ("deliver_at",):
        return wanted.only_due(_times(condition))
    return wanted


def _values(condition: Filter) -> tuple[Any, ...] | None:
    """Return the values of which the column must have one, or None if the condition does not say so."""
    match condition:
        case EqualTo() | EqualNullSafe() if condition.value is not None:
            return (condition.value,)
        case In():
            return tuple(each for each in condition.value if each is not None)
    return None


def _bounds(condition: Filter) -> tuple[Any, Any] | None:
    """Return (first, last) of the column, each None without a bound, or None if the condition has no bounds."""
    match condition:
        case GreaterThan() | GreaterThanOrEqual():
            return condition.value, None
        case LessThan() | LessThanOrEqual():
            return None, condition.value
    return None


def _ranges(condition: Filter) -> Ranges:
    """Return the ranges outside of which no value, the bits of a u64, satisfies a filter, or ALL if unknown."""
    values = _values(condition)
    if values is not None:
        return tuple(each for value in values if isinstance(value, int) for each in tables.of_bit_view(value, value))
    bounds = _bounds(condition)
    if bounds is None:
        return tables.ALL
    first, last = bounds
    return tables.of_bit_view(tables.I64_MIN if first is None else first, tables.I64_MAX if last is None else last)


def _times(condition: Filter) -> Ranges:
    """Return the ranges (ms) outside of which no timestamp satisfies a filter, or ALL if unknown.

    A timestamp is a whole number of milliseconds.
    """
    values = _values(condition)
    if values is not None:
        times = [_micros(value) for value in values]
        if any(each is None for each in times):
            return tables.ALL
        return tuple((each // 1000, each // 1000) for each in times if each is not None and each >= 0)
    bounds = _bounds(condition)
    if bounds is None:
        return tables.ALL
    first, last = (None if each is None else _micros(each) for each in bounds)
    if first is None and last is None:
        return tables.ALL
    first_ms = 0 if first is None else max(0, first // 1000)
    last_ms = tables.TIMESTAMP_MS_MAX if last is None else last // 1000
    return ((first_ms, last_ms),) if first_ms <= last_ms else ()


def _micros(value: Any) -> int | None:
    """Return microseconds since 1970, or None if the value is no moment."""
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // _MICROSECOND
