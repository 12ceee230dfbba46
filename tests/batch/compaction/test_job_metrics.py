"""The metrics file of a compaction."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import parser

from batch.compaction import tally
from batch.compaction.tally import Summary
from tests.batch.compaction._support.jobs_in_process import World


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Summary:
    world = World(monkeypatch)
    world.topic().add(range(1, 5))
    return world.compact()


def samples(path: Path) -> dict[str, float]:
    families = parser.text_string_to_metric_families(path.read_text())
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_file_says_what_the_last_run_did(tmp_path: Path, done: Summary) -> None:
    path = tmp_path / "compaction.prom"
    tally.write_metrics(path, done)
    found = samples(path)
    assert (found["tarry_compaction_buckets before"], found["tarry_compaction_buckets after"]) == (4, 1)
    assert (found["tarry_compaction_runs committed"], found["tarry_compaction_exit_status"]) == (1, 0)
    assert found["tarry_compaction_rows kept"] == 80
    assert found[tally.LAST_RUN] == found[tally.LAST_SUCCESS] == done.began_ms / 1000
    assert [path.name for path in tmp_path.iterdir()] == ["compaction.prom"], "it is replaced as a whole"


def test_the_time_of_the_last_success_outlives_a_failure(tmp_path: Path, done: Summary) -> None:
    path = tmp_path / "compaction.prom"
    tally.write_metrics(path, done)
    tally.write_failure_metrics(path, ended_ms=done.began_ms + 5_000, exit_status=1)
    found = samples(path)
    assert found[tally.LAST_SUCCESS] == done.began_ms / 1000
    assert found[tally.LAST_RUN] == done.began_ms / 1000 + 5
    assert found["tarry_compaction_exit_status"] == 1


def test_a_first_run_that_fails_has_no_last_success(tmp_path: Path) -> None:
    path = tmp_path / "compaction.prom"
    path.write_text("what is this")
    tally.write_failure_metrics(path, ended_ms=5_000, exit_status=1)
    assert tally.LAST_SUCCESS not in samples(path)
