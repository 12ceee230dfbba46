"""Writes a forecast as a Parquet file.

It has one row for each topic, owner of rows, and step in which any come due:

    topic         string              its name
    subscription  string, or null     null: the rows are owed to every subscription of the topic
    due_from      timestamp(ms, UTC)  the beginning of the step
    rows          int64               rows that come due in the step
    redeliveries  int64               redeliveries of negatively acknowledged rows
    deliveries    int64               rows, as often as there are subscriptions that are owed them, and redeliveries

in the order of topic, subscription (null first) and due_from. The metadata of the file (`tarry.forecast`) is JSON:
`as_of`, `step`, `until`, and the rows that no step has: `overdue_rows`, `beyond_rows`, `unread_rows`.

`batch.cli.forecast` alone uses this module, because importing it takes as long as a small forecast.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet

from batch.forecast.result import STEP_NAMES, Forecast, Owed, TopicForecast, timestamp
from batch.forecast.steps import Steps

GROUP_ROWS: Final = 1 << 20
"""Rows of a row group, about"""

METADATA_KEY: Final = b"tarry.forecast"

_NAMES: Final = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
SCHEMA: Final = pyarrow.schema(
    [
        pyarrow.field("topic", _NAMES, nullable=False),
        pyarrow.field("subscription", _NAMES),
        pyarrow.field("due_from", pyarrow.timestamp("ms", tz="UTC"), nullable=False),
        pyarrow.field("rows", pyarrow.int64(), nullable=False),
        pyarrow.field("redeliveries", pyarrow.int64(), nullable=False),
        pyarrow.field("deliveries", pyarrow.int64(), nullable=False),
    ]
)


def write(forecast: Forecast, path: Path) -> None:
    """Write the file, replacing an existing one."""
    schema = SCHEMA.with_metadata({METADATA_KEY: msgspec.json.encode(_about(forecast))})
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for tables in _groups(forecast):
            writer.write_table(pyarrow.concat_tables(tables).unify_dictionaries().cast(schema))


def _about(forecast: Forecast) -> dict[str, Any]:
    return {
        "as_of": timestamp(forecast.steps.now_ms),
        "step": STEP_NAMES[forecast.steps.step_ms],
        "until": timestamp(forecast.steps.until_ms),
        "overdue_rows": forecast.overdue_rows,
        "beyond_rows": forecast.beyond_rows,
        "unread_rows": forecast.unread_rows,
    }


def _groups(forecast: Forecast) -> Iterator[list[pyarrow.Table]]:
    tables: list[pyarrow.Table] = []
    rows = 0
    for topic in forecast.topics:
        for owed in topic.owed:
            table = _table(forecast.steps, topic, owed)
            if not len(table):
                continue
            tables.append(table)
            rows += len(table)
            if rows >= GROUP_ROWS:
                yield tables
                tables, rows = [], 0
    if tables:
        yield tables


def _table(steps: Steps, topic: TopicForecast, owed: Owed) -> pyarrow.Table:
    step = np.union1d(owed.rows.step, owed.redeliveries.step)
    rows = np.zeros(len(step), np.int64)
    rows[np.searchsorted(step, owed.rows.step)] = owed.rows.rows
    redeliveries = np.zeros(len(step), np.int64)
    redeliveries[np.searchsorted(step, owed.redeliveries.step)] = owed.redeliveries.rows
    return pyarrow.table(
        [
            _same(topic.topic, len(step)),
            _same(owed.subscription, len(step)),
            pyarrow.array(steps.begins_ms(step), pyarrow.timestamp("ms", tz="UTC")),
            pyarrow.array(rows),
            pyarrow.array(redeliveries),
            pyarrow.array(rows * owed.receivers + redeliveries),
        ],
        schema=SCHEMA,
    )


def _same(value: str | None, rows: int) -> pyarrow.DictionaryArray:
    """Return a column with one value."""
    if value is None:
        return pyarrow.nulls(rows, _NAMES)
    places = pyarrow.array(np.zeros(rows, np.int32))
    return pyarrow.DictionaryArray.from_arrays(places, pyarrow.array([value]))
