"""`tarry-spark forecast`: what it shows and writes, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from batch.cli import entry
from batch.forecast import files as forecast_files
from batch.forecast import forecast_job
from batch.forecast.steps import HOUR_MS
from storage_backends.formats import bucket_format, names
from storage_backends.formats.row_columns import Rows
from storage_backends.local_directory import LocalDirectory
from tests.batch.engine._support.roots import StoredTopic, make_root

ROWS = 1_000


@pytest.fixture
def store(root: Path) -> LocalDirectory:
    made = LocalDirectory(root)
    make_root(made)
    return made


def fill(store: LocalDirectory, topic: str) -> str:
    """A bucket of rows that come due in the second to tenth hour from now; its key."""
    first_ms = (time.time_ns() // 1_000_000 // HOUR_MS + 2) * HOUR_MS
    times = np.random.default_rng(1).integers(first_ms, first_ms + 8 * HOUR_MS, ROWS).astype(np.uint64)
    stored = StoredTopic(store, topic)
    live = stored.write(Rows(times, np.full(ROWS, 1, np.uint64), np.arange(ROWS, dtype=np.uint64)))
    stored.seal([live])
    return live.object.name


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(entry.cli, ["forecast", "--engine", "local", "--store", str(root), *arguments])


def test_it_shows_draws_and_writes(store: LocalDirectory, root: Path, tmp_path: Path) -> None:
    fill(store, "orders")
    fill(store, "mail")
    parquet, png = tmp_path / "due.parquet", tmp_path / "due.png"
    png.write_text("an old picture")
    found = run(root, "--days", "2", "--step", "minute", "--parquet", str(parquet), "--png", str(png))
    assert found.exit_code == 0, found.output
    assert "due       2,000 rows" in found.stdout
    assert "by the minute" in found.stdout
    table = pyarrow.parquet.read_table(parquet)
    assert sum(table["rows"].to_pylist()) == 2_000
    assert set(table["topic"].to_pylist()) == {"orders", "mail"}
    assert png.read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"root", "due.parquet", "due.png"}
    assert "wrote" in found.stderr


def test_json_is_alone_on_standard_output(store: LocalDirectory, root: Path) -> None:
    fill(store, "orders")
    fill(store, "mail")
    found = run(root, "--json", "--quiet", "--topic", "mail", "--top", "1")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert (document["rows"], document["topics"], document["step"]) == (ROWS, 1, "hour")
    assert [each["topic"] for each in document["busiest_topics"]] == ["mail"]
    assert 0 < document["seconds"] < 60
    assert found.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--days", "0"), 2, "--days"),
        (
            ("--days", "732", "--step", "minute"),
            2,
            "--days is 732; by the minute it must be at most 731; by the hour, at most",
        ),
        (("--step", "second"), 2, "--step"),
        (("--parquet", "due", "--png", "due"), 2, "--parquet and --png are both due"),
        (("--topic", "absent"), 1, "no such topic: 'absent'"),
        (("--parquet", "absent/due.parquet"), 1, "cannot write absent/due.parquet: No such file or directory"),
        (("--png", "."), 1, "cannot write .: it is a directory"),
    ],
)
def test_what_is_wrong_is_said(
    store: LocalDirectory, root: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = run(root, *arguments)
    assert (found.exit_code, said in found.stderr) == (status, True), found.output
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_what_cannot_be_written_is_refused_before_the_work_begins(
    store: LocalDirectory, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(forecast_job, "run", never)
    assert run(root, "--png", str(root / "absent" / "due.png")).exit_code == 1


def test_a_store_without_a_root_is_an_error(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert found.exit_code == 1
    assert "FORMAT" in found.stderr
    assert run(tmp_path / "absent").exit_code == 1


def test_what_is_damaged_is_said_and_the_rest_is_written(store: LocalDirectory, root: Path, tmp_path: Path) -> None:
    fill(store, "orders")
    key = fill(store, "mail")
    body = store.get(key)
    store.put(key, body[: -bucket_format.FOOTER_BYTES] + bytes(bucket_format.FOOTER_BYTES))
    found = run(root, "--parquet", str(tmp_path / "due.parquet"))
    assert found.exit_code == 1
    assert "1 damaged buckets or topics are missing" in found.stderr
    assert key in found.stderr
    assert "not counted" in found.stdout
    assert pyarrow.parquet.read_table(tmp_path / "due.parquet")["topic"].unique().to_pylist() == ["orders"]


def test_sigterm_leaves_no_file(
    store: LocalDirectory, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        assert list(tmp_path.glob(".due.png.*"))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(forecast_job, "run", killed)
    before = signal.getsignal(signal.SIGTERM)
    assert run(root, "--png", str(tmp_path / "due.png")).exit_code == 143
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_that_stands_in_the_way_is_an_error(
    store: LocalDirectory, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made a directory while the work was done."""
    fill(store, "orders")
    path, entered = tmp_path / "due.png", forecast_files.OutputFile.__enter__

    def overtaken(file: forecast_files.OutputFile) -> forecast_files.OutputFile:
        made = entered(file)
        path.mkdir()
        return made

    monkeypatch.setattr(forecast_files.OutputFile, "__enter__", overtaken)
    found = run(root, "--png", str(path))
    assert found.exit_code == 1
    assert "due.png: Is a directory" in found.stderr


def test_the_key_of_a_topic_that_cannot_be_read_is_named(store: LocalDirectory, root: Path) -> None:
    fill(store, "orders")
    place = StoredTopic(store, "mail")
    key = names.topic_manifest_key(place.shard, place.topic_id, 1)
    store.put(key, b"no manifest")
    found = run(root)
    assert found.exit_code == 1
    assert place.topic_id in found.stderr
    assert "due       1,000 rows" in found.stdout
