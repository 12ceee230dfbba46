"""The pages for new users run as they stand, with real brokers: with the programs of the checkout, and with those that
are installed from built wheels, where nothing knows of the checkout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples import processes
from tests._support import snippets
from tests._support.installed import BARE_PYTHON, installed, make_dist
from tests._support.processes import child
from tests.brokers import kafka_server, nats_server, redis_server
from tests.relay.brokers._support.relay_process import PROGRAM, RelayProcess
from tests.wire.test_pages import run_session

PAGES = Path(__file__).resolve().parents[3] / "docs" / "how-to"
# Runs each line that it reads, a program as JSON, with the names of those before, and ends what it prints with a NUL.
_PYTHON = """
import json, sys
names = {"__name__": "page"}
for line in sys.stdin:
    exec(json.loads(line), names)
    print(end="\\0", flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Programs:
    """`tarryd`, and `tarry-relay` with a Python beside it that has the client of the broker."""

    folders: Sequence[Path]
    """Where they are."""
    tarryd: Sequence[str] = processes.TARRYD
    tarry_relay: Sequence[str] = PROGRAM
    python: str = sys.executable
    checkout: Path = processes.REPOSITORY
    """Their working directory."""


@pytest.fixture(scope="module")
def from_wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """They are removed at once, for environments are large."""
    folder = tmp_path_factory.mktemp("wheels")
    make_dist(folder / "dist")
    of_the_daemon = installed(folder / "dist", folder / "tarryd", BARE_PYTHON, "tarryd")
    of_the_relay = installed(folder / "dist", folder / "relay", BARE_PYTHON, "tarry-relay", "kafka", "nats", "redis")
    folders = [each.folder / "bin" for each in (of_the_daemon, of_the_relay)]
    tarryd, tarry_relay = str(folders[0] / "tarryd"), str(folders[1] / "tarry-relay")
    yield Programs(folders, (tarryd,), (tarry_relay,), str(folders[1] / "python"), of_the_relay.elsewhere)
    shutil.rmtree(folder)


@pytest.fixture(params=["checkout", pytest.param("wheels", marks=pytest.mark.long)])
def programs(request: pytest.FixtureRequest) -> Programs:
    if request.param == "checkout":
        return Programs([Path(sys.executable).parent])
    made: Programs = request.getfixturevalue("from_wheels")
    return made


def settings_of(page: str, instead: Mapping[str, str]) -> str:
    """The file that a page shows."""
    (found,) = re.findall(r"^```toml\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    for shown, own in instead.items():
        assert shown in found
        found = found.replace(shown, own)
    return f"{found}\n"


def test_the_session_with_redis_prints_what_stands_there(tmp_path: Path, programs: Programs) -> None:
    if (program := redis_server.find()) is None:
        pytest.skip(redis_server.MISSING)
    port = processes.free_port()
    relay = f'[relay]\nlisten = "127.0.0.1:{processes.free_port()}"'
    shown = settings_of("redis.md", {":6379": f":{port}", "[relay]": relay})
    address = 'sed -i "s/^DAEMON$/daemon.address = \\"$TARRY_ADDRESS\\"/" relay.toml; '
    directory = tmp_path / "shop"
    directory.mkdir()
    (directory / "relay.toml").write_text(f"DAEMON\n{shown}")
    instead = {
        "tarryd 2>": f"{address} tarryd 2>",
        "redis-server": f"redis-server --port {port} --bind 127.0.0.1",
        "redis-cli": f"redis-cli -p {port}",
    }
    run_session("docs/how-to/redis.md", directory, instead, program.parent, programs=programs.folders)


def printed(python: subprocess.Popen[str], code: str) -> str:
    """What a program prints, which runs after those before it."""
    assert python.stdin is not None
    assert python.stdout is not None
    print(json.dumps(code), file=python.stdin, flush=True)
    read = iter(lambda: python.stdout.read(1), "\0")  # type: ignore[union-attr]
    text = ""
    for character in read:
        assert character, f"it has ended after {text!r}"
        text += character
    return text


def run_programs(page: str, server: Any, shown_at: str, served_at: str, directory: Path, programs: Programs) -> None:
    """Runs the blocks of a page one after the other, and its relay from the first one on."""
    python = (programs.python, "-c", _PYTHON)
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        server.start()
        server.wait_until_loaded()
        store = processes.local_store(directory / "root")
        daemon = stack.enter_context(
            processes.DaemonProcess("daemon", directory, store, program=programs.tarryd, checkout=programs.checkout)
        )
        daemon.start_serving()
        # The table of the page has nothing but the topic, as that of the process has.
        shown = settings_of(page, {shown_at: served_at, '[relay]\ntopic = "orders"\n': ""})
        settings = f'daemon.address = "{daemon.address}"\n{shown}'
        relay = RelayProcess("relay", directory, settings, program=programs.tarry_relay)
        running = stack.enter_context(relay)
        reader = stack.enter_context(
            child(python, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=programs.checkout)
        )
        blocks = snippets.of(PAGES / page)
        for number, block in enumerate(blocks):
            code = block.code.replace(shown_at, served_at)
            for wait in ("timeout=60", "poll(60)"):
                code = code.replace(wait, wait.replace("60", "600"))
            assert printed(reader, code) == (block.output or "")
            if number == 0:
                assert all(each["good"] for each in running.told("check"))
                running.start()
        assert len(blocks) == 3
        assert running.terminate() == 0


def test_the_programs_with_nats_print_what_stands_there(tmp_path: Path, programs: Programs) -> None:
    if (program := nats_server.find()) is None:
        pytest.skip(nats_server.MISSING)
    server = nats_server.NatsServer(program, tmp_path)
    run_programs("nats.md", server, "nats://127.0.0.1:4222", server.url, tmp_path, programs)


@pytest.mark.long
def test_the_programs_with_kafka_print_what_stands_there(tmp_path: Path, programs: Programs) -> None:
    if (jars := kafka_server.find()) is None:
        pytest.skip(kafka_server.MISSING)
    server = kafka_server.KafkaServer(jars, tmp_path)
    run_programs("kafka.md", server, "127.0.0.1:9092", server.url, tmp_path, programs)
