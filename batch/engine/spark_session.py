"""Opens a session of Spark for one job, with every setting that the jobs depend on, and ends it with its Java.

The caller, spark-submit or spark-defaults.conf choose the master, never this module; without any of them Spark takes
this machine, `local[*]`. `java` finds Java.

A driver that spark-submit started already has Java, and its two outputs joined; the entry file is
`deploy/spark/tarry_spark.py`.
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

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from batch.engine import engine_port, java


def submitted() -> bool:
    """Return whether spark-submit started this process: then Java exists, and is not ours to end."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def separate_outputs() -> None:
    """Restore standard error in a driver of spark-submit.

    spark-submit gives the driver one pipe for both outputs and copies it to its own standard output, so that messages
    would stand among the results. Both stay joined if there is no /proc, or spark-submit's standard error cannot be
    opened (a socket).
    """
    if not submitted() or not os.path.samestat(os.fstat(1), os.fstat(2)):
        return
    try:
        messages = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    os.dup2(messages, 2)
    os.close(messages)


_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
#: Settings that the jobs depend on; no configuration changes them.
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
#: Settings that the operator may override
DEFAULTS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # A crash in native code shows its place.
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    # Our queries are a range and a function in Python: compiling them takes longer than running them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # No tables: no metastore in the working directory.
    "spark.sql.catalogImplementation": "in-memory",
    "spark.log.level": "ERROR",
}
#: Settings that the operator may override, too; if everything is on this machine, nothing listens beyond it.
LOCAL_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
}
#: Options of a Java that is started here, unless the environment has its own: of the one that reads Spark's command
#: line, and of the driver's. The driver's Java passes tasks around for some seconds, on the cores that do them: the
#: first compiler is enough. The operator chooses its collector: Java does not start with two of them.
_JAVA_OPTIONS = {
    "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1",
}
_VARIABLES = ("JAVA_HOME", "PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", *_JAVA_OPTIONS)
_STOP_SECONDS = 30
#: The errors of a call when Java has died, or dies meanwhile
LOST = (Py4JError, OSError, EOFError)


class SparkUnusable(engine_port.EngineUnusable):
    """The error if Spark did not start, or cannot be used in this way; it says why."""


@contextlib.contextmanager
def session(name: str, *, master: str | None = None, parallelism: int | None = None) -> Iterator[SparkSession]:
    """Open the only session of this process; stop it at the end, with the Java that was started for it.

    `name` is shown in Spark's pages and logs. `master` is a URL of Spark; if it is None, that of spark-submit or of
    spark-defaults.conf applies, else `local[*]`. `parallelism` is the number of tasks at once on this machine, instead
    of a master. Raises SparkUnusable without Java, for an unknown master, or for both a master and a parallelism.
    """
    if parallelism is not None:
        if master is not None or submitted():
            raise SparkUnusable(
                f"--parallelism {parallelism} applies to this machine alone; "
                "set the tasks of a master in Spark (spark.executor.cores, local[N])"
            )
        master = f"local[{parallelism}]"
    with _as_before(), losses_without_traces(), tempfile.TemporaryDirectory(prefix="tarry-java-") as directory:
        started = not submitted()
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


@contextlib.contextmanager
def losses_without_traces() -> Iterator[None]:
    """Turn py4j's own message about a lost Java into one of level DEBUG within the block; its call raises as well.

    py4j logs it with its traces to the root logger if Java's death resets the connection during a call.
    """
    root = logging.getLogger()
    root.addFilter(_is_no_loss)
    try:
        yield
    finally:
        root.removeFilter(_is_no_loss)


def _is_no_loss(record: logging.LogRecord) -> bool:
    if record.exc_info is None or not isinstance(record.exc_info[1], Py4JNetworkError):
        return True
    _log.debug("%s", record.getMessage(), exc_info=record.exc_info)
    return False


def first_line(failure: BaseException) -> str:
    """Return the first line of a failure, without the Java stacks and "Exception thrown in awaitResult"."""
    java_exception = getattr(failure, "java_exception", None)
    while java_exception is not None:
        text, cause = _first_line(java_exception.toString()), java_exception.getCause()
        if cause is None or "awaitResult" not in text:
            return text
        java_exception = cause
    return _first_line(str(failure)) or type(failure).__name__


def is_local(master: str) -> bool:
    """Return whether every process of this master is on this machine."""
    return master == "local" or master.startswith(("local[", "local-cluster["))


def configured(conf: SparkConf, name: str, master: str | None) -> SparkConf:
    """Add the settings of the jobs to the operator's configuration."""
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
    """Restore after a session what it changes in this process: variables, and the handler of SIGINT."""
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
    # Start Java first: only it knows the settings of spark-submit and spark-defaults.conf.
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
    """Choose the operator's Python for the workers, else, on this machine alone, the one that runs this."""
    chosen = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    if chosen is None and is_local(conf.get("spark.master") or ""):
        chosen = sys.executable
    if chosen is not None:
        os.environ["PYSPARK_PYTHON"] = chosen
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _stop(spark: SparkSession) -> None:
    try:
        with warnings.catch_warnings():
            # Spark's own warning about it
            warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM process", RuntimeWarning)
            spark.stop()
    except LOST as failure:
        _log.warning("Spark's Java process died before the session stopped: %s", first_line(failure))


def _end_java(started: bool) -> None:
    gateway: Any = SparkContext._gateway
    if not started or gateway is None:
        return
    gateway.shutdown()
    # Java ends when its standard input does.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=_STOP_SECONDS)
    SparkContext._gateway = SparkContext._jvm = None
