"""The pages for new users of a relay run as they stand, with real brokers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples import processes
from tests._support import snippets
from tests.brokers import nats_server, redis_server
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.wire.test_pages import run_session

PAGES = Path(__file__).resolve().parents[3] / "docs" / "how-to"


def settings_of(page: str, instead: Mapping[str, str]) -> str:
    """The file that a page shows."""
    (found,) = re.findall(r"^```toml\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    for shown, own in instead.items():
        assert shown in found
        found = found.replace(shown, own)
    return f"{found}\n"


def test_the_session_with_redis_prints_what_stands_there(tmp_path: Path) -> None:
    if (program := redis_server.find()) is None:
        pytest.skip(redis_server.MISSING)
    port = processes.free_port()
    relay = f'[relay]\nlisten = "127.0.0.1:{processes.free_port()}"'
    shown = settings_of("redis.md", {":6379": f":{port}", "[relay]": relay})
    address = 'sed -i "s/^DAEMON$/daemon.address = \\"$TARRY_ADDRESS\\"/" relay.toml; '
    (tmp_path / "relay.toml").write_text(f"DAEMON\n{shown}")
    instead = {
        "tarryd 2>": f"{address} tarryd 2>",
        "redis-server": f"redis-server --port {port} --bind 127.0.0.1",
        "redis-cli": f"redis-cli -p {port}",
    }
    run_session("docs/how-to/redis.md", tmp_path, instead, program.parent)


def test_the_programs_with_nats_print_what_stands_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (program := nats_server.find()) is None:
        pytest.skip(nats_server.MISSING)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(nats_server.NatsServer(program, tmp_path))
        server.start()
        server.wait_until_loaded()
        store = processes.local_store(tmp_path / "root")
        daemon = stack.enter_context(processes.DaemonProcess("daemon", tmp_path, store))
        daemon.start_serving()
        # The table of the page has nothing but the topic, as that of the process has.
        shown = settings_of("nats.md", {"nats://127.0.0.1:4222": server.url, '[relay]\ntopic = "orders"\n': ""})
        running = stack.enter_context(RelayProcess("relay", tmp_path, f'daemon.address = "{daemon.address}"\n{shown}'))
        names: dict[str, Any] = {"__name__": "page"}
        blocks = snippets.of(PAGES / "nats.md")
        for number, block in enumerate(blocks):
            code = block.code.replace("nats://127.0.0.1:4222", server.url).replace("timeout=60", "timeout=600")
            exec(compile(code, f"block {number}", "exec"), names)
            assert capsys.readouterr().out == (block.output or "")
            if number == 0:
                running.start()
        assert len(blocks) == 3
        assert running.terminate() == 0
