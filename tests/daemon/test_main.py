"""`tarryd` as a process: arguments, exit status, the ready file, signals."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from daemon import config
from daemon.auth import hash_of
from tests._support import raw_http2
from tests._support.door_files import door_files, identity
from tests._support.processes import child, run_program

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def environment() -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("TARRY_")}
    return given | {"PYTHONPATH": str(REPOSITORY)}


def tarryd(*arguments: str, folder: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return child(
        [sys.executable, "-m", "daemon.main", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, folder: Path) -> tuple[int, str]:
    """Its status, and what it printed and logged."""
    ended = run_program([sys.executable, "-m", "daemon.main", *arguments], folder=folder, environment=environment())
    return ended.returncode, ended.stdout + ended.stderr


def run_anew(*arguments: str, folder: Path) -> tuple[int, str]:
    """As `run`, in a process that loads the program itself."""
    with tarryd(*arguments, folder=folder) as process:
        output, log = process.communicate(timeout=600)
        return process.returncode, output + log


def ready(path: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the file says as soon as the log says that it is listening."""
    assert process.stderr is not None
    for line in process.stderr:
        if "listening" in line:
            written: dict[str, Any] = json.loads(path.read_text())
            return written
    raise AssertionError(process.communicate())


def test_check_validates_and_probes_and_leaves_nothing_but_the_root(tmp_path: Path) -> None:
    status, log = run("--check", folder=tmp_path)
    assert status == 0, log
    assert "configuration and store are in order" in log
    assert not [path for path in (tmp_path / "tarry-data").rglob("*") if path.is_file() and "probe" in str(path)]


def test_a_wrong_setting_ends_with_status_2_and_its_name(tmp_path: Path) -> None:
    status, log = run("--check", "--set", "grpc.listn=x", folder=tmp_path)
    assert status == 2
    assert "did you mean grpc.listen?" in log
    assert "Traceback" not in log


def test_a_store_that_cannot_be_used_ends_with_status_1_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, log = run("--check", "--set", "store.path=file/root", folder=tmp_path)
    assert status == 1
    assert "file" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("setting", ["grpc.listen", "metrics.listen"])
def test_an_address_that_is_taken_ends_with_status_1_and_the_setting(tmp_path: Path, setting: str) -> None:
    other = "metrics.listen" if setting == "grpc.listen" else "grpc.listen"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        # What a fork of gRPC leaves behind keeps it from ending for a minute where its server has never begun to serve.
        status, log = run_anew("--set", f"{setting}={address}", "--set", f"{other}=127.0.0.1:0", folder=tmp_path)
    assert status == 1
    # A line of the daemon's alone: none of gRPC's own before it
    (line,) = log.splitlines()
    assert f"{setting}: {address} cannot be bound: Address already in use; another process listens there" in line
    assert f"set {setting} to another address" in line


def test_an_address_that_others_reach_needs_the_door_and_ends_with_status_2(tmp_path: Path) -> None:
    status, log = run("--set", "grpc.listen=0.0.0.0:0", folder=tmp_path)
    assert status == 2
    assert "tls.cert_file and access.identities_file are not set" in log
    assert "daemon.insecure" in log


def test_files_of_the_door_that_are_wrong_end_it_with_status_2(tmp_path: Path) -> None:
    status, log = run("--check", "--set", f"access.identities_file={tmp_path}/none", folder=tmp_path)
    assert (status, "access.identities_file" in log, "Traceback" in log) == (2, True, False)


def test_a_token_is_shown_once_with_the_line_that_knows_it(tmp_path: Path) -> None:
    status, output = run("token", folder=tmp_path)
    token, line = output.splitlines()
    assert (status, line) == (0, f'tokens = ["{hash_of(token)}"]')
    assert len(base64.urlsafe_b64decode(f"{token}=")) * 8 == 256
    assert run("token", folder=tmp_path)[1] != output


def test_a_token_goes_to_a_new_file_of_this_user_alone(tmp_path: Path) -> None:
    status, output = run("token", "--file", "made", folder=tmp_path)
    made = (tmp_path / "made").read_text().strip()
    assert (status, output) == (0, f'tokens = ["{hash_of(made)}"]\n')
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
    status, output = run("token", "--file", "made", folder=tmp_path)
    assert (status, "made cannot be made: File exists" in output) == (1, True)
    assert (tmp_path / "made").read_text().strip() == made


