"""Processes that begin with their program loaded: each is forked from one that has loaded it, since that takes longer
than most of what tests ask of a daemon or a command.

Owns: the process that has a program, one for each test process and program; and what stands for `subprocess.Popen`.
Does not own: what the programs do, their files and their environment.

The process that has a program has no threads, and serves nothing: what it forks is as if its command line had started
it. It ends with the test process, and ends what it has forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# By module, whose `main` is the program: what that imports when it is run.
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "daemon.main": ("daemon.command", "daemon.process"),
    "examples.ledger_owner": (),
    "examples.nats_relay": (),
    "examples.redis_relay": (),
    "examples.s3_server": (),
    "tarry.cli": ("tarry.cli.commands",),
    "tarry_relay.relay_command": ("tarry_relay.nats_broker", "tarry_relay.redis_broker"),
}


def open_process(command: Sequence[str], **named: Any) -> subprocess.Popen[bytes] | Forked:
    """In place of `examples.processes.open_process`: other programs, and those of another checkout, are loaded anew."""
    module = program_of(command)
    if module is None or Path(named["cwd"]) != REPOSITORY:
        return subprocess.Popen(command, start_new_session=True, **named)
    with Path(os.devnull).open() as nothing:
        files = (nothing.fileno(), named["stdout"].fileno(), named["stderr"].fileno())
        return fork(module, command[3:], files=files, environment=named["env"])


def program_of(command: Sequence[str]) -> str | None:
    """Which of `PROGRAMS` a command line runs."""
    python, option, module, *_ = [*command, "", "", ""]
    return module if (python, option) == (sys.executable, "-m") and module in PROGRAMS else None


def fork(
    module: str,
    arguments: Sequence[str],
    *,
    files: Sequence[int],
    environment: Mapping[str, str],
    folder: Path = REPOSITORY,
) -> Forked:
    """Runs one of `PROGRAMS`. `files`: descriptors of its input, its output and its log. `folder`: where it runs."""
    return _loaded(module).fork(arguments, files, environment, folder)


def run(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path = REPOSITORY,
    stdin: str = "",
    timeout_s: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """How one of `PROGRAMS` ended, and what it printed. Raises `subprocess.TimeoutExpired`, when it is ended."""
    with contextlib.ExitStack() as opened:
        given, output, log = (opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(stdin)
        given.flush()
        descriptors = (given.fileno(), output.fileno(), log.fileno())
        process = fork(module, arguments, files=descriptors, environment=environment, folder=folder)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        output.seek(0)
        log.seek(0)
        return subprocess.CompletedProcess([module, *arguments], status, output.read(), log.read())


class Forked:
    """A child of a child."""

    def __init__(self, parent: _Loaded, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        if self.poll() is None:
            # Its number is its own until the process that forked it is asked how it ended.
            ending = os.pidfd_open(self.pid)
            try:
                poller = select.poll()
                poller.register(ending, select.POLLIN)
                poller.poll(None if timeout is None else 1000 * timeout)
            finally:
                os.close(ending)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Loaded:
    """The process that has a program."""

    def __init__(self, module: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests._support.forked", module],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def fork(
        self, arguments: Sequence[str], files: Sequence[int], environment: Mapping[str, str], folder: Path
    ) -> Forked:
        request = {
            "arguments": list(arguments),
            "files": [f"/proc/{os.getpid()}/fd/{number}" for number in files],
            "environment": dict(environment),
            "folder": str(folder),
        }
        return Forked(self, self._ask(request))

    def status(self, pid: int) -> int | None:
        answer: int | None = self._ask({"pid": pid})
        return answer

    def end(self) -> None:
        self._process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


_programs: dict[str, _Loaded] = {}


def _loaded(module: str) -> _Loaded:
    if module not in _programs:
        _programs[module] = _Loaded(module)
    return _programs[module]


def end() -> None:
    """Ends what is left of them; what was forked ends with them."""
    while _programs:
        _programs.popitem()[1].end()


# ---- in the process that has a program


def _serve() -> Mapping[str, Any] | None:
    """Returns in each process that is forked what it is to do, and None at the end."""
    children: set[int] = set()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        answer: int | None
        if "arguments" in request:
            # Before whoever asks is answered, and closes them.
            request["files"] = [_open(path, number) for number, path in enumerate(request["files"])]
            answer = pid = os.fork()
            if not pid:
                return request
            children.add(pid)
            for opened in request["files"]:
                os.close(opened)
        else:
            answer = _status(request["pid"], children)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return None


def _open(path: str, number: int) -> int:
    return os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)


def _status(pid: int, children: set[int]) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _become(module: str, request: Mapping[str, Any]) -> None:
    os.setsid()
    os.chdir(request["folder"])
    for number, opened in enumerate(request["files"]):
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [module, *request["arguments"]]


def main() -> None:
    module = sys.argv[1]
    for name in (module, *PROGRAMS[module]):
        importlib.import_module(name)
    gc.freeze()
    request = _serve()
    if request is not None:
        _become(module, request)
        sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
