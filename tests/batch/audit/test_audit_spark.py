"""The audit as tasks of Spark: the same report as from processes of the machine."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from batch.audit import driver as audit
from batch.audit.driver import Limits, Request
from batch.audit.findings import Kind
from batch.engine import job_settings, spark_engine
from batch.engine.job_settings import store_of
from storage_backends.local_directory import LocalDirectory
from tests.batch.audit._support.audits import BUCKETS, audited, copy_of, findings, keys, kinds, sound_root


@pytest.mark.long
def test_tasks_of_spark_find_what_is_found_in_this_process(spark: SparkSession, tmp_path: Path) -> None:
    written = sound_root()
    damaged = keys(written, BUCKETS)[-2]
    written.put(damaged, written.get(damaged)[:-1])
    with LocalDirectory(tmp_path / "root") as local:
        for key in keys(written, ""):
            body, metadata = written.get_with_metadata(key)
            local.put(key, body, metadata=metadata)
    found = job_settings.load(store=str(tmp_path / "root"), environment={})
    limits = Limits(manifests_kept=1000, orphan_age_ms=1 << 50, overdue_ms=1 << 50)
    with spark_engine.SparkEngine.of_session(spark) as engine:
        report = audit.audit(
            store_of(found),
            engine,
            Request(store="root", limits=limits),
            open_store=functools.partial(store_of, found),
        )
    here = audited(copy_of(written))
    assert kinds(report) == kinds(here) == [(Kind.DAMAGED, damaged)]
    assert [found.detail for found in findings(report)] == [found.detail for found in findings(here)]
    assert (report.tally.objects, report.tally.rows) == (here.tally.objects, here.tally.rows)
    assert report.engine == "spark"