def test_health_is_asked_over_the_unix_socket_and_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    ready_file, victim = tmp_path / "ready.json", tmp_path / "victim"
    ready_file.symlink_to(victim)
    addresses = ("grpc.listen=127.0.0.1:0", "metrics.listen=127.0.0.1:0", f"grpc.unix_socket={tmp_path}/sock")
    settings = [argument for each in addresses for argument in ("--set", each)]
    status, output = run(*settings, "health", folder=tmp_path)
    assert (status, output.startswith(f"not serving: no daemon answers at unix:{tmp_path}/sock: ")) == (1, True)
    with tarryd("--ready-file", str(ready_file), *settings, folder=tmp_path) as process:
        answer = ready(ready_file, process)
        with grpc.insecure_channel(answer["grpc"]) as channel:
            watch = cast(Any, health_pb2_grpc.HealthStub(channel)).Watch(health_pb2.HealthCheckRequest(), timeout=600)
            next(each for each in watch if each.status == health_pb2.HealthCheckResponse.SERVING)
            watch.cancel()
        assert run(*settings, "health", folder=tmp_path) == (0, "serving\n")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)
    made = [path for path in tmp_path.rglob("*") if path != tmp_path]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    assert not victim.exists()
    assert not ready_file.is_symlink()


def test_health_names_a_certificate_that_expires_soon_and_the_log_no_call_that_breaks_the_protocol(
    tmp_path: Path,
) -> None:
    files = door_files(tmp_path, identity("one", ["inspect"], [""]))
    files.issue(not_after=datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=5))
    addresses = ("grpc.listen=127.0.0.1:0", "metrics.listen=127.0.0.1:0", f"grpc.unix_socket={tmp_path}/sock")
    settings = [argument for each in (*addresses, *files.settings()) for argument in ("--set", each)]
    ready_file = tmp_path / "ready.json"
    with tarryd("--ready-file", str(ready_file), *settings, folder=tmp_path) as process:
        ready(ready_file, process)
        with grpc.insecure_channel(f"unix:{tmp_path}/sock") as channel:
            watch = cast(Any, health_pb2_grpc.HealthStub(channel)).Watch(health_pb2.HealthCheckRequest(), timeout=600)
            next(each for each in watch if each.status == health_pb2.HealthCheckResponse.SERVING)
            watch.cancel()
        # A value that no table of gRPC's knows, of which it would print a line past the log
        raw_http2.ended(f"{tmp_path}/sock", "/tarry.v1.Cluster/GetVersion", [(b"grpc-encoding", b"zzz")])
        status, output = run(*settings, "health", folder=tmp_path)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=600)
    named = "a certificate in tls.cert_file expires at 20"
    assert (status, output.startswith(f"serving; {named}")) == (0, True)
    assert all(re.match(r"20\d\d-\d\d-\d\dT", line) for line in log.splitlines())


