"""Child processes: what is said when one fails, and that none is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples import processes


def test_a_daemon_that_ends_at_once_fails_with_its_log(tmp_path: Path) -> None:
    with processes.DaemonProcess("tarryd", tmp_path, {"bucket.rows_max": 0}) as daemon:
        with pytest.raises(processes.ProcessFailed, match=r"(?s)ended with status .*bucket\.rows_max"):
            daemon.start()
        assert not daemon.alive


def test_leaving_the_context_kills_the_process_also_when_it_is_stopped(tmp_path: Path) -> None:
    with processes.DaemonProcess("tarryd", tmp_path, processes.local_store(tmp_path / "root")) as daemon:
        daemon.start_serving()
        pid = daemon.pid
        assert daemon.usage().resident_bytes > 0
        daemon.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_daemon_starts_again_on_the_same_ports_and_its_metrics_can_be_read(tmp_path: Path) -> None:
    with processes.DaemonProcess("tarryd", tmp_path, processes.local_store(tmp_path / "root")) as daemon:
        daemon.start_serving()
        address = daemon.address
        assert daemon.metric("tarry_serving") == 1.0
        daemon.kill()
        daemon.start_serving()
        assert daemon.address == address
        assert daemon.terminate() == 0
