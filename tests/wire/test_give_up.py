"""`tarryd give-up`, on a log whose newest record is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import tarry
from examples import processes
from storage_backends.formats import log_slot_format
from tests._support.processes import Daemons, run_program


def test_the_command_gives_up_the_newest_record_of_a_log_of_files(daemons: Daemons, tmp_path: Path) -> None:
    root = tmp_path / "root"
    settings = processes.local_store(root) | {"store.log_form": "files", "daemon.shards": 2}
    daemon = daemons.make("tarryd", settings)
    daemon.start_serving()
    with tarry.Client(daemon.address, timeout_s=600.0) as client:
        client.create_subscription("topic", "s")
        client.add("topic", 1, range(10), delay_ms=3_600_000)
        client.add("topic", 2, range(10), delay_ms=3_600_000)
    daemon.kill()
    (file,) = (each for each in root.glob(".logs/*/*") if each.name != "LOCK")
    at = file.read_bytes().rindex(log_slot_format.MAGIC)
    with file.open("r+b") as stored:
        # In the header, and in the last section, which would say what the header was
        for place in (at + 8, file.stat().st_size - 8):
            stored.seek(place)
            stored.write(b"damaged")
    daemon.start()
    daemon.wait_for_log("no shard can be served")
    daemon.kill()
    command = [*processes.TARRYD, "--set", f"store.path={root}", "give-up", file.parent.name]
    looked = run_program(command)
    assert looked.returncode == 1
    assert "nothing was written" in looked.stdout
    given_up = run_program([*command, "--accept-loss"])
    assert given_up.returncode == 0, given_up.stderr
    daemon.start_serving()
    with tarry.Client(daemon.address, timeout_s=600.0) as client:
        assert client.add("topic", 1, range(10), delay_ms=3_600_000).duplicates == 10
        assert client.add("topic", 2, range(10), delay_ms=3_600_000).accepted == 10


def test_the_command_begins_a_shard_anew_that_has_lost_its_manifests(daemons: Daemons, tmp_path: Path) -> None:
    root = tmp_path / "root"
    settings = processes.local_store(root) | {"daemon.shards": 1}
    daemon = daemons.make("tarryd", settings)
    daemon.start_serving()
    with tarry.Client(daemon.address, timeout_s=600.0) as client:
        client.create_subscription("topic", "s")
        client.add("topic", 1, range(10), delay_ms=3_600_000)
        client.seal("topic")
        client.add("topic", 2, range(10), delay_ms=3_600_000)
    daemon.kill()
    shutil.rmtree(root / "shards" / "00" / "manifest")
    daemon.start()
    daemon.wait_for_log("shard 0 has no manifest")
    daemon.kill()
    command = [*processes.TARRYD, "--set", f"store.path={root}", "give-up", "--shard", "0"]
    looked = run_program(command)
    assert looked.returncode == 1
    assert "nothing was written" in looked.stdout
    given_up = run_program([*command, "--accept-loss"])
    assert given_up.returncode == 0, given_up.stderr
    daemon.start_serving()
    with tarry.Client(daemon.address, timeout_s=600.0) as client:
        assert client.add("topic", 1, range(10), delay_ms=3_600_000).duplicates == 10
        assert client.add("topic", 2, range(10), delay_ms=3_600_000).accepted == 10