def test_health_takes_the_options_of_settings_before_it_and_after_it(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(f"[grpc]\nlisten = '127.0.0.1:1'\nunix_socket = '{tmp_path}/some'\n")
    (tmp_path / "none.toml").write_text("")
    file, other, socket_ = ("--config", "some.toml"), ("--config", "none.toml"), f"grpc.unix_socket={tmp_path}/set"
    for arguments, asked in (
        ((*file, "health"), "some"),
        (("health", *file), "some"),
        ((*other, "health", *file), "some"),
        ((*file, "health", "--set", socket_), "set"),
        (("--set", socket_, "health", "--set", "log.level=error"), "set"),
        (("--set", f"grpc.unix_socket={tmp_path}/before", "health", "--set", socket_), "set"),
    ):
        status, output = run(*arguments, folder=tmp_path)
        assert (status, f"no daemon answers at unix:{tmp_path}/{asked}:" in output) == (1, True), (arguments, output)


def test_give_up_takes_them_after_it_too(tmp_path: Path) -> None:
    status, output = run("give-up", "some-log", "--config", "missing.toml", folder=tmp_path)
    assert (status, "missing.toml cannot be read" in output) == (2, True)


def test_version_is_told(tmp_path: Path) -> None:
    status, output = run("--version", folder=tmp_path)
    assert status == 0
    assert output.startswith("tarryd ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_says_where_and_ends_with_status_0_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    ready_file = tmp_path / "ready.json"
    with tarryd(
        *("--ready-file", str(ready_file), "--set", "grpc.listen=127.0.0.1:0", "--set", "metrics.listen=127.0.0.1:0"),
        *("--set", "daemon.id=one", "--set", "log.format=json"),
        folder=tmp_path,
    ) as process:
        addresses = ready(ready_file, process)
        assert (addresses["pid"], addresses["daemon_id"]) == (process.pid, "one")
        with grpc.insecure_channel(addresses["grpc"]) as channel:
            watch = cast(Any, health_pb2_grpc.HealthStub(channel)).Watch(health_pb2.HealthCheckRequest(), timeout=600)
            next(each for each in watch if each.status == health_pb2.HealthCheckResponse.SERVING)
            with urllib.request.urlopen(f"http://{addresses['metrics']}/metrics", timeout=600) as answer:
                assert "tarry_serving 1.0" in answer.read().decode()
            process.send_signal(number)
            next(each for each in watch if each.status == health_pb2.HealthCheckResponse.NOT_SERVING)
            watch.cancel()
        _, log = process.communicate(timeout=600)
    assert process.returncode == 0, log
    assert [json.loads(line)["level"] for line in log.splitlines() if '"error"' in line] == []


def test_the_systemd_unit_waits_longer_than_the_daemon_drains() -> None:
    unit = (REPOSITORY / "deploy" / "tarryd.service").read_text()
    (timeout_s,) = (int(line.partition("=")[2]) for line in unit.splitlines() if line.startswith("TimeoutStopSec="))
    settings = config.Config()
    assert timeout_s > settings.daemon.drain_s + settings.grpc.drain_s


SERVE = "sys.exit(main.main(['--set', 'store.path=root']))"
# It asks to end while the command is being imported, or while it opens the store.
IMPORTING = """
import os, signal, sys

class Asking:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Asking())
from daemon import main
"""
OPENING = """
import os, signal, sys
from daemon import command, main

command.StoreProbe = lambda store, **_: os.kill(os.getpid(), signal.{number}) or sys.exit(9)
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "asks",
    [
        IMPORTING.replace("{module}", "daemon.command"),
        IMPORTING.replace("{module}", "numpy"),
        IMPORTING.replace("{module}", "daemon.process"),
        OPENING,
    ],
    ids=["at first", "while it is imported", "while the rest is imported", "while the store is opened"],
)
def test_a_signal_before_anything_is_served_is_an_orderly_end(number: str, asks: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", asks.replace("{number}", number) + SERVE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert "stopped before anything was served" in ended.stderr
    assert "Traceback" not in ended.stderr


# A store on a server, as far as the probe knows, that lets every writer win the races behind the first: those that are
# run beside serving wait for the root's FORMAT.
BREAKING = """
import sys, time
from daemon import main, store_probe
from storage_backends import probe, store_opening
from storage_backends.local_directory import LocalDirectory
from storage_backends.object_store import AlreadyExists, Bucket

class Breaking(LocalDirectory):
    bucket = Bucket("http://127.0.0.1:9000", "orders")
    raced = set()

    def put_if_absent(self, key, body, *, metadata):
        is_later = "race-" in key and self.raced - {key}
        if "race-" in key:
            self.raced.add(key)
        while is_later and "--check" not in sys.argv and not list(self.list("FORMAT")):
            time.sleep(0.01)
        try:
            super().put_if_absent(key, body, metadata=metadata)
        except AlreadyExists:
            if not is_later:
                raise
            self.put(key, body, metadata=metadata)

store_probe.BETWEEN_S = 0.0
store_opening.open_store = lambda place: Breaking(place.path)
with Breaking("tarry-data") as store:
    probe.remember(store, store.bucket, now_ms=1)
addresses = ["--set", "grpc.listen=127.0.0.1:0", "--set", "metrics.listen=127.0.0.1:0"]
sys.exit(main.main(addresses + sys.argv[1:]))
"""


@pytest.mark.parametrize("check", [True, False], ids=["check", "beside serving"])
def test_a_store_that_breaks_its_promise_ends_it_with_status_1_and_the_pass_is_gone(
    check: bool, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BREAKING, *(["--check"] if check else [])],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 1, ended.stderr
    assert "the store checks, and writes later" in ended.stderr
    assert "use another store" in ended.stderr
    assert ("this daemon ends, since its store cannot be trusted any longer" in ended.stderr) is not check
    assert (tmp_path / "tarry-data" / "FORMAT").exists() is not check
    assert not (tmp_path / "tarry-data" / "probe" / "passed").exists()
    assert "Traceback" not in ended.stderr
