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
from tests.brokers import kafka_server, nats_server, redis_server
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


def run_programs(
    page: str, server: Any, shown_at: str, served_at: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the blocks of a page one after the other, and its relay from the first one on."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        server.start()
        server.wait_until_loaded()
        store = processes.local_store(directory / "root")
        daemon = stack.enter_context(processes.DaemonProcess("daemon", directory, store))
        daemon.start_serving()
        # The table of the page has nothing but the topic, as that of the process has.
        shown = settings_of(page, {shown_at: served_at, '[relay]\ntopic = "orders"\n': ""})
        running = stack.enter_context(RelayProcess("relay", directory, f'daemon.address = "{daemon.address}"\n{shown}'))
        names: dict[str, Any] = {"__name__": "page"}
        blocks = snippets.of(PAGES / page)
        for number, block in enumerate(blocks):
            code = block.code.replace(shown_at, served_at)
            for wait in ("timeout=60", "poll(60)"):
                code = code.replace(wait, wait.replace("60", "600"))
            exec(compile(code, f"block {number}", "exec"), names)
            assert capsys.readouterr().out == (block.output or "")
            if number == 0:
                assert all(each["good"] for each in running.told("check"))
                running.start()
        assert len(blocks) == 3
        assert running.terminate() == 0


def test_the_programs_with_nats_print_what_stands_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (program := nats_server.find()) is None:
        pytest.skip(nats_server.MISSING)
    server = nats_server.NatsServer(program, tmp_path)
    run_programs("nats.md", server, "nats://127.0.0.1:4222", server.url, tmp_path, capsys)


@pytest.mark.long
def test_the_programs_with_kafka_print_what_stands_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (jars := kafka_server.find()) is None:
        pytest.skip(kafka_server.MISSING)
    server = kafka_server.KafkaServer(jars, tmp_path)
    run_programs("kafka.md", server, "127.0.0.1:9092", server.url, tmp_path, capsys)
