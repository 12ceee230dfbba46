"""Spark for tests: a Java that starts quickly, a session, and a home that may be written to.

Owns: the configuration of Spark in tests. Does not own: the fixture `spark`, which is one session for all tests of a
process (`tests/conftest.py`), jobs as processes, and what Spark's event logs say (`jobs`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from batch.engine import java, spark_session

#: Where this environment's Spark is installed.
INSTALLED = Path(pyspark.__file__).resolve().parent

# The first compiler alone and a collector without threads: half the time. Spark's own code is not verified when it is
# loaded: a seventh of the rest.
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
_QUICK = {
    "spark.driver.extraJavaOptions": _QUICK_JAVA,
    "spark.executor.extraJavaOptions": _QUICK_JAVA,
}


def environment(directory: Path, events: Path | None = None, **settings: str) -> dict[str, str]:
    """The variables with which Spark starts quickly, on this machine alone, with the Java that a job would choose.

    :param directory: becomes the folder of Spark's configuration.
    :param events: where Spark writes all that happens, as JSON lines.
    :param settings: more of Spark's, `_` for `.`: `spark_task_maxFailures="1"`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    configured = _QUICK | {name.replace("_", "."): value for name, value in settings.items()}
    if events is not None:
        events.mkdir(parents=True, exist_ok=True)
        configured |= {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": events.as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
        }
    lines = [f"{name} {value}\n" for name, value in configured.items()]
    (directory / "spark-defaults.conf").write_text("".join(lines))
    home = java.home(java.find(os.environ), directory / "java")
    return {
        "SPARK_CONF_DIR": str(directory),
        "SPARK_LAUNCHER_OPTS": _QUICK_JAVA,
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **({} if home is None else {"JAVA_HOME": str(home)}),
    }


def home(directory: Path) -> Path:
    """A SPARK_HOME with the Spark that is installed. Executors of `local-cluster` work in a folder of their home,
    which must not be the installation.
    """
    directory.mkdir(parents=True)
    for path in INSTALLED.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


@contextmanager
def session(directory: Path, events: Path) -> Iterator[SparkSession]:
    """A session in this process, with two tasks at once, configured as a job's is.

    :param directory: becomes the folder of Spark's configuration.
    :param events: the folder of its event log.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME"):
            patch.delenv(name, raising=False)
        for name, value in environment(directory, events).items():
            patch.setenv(name, value)
        with spark_session.session("tests", parallelism=2) as opened:
            yield opened
