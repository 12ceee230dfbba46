"""The schedule ids of rows, forgotten or mixed up on each of the ways that rows go."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from daemon.core.backlog.packed_rows import NackColumns
from daemon.core.index.mutable_bucket import MutableRows
from daemon.core.index.position_keys import KeyedRows
from daemon.topic import bucket_reads
from tests.planted.bug import Bug


def _without_ids(rows: KeyedRows) -> KeyedRows:
    return dataclasses.replace(rows, rows=dataclasses.replace(rows.rows, schedule_ids=None))


def rows_that_wait_for_their_redelivery_lose_their_ids(patch: pytest.MonkeyPatch) -> None:
    of = NackColumns.of
    patch.setattr(NackColumns, "of", staticmethod(lambda rows, times: of(_without_ids(rows), times)))


def rows_are_sealed_without_their_ids(patch: pytest.MonkeyPatch) -> None:
    kept = MutableRows.kept
    patch.setattr(MutableRows, "kept", lambda self: _without_ids(kept(self)))


def rows_of_a_segment_come_with_the_ids_of_others(patch: pytest.MonkeyPatch) -> None:
    read = bucket_reads.read_segments

    def mixed(*arguments: Any) -> Any:
        for rows in read(*arguments):
            ids = rows.schedule_ids
            turned = None if ids is None else ids.take(np.roll(np.arange(len(rows)), 1))
            yield dataclasses.replace(rows, schedule_ids=turned)

    patch.setattr(bucket_reads, "read_segments", lambda *arguments: list(mixed(*arguments)))


BUGS = (
    Bug("ids", rows_that_wait_for_their_redelivery_lose_their_ids, seed=13),
    Bug("ids", rows_are_sealed_without_their_ids, seed=1),
    Bug("ids", rows_of_a_segment_come_with_the_ids_of_others, seed=1),
)
