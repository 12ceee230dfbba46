"""The lint rules of pyproject.toml: what the pure layers may not call, and that others may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

PURE = (
    "daemon/core/index/index.py",
    "storage_backends/formats/row_columns.py",
    "tests/daemon/core/index/test_index.py",
    "tests/storage_backends/formats/test_row_columns.py",
)
IMPURE = (
    "daemon/group_commit/daemon_log.py",
    "storage_backends/s3.py",
    "tests/wire/test_daemon.py",
    "examples/flights.py",
)

CALLS = {
    "time.time": "import time\n\nNOW = time.time()\n",
    "time.monotonic": "import time\n\nNOW = time.monotonic()\n",
    "datetime.datetime.now": "from datetime import UTC, datetime\n\nNOW = datetime.now(UTC)\n",
    "random.random": "import random\n\nX = random.random()\n",
    "uuid.uuid4": "import uuid\n\nX = uuid.uuid4()\n",
    "os.urandom": "import os\n\nX = os.urandom(8)\n",
    "asyncio.sleep": "import asyncio\n\n\nasync def wait() -> None:\n    await asyncio.sleep(1)\n",
}


def ruff(source: str, path: str) -> str:
    """What ruff says of the source as the file of that path."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "--stdin-filename", path]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUFF_")}
    run = subprocess.run(
        [*command, "-"], input=source, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=600
    )
    assert run.returncode in (0, 1), run.stderr
    return run.stdout


@pytest.mark.parametrize("path", PURE)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_not_repeatable_is_refused_in_the_pure_layers_and_in_their_tests(call: str, path: str) -> None:
    assert f"TID251 `{call}` is banned: " in ruff(CALLS[call], path)


@pytest.mark.parametrize("path", IMPURE)
@pytest.mark.parametrize("call", CALLS)
def test_the_same_call_is_allowed_at_the_edge(call: str, path: str) -> None:
    assert "TID251" not in ruff(CALLS[call], path)
