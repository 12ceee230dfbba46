"""The commands of docs/SECURITY.md, in one shell as a new operator types them, with a daemon that serves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests._support.processes import child, run_child

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "SECURITY.md"
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVE = "tarryd --config tarryd.toml\n"
# The daemon is another process, as in the guide; its port is free, and known when it is ready.
DAEMON = "until [ -f go ]; do sleep 0.05; done; exec tarryd --config tarryd.toml --ready-file ready.json"
SERVED = "touch go; until tarryd --config tarryd.toml health; do sleep 0.1; done\n"
ADDRESS = 'localhost:$(sed \'s/.*"grpc": *"[^"]*:\\([0-9]*\\)".*/\\1/\' ready.json)'
ROTATED = (
    "until tarry --token-file orders-next.token add orders/eu --ledger 1 --entries 10 --in 1h; do sleep 0.1; done\n"
)


def on_loopback(commands: str) -> str:
    commands = commands.replace('address = "tarry.example:7461"\n', "").replace("0.0.0.0:7461", "127.0.0.1:0")
    commands = commands.replace("tarry.example:7461", ADDRESS).replace("127.0.0.1:7462", "127.0.0.1:0")
    return SERVED if commands == SERVE else commands.replace("tarry.example", "localhost")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_the_commands_lead_from_nothing_to_tls_and_tokens_and_change_them(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TARRY_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    script = "".join(map(on_loopback, COMMANDS.findall(GUIDE.read_text(encoding="utf-8"))))
    began_s = time.monotonic()
    with child(["bash", "-c", DAEMON], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL):
        ran = run_child(["bash", "-e", "-c", script + ROTATED], cwd=tmp_path, env=environment)
    print(f"from nothing to TLS and tokens, and both changed, in {time.monotonic() - began_s:.1f} s")  # noqa: T201
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr.count("has none of the topic prefixes") == 1
    assert ran.stderr.count("needs the scope inspect") == 1
    told = (tmp_path / "audit.log").read_text()
    for name in ("orders", "orders-next", "operators"):
        assert (tmp_path / f"{name}.token").read_text().strip() not in told + ran.stderr
