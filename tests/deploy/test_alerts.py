"""The rules for alarms are well formed, and those on the file of a job ask for series that it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import parser

from batch.compaction import tally
from batch.compaction.tally import RunCounts, Seconds, Status, Summary

FILE = Path(__file__).resolve().parents[2] / "deploy" / "alerts.yml"
GROUPS: dict[str, list[dict[str, Any]]] = {
    group["name"]: group["rules"] for group in yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
}
RULES = [rule for rules in GROUPS.values() for rule in rules]


def test_there_are_rules_for_daemons_and_for_compactions() -> None:
    assert set(GROUPS) == {"tarryd", "tarry-compaction"}


def test_no_two_alarms_have_one_name() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_has_what_prometheus_asks_for(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "annotations"}
    assert set(rule["annotations"]) == {"summary"}
    assert re.fullmatch(r"\d+[mhd]", rule.get("for", "0m"))
    assert rule["expr"].count("(") == rule["expr"].count(")")
    # The series are named with their labels, which are written in braces.
    assert re.search(r"tarry_\w+", rule["expr"])


def test_the_alarms_of_compactions_are_raised_by_series_that_a_compaction_writes(tmp_path: Path) -> None:
    summary = Summary(
        status=Status.DONE,
        exit_status=tally.EXIT_DONE,
        reason="",
        dry_run=False,
        engine="local",
        parallelism=1,
        began_ms=1_000,
        topics=1,
        buckets_before=2,
        buckets_after=1,
        runs=RunCounts(),
        sources=0,
        rows_read=0,
        rows_kept=0,
        rows_dropped=0,
        bytes_read=0,
        bytes_written=0,
        waves=0,
        conflicts_retried=0,
        seconds=Seconds(),
        refusals=(),
        topic_results=(),
        run_results=(),
    )
    tally.write_metrics(tmp_path / "of.prom", summary)
    families = list(parser.text_string_to_metric_families((tmp_path / "of.prom").read_text(encoding="utf-8")))
    written = {sample.name for family in families for sample in family.samples}
    asked = {name for rule in GROUPS["tarry-compaction"] for name in re.findall(r"tarry_\w+", rule["expr"])}
    assert asked <= written
    assert tally.LAST_SUCCESS in asked


@pytest.mark.parametrize(
    ("alarm", "status"),
    [("TarryCompactionFailed", tally.EXIT_ERROR), ("TarryCompactionConflicts", tally.EXIT_CONFLICTS)],
)
def test_the_exit_statuses_of_alarms_are_those_of_the_job(alarm: str, status: int) -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == alarm]
    assert rule["expr"].endswith(f" == {status}")
