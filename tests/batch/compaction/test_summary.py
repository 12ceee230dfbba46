"""What people are told of a compaction."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from batch.compaction import summary
from batch.compaction.job import Options
from batch.compaction.summary import Summary
from tests.batch.compaction._support.jobs_in_process import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def text(shown: Table) -> str:
    to = Console(file=io.StringIO(), width=120)
    to.print(shown)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def cells(shown: str, topic: str) -> list[str]:
    (line,) = [line for line in shown.splitlines() if topic in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_table_has_a_line_for_each_topic_with_something_to_merge_and_a_total(world: World) -> None:
    world.topic("flights").add(range(1, 9))
    world.topic("trains").add(range(1, 5))
    world.topic("ships").add([1])
    done = world.compact()
    shown = text(summary.table(done))
    assert cells(shown, "flights") == ["flights", "8", "1", "1", "1"]
    assert cells(shown, "trains") == ["trains", "4", "1", "1", "1"]
    assert cells(shown, "total") == ["total", "13", "3", "2", "2"]
    assert "ships" not in shown


def test_a_topic_that_cannot_be_read_is_in_the_table_with_the_reason(world: World) -> None:
    world.topic("flights").add(range(1, 5))
    done = world.compact(Options(topics=["flights", "nowhere"]))
    assert cells(text(summary.table(done)), "nowhere")[-1] == "no such topic"
    assert done.reason == "0 runs failed, 1 topics cannot be read"


def test_a_plan_names_the_ledgers_of_each_run(world: World) -> None:
    world.topic("flights").add(range(1, 9))
    planned = text(summary.plan_table(world.compact(dry_run=True)))
    assert cells(planned, "flights")[:5] == ["flights", "0", "1 to 8", "8", "160"]


def test_the_lines_say_what_was_read_kept_and_refused(world: World) -> None:
    topic = world.topic("flights")
    topic.add(range(1, 5))
    done = world.compact()
    lines = summary.lines(done)
    assert lines[:2] == ["buckets 4 -> 1", "rows    80 read, 80 kept, 0 gone"]
    refused = msgspec.structs.replace(done.run_results[0], outcome=summary.Outcome.REFUSED, reason="others came first")
    results = (refused,)
    told = msgspec.structs.replace(done, run_results=results, runs=summary.counts(results))
    assert "refused: flights: others came first" in summary.lines(told)
    assert "runs    1 refused" in summary.lines(told)


def test_the_json_can_be_read_back(world: World) -> None:
    world.topic("flights").add(range(1, 5))
    done = world.compact()
    assert msgspec.json.decode(msgspec.json.encode(done), type=Summary) == done
