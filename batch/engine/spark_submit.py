"""What is different in a driver that spark-submit started.

Owns: whether it did, and the two outputs. Does not own: the session (`spark_session`), and the entry file
(`deploy/spark/tarry_spark.py`).
"""

from __future__ import annotations

import os


def submitted() -> bool:
    """Whether spark-submit started this process: then Java is there, and is not ours to end."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def separate_outputs() -> None:
    """Gives standard error back: to the driver spark-submit gives one pipe for both outputs, whose other end it copies
    to its own standard output, so that messages would stand among the results.

    Where there is no /proc, or spark-submit's standard error cannot be opened (a socket), both stay joined.
    """
    if not submitted() or not os.path.samestat(os.fstat(1), os.fstat(2)):
        return
    try:
        messages = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    os.dup2(messages, 2)
    os.close(messages)
