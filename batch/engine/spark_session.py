"""A session of Spark for one job: started with every setting that the jobs depend on, and ended with its Java.

Owns: which settings are ours and which are the operator's, the Python of the workers, and what is said when Spark does
not start. Does not own: which Java (`java`), what is run (`spark_engine`).

Where a job runs is never decided here: the master is the caller's, spark-submit's or spark-defaults.conf's. With none
of these Spark itself takes this machine, `local[*]`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from batch.engine import engine_port, java, spark_submit

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
#: What the jobs depend on; no configuration changes it.
REQUIRED = {
    # Due times are shown and cut into hours in UTC on every machine.
    "spark.sql.session.timeZone": "UTC",
    # An overflow is an error, never a null.
    "spark.sql.ansi.enabled": "true",
    # Columns between Spark and Python; never, silently, a Python object a value.
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
    # A worker keeps its store, its connections and its imports from task to task.
    "spark.python.worker.reuse": "true",
    # A job shows its own progress.
    "spark.ui.showConsoleProgress": "false",
}
#: What the operator may set otherwise.
DEFAULTS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # A crash in native code says where.
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    # Our queries are a range and a function in Python: compiling them takes longer than running them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # No tables: no metastore in the working directory.
    "spark.sql.catalogImplementation": "in-memory",
    "spark.log.level": "ERROR",
}
#: The operator may set these otherwise too; where everything is on this machine, nothing listens beyond it.
LOCAL_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
}
#: Options of a Java that is started here, unless the environment says otherwise: of the one that reads Spark's command
#: line, and of the driver's. That one hands tasks around for some seconds, on the cores of those who do them: the first
#: compiler is enough. Its collector is the operator's to choose: Java does not start when told of two.
_JAVA_OPTIONS = {
    "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1",
}
_VARIABLES = ("JAVA_HOME", "PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", *_JAVA_OPTIONS)
_STOP_SECONDS = 30
#: How a call ends when Java has died, or dies meanwhile.
LOST = (Py4JError, OSError, EOFError)


class SparkUnusable(engine_port.EngineUnusable):
    """Spark did not start, or is not to be used in this way; the message says why."""


@contextlib.contextmanager
def session(name: str, *, master: str | None = None, parallelism: int | None = None) -> Iterator[SparkSession]:
    """A session that is this process's only one, stopped at the end, together with the Java that was started for it.

    :param name: how the job is called in Spark's pages and logs.
    :param master: a URL of Spark; None: the one of spark-submit or of spark-defaults.conf, else `local[*]`.
    :param parallelism: tasks at once on this machine, instead of a master.
    :raises SparkUnusable: no Java, no such master, or a master and a parallelism.
    """
    if parallelism is not None:
        if master is not None or spark_submit.submitted():
            raise SparkUnusable(
                f"--parallelism {parallelism} applies to this machine alone; "
                "set the tasks of a master in Spark (spark.executor.cores, local[N])"
            )
        master = f"local[{parallelism}]"
    with _as_before(), tempfile.TemporaryDirectory(prefix="tarry-java-") as directory:
        started = not spark_submit.submitted()
        if started:
            _choose_java(Path(directory))
            for variable, options in _JAVA_OPTIONS.items():
                os.environ.setdefault(variable, options)
            if master is not None and is_local(master):
                os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        try:
            spark = _start(name, master)
        except (PySparkException, Py4JError) as failure:
            _end_java(started)
            raise SparkUnusable(f"cannot start Spark: {first_line(failure)}") from failure
        try:
            yield spark
        finally:
            _stop(spark)
            _end_java(started)


def first_line(failure: BaseException) -> str:
    """What a failure says, without the stacks of the Java side, and without "Exception thrown in awaitResult"."""
    java_exception = getattr(failure, "java_exception", None)
    while java_exception is not None:
        text, cause = _first_line(java_exception.toString()), java_exception.getCause()
        if cause is None or "awaitResult" not in text:
            return text
        java_exception = cause
    return _first_line(str(failure)) or type(failure).__name__


def is_local(master: str) -> bool:
    """Whether every process of this master is on this machine."""
    return master == "local" or master.startswith(("local[", "local-cluster["))


def configured(conf: SparkConf, name: str, master: str | None) -> SparkConf:
    """Completes what the operator configured with what the jobs need."""
    conf.setAppName(name)
    if master is not None:
        conf.setMaster(master)
    for key, value in REQUIRED.items():
        conf.set(key, value)
    defaults = DEFAULTS | (LOCAL_DEFAULTS if is_local(conf.get("spark.master") or "") else {})
    for key, value in defaults.items():
        conf.setIfMissing(key, value)
    return conf


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Gives back what a session changes in this process: variables, and what SIGINT does."""
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    in_main_thread = threading.current_thread() is threading.main_thread()
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if in_main_thread:
            signal.signal(signal.SIGINT, interrupted)


def _start(name: str, master: str | None) -> SparkSession:
    # Java is started first: only it knows what spark-submit and spark-defaults.conf say.
    SparkContext._ensure_initialized()
    conf = configured(SparkConf(_jvm=SparkContext._jvm), name, master)
    _choose_python(conf)
    spark: SparkSession = SparkSession.builder.config(conf=conf).getOrCreate()
    context = spark.sparkContext
    _log.info("Spark %s on %s: %d tasks at once", spark.version, context.master, context.defaultParallelism)
    return spark


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _choose_java(directory: Path) -> None:
    try:
        chosen = java.find(os.environ)
    except java.JavaMissing as missing:
        raise SparkUnusable(str(missing)) from missing
    home = java.home(chosen, directory)
    if home is None:
        os.environ.pop("JAVA_HOME", None)
    else:
        os.environ["JAVA_HOME"] = str(home)
    _log.info("Java %d: %s", chosen.version, chosen.source)


def _choose_python(conf: SparkConf) -> None:
    """The operator's Python for the workers; on this machine alone, else, the one that runs this."""
    chosen = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    if chosen is None and is_local(conf.get("spark.master") or ""):
        chosen = sys.executable
    if chosen is not None:
        os.environ["PYSPARK_PYTHON"] = chosen
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _stop(spark: SparkSession) -> None:
    try:
        with warnings.catch_warnings():
            # Spark's own word for it.
            warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM process", RuntimeWarning)
            spark.stop()
    except LOST as failure:
        _log.warning("Spark's Java process died before the session stopped: %s", first_line(failure))


def _end_java(started: bool) -> None:
    gateway: Any = SparkContext._gateway
    if not started or gateway is None:
        return
    gateway.shutdown()
    # It ends when its standard input does.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=_STOP_SECONDS)
    SparkContext._gateway = SparkContext._jvm = None
