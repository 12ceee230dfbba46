"""A DAG for Airflow 3: every night merge small buckets, then forecast the week, then audit.

It runs `tarry-spark`, which the workers must have (docs/INSTALL.md): on the PATH, or in an environment of its own, and
TARRY_SPARK naming it. Its configuration is that of the daemons. Settings are read from the environment:

    TARRY_SPARK           the command; tarry-spark
    TARRY_SPARK_CONFIG    the daemons' file; /etc/tarry/tarryd.toml
    TARRY_SPARK_ENGINE    local, or spark with its master in spark-defaults.conf; local
    TARRY_SPARK_REPORTS   where forecasts and audits are written; /var/lib/tarry/reports

Exit status 75 means that conflicts are left: the task is tried again, and skipped when they stay after the last try,
since the next night merges them as well. Any other failure fails the task at once: another try would say the same.
"""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from airflow.sdk import dag, get_current_context, task

CONFLICTS = 75
COMMAND = os.environ.get("TARRY_SPARK", "tarry-spark")
SHARED = (
    f"--config={os.environ.get('TARRY_SPARK_CONFIG', '/etc/tarry/tarryd.toml')}",
    f"--engine={os.environ.get('TARRY_SPARK_ENGINE', 'local')}",
    "--json",
)
REPORTS = Path(os.environ.get("TARRY_SPARK_REPORTS", "/var/lib/tarry/reports"))


def run(name: str, *arguments: str) -> None:
    """Run a command of `tarry-spark`; its output is in the log of the task."""
    with subprocess.Popen([COMMAND, name, *SHARED, *arguments]) as process:
        try:
            status = process.wait()
        except BaseException:
            # The task is ended: by SIGTERM the command finishes the commit that it is at.
            process.terminate()
            raise
    if status == 0:
        return
    said = f"tarry-spark {name} ended with exit status {status}"
    if status != CONFLICTS:
        raise AirflowFailException(said)
    ours = get_current_context()["ti"]
    if ours.try_number <= ours.max_tries:
        raise AirflowException(f"{said}: conflicts are left, it is tried again")
    raise AirflowSkipException(f"{said}: conflicts are left for the next run")


@dag(
    schedule="17 2 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    # Two at once would be safe, and one of them a waste.
    max_active_runs=1,
    default_args={"execution_timeout": timedelta(hours=2)},
    tags=["tarry"],
)
def tarry_compaction() -> None:
    @task(retries=2, retry_delay=timedelta(minutes=10))
    def compact() -> None:
        run("compact", "--deadline=1h", f"--metrics-file={REPORTS / 'tarry_compaction.prom'}")

    # Whether buckets were merged is nothing to them: a forecast and an audit are of what is stored.
    @task(trigger_rule="all_done")
    def forecast() -> None:
        run("forecast", "--days=7", f"--parquet={REPORTS / 'forecast.parquet'}", f"--png={REPORTS / 'forecast.png'}")

    @task(trigger_rule="all_done")
    def audit() -> None:
        run("audit", f"--output={REPORTS / 'audit.json'}")

    compact() >> forecast() >> audit()


tarry_compaction()
