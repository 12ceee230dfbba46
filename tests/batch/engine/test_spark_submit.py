"""What a driver does differently when spark-submit started it. (spark-submit itself is run where jobs are.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """\
import sys
from batch.engine import spark_session
spark_session.separate_outputs()
print("a result", flush=True)
print("a message", file=sys.stderr)
"""
# As spark-submit does: one pipe for both outputs of the driver, copied to its own standard output.
PARENT = """\
import subprocess, sys
run = subprocess.run([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
sys.stdout.buffer.write(run.stdout)
"""


def outputs(tmp_path: Path, **environment: str) -> tuple[str, str]:
    """The standard output and error of a parent whose child is the driver."""
    messages = tmp_path / "messages"
    with messages.open("ab") as stderr:
        run = subprocess.run(
            [sys.executable, "-c", PARENT, DRIVER],
            env={"PATH": os.defpath, **environment},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=600,
            check=True,
        )
    return run.stdout, messages.read_text()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_messages_of_a_submitted_driver_do_not_stand_among_its_results(tmp_path: Path) -> None:
    assert outputs(tmp_path, PYSPARK_GATEWAY_PORT="1") == ("a result\n", "a message\n")


def test_outputs_that_somebody_else_joined_stay_so(tmp_path: Path) -> None:
    assert outputs(tmp_path) == ("a result\na message\n", "")
