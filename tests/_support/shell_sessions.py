"""The shell sessions in a document, and a shell that runs them.

Owns: finding the commands and what the document shows of their output; running them one after the other, in one bash
with a terminal; which of the output is the same from run to run.
Does not own: what the commands talk to.

Numbers, dates, bars and the widths of columns differ from run to run, and what runs in the background prints when it
likes. So of a command each line that is shown must come, with any numbers, as often as it is shown, from its start on.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

PATIENCE_S = 300.0
_SESSION = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What each run has of its own.
_OWN = (
    (_ESCAPE, ""),
    (re.compile(r"\d{4}-\d\d-\d\d "), ""),
    (re.compile(r"[\u2588-\u258f]+"), ""),
    (re.compile(r"[\u2500-\u257f]+"), "\u2500"),
    (re.compile(r"(?<=\d-\d-)[0-9a-f]{8}\b"), "#"),
    (re.compile(r"\d[\d,.]*"), "#"),
    (re.compile(r"\s+"), " "),
)
_CONFIRMED = "[y/N]: y"
_STATUS = re.compile(r"exit status (\d+)")
_ROWS, _COLUMNS = 50, 125


class Command(NamedTuple):
    """A command with the lines that continue it. `shown`: the lines below it, without those that say `...`."""

    text: str
    shown: tuple[str, ...]

    @property
    def status(self) -> int:
        """With which it says that it ends."""
        said = _STATUS.search(self.text)
        return int(said[1]) if said else 0


def of(document: Path) -> list[Command]:
    """The commands of all sessions of a document, in their order."""
    return [
        command for session in _SESSION.findall(document.read_text(encoding="utf-8")) for command in _split(session)
    ]


def _split(session: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        first, *lines = part.splitlines()
        more = [line for line in lines if line.startswith(">")]
        shown = [line for line in lines if not line.startswith(">") and line.strip() not in ("", "...")]
        yield Command("\n".join([first, *(line[2:] for line in more)]), tuple(shown))


def without_own(text: str) -> str:
    """What of a text is the same from run to run, on one line."""
    for pattern, stands in _OWN:
        text = pattern.sub(stands, text)
    return text.strip()


class Shell:
    """A bash with job control whose output goes to a terminal. A context manager: all that it started ends with it.

    `patience_s`: how long a command may take, and what is shown below it.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._terminal, ours = os.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-m"],
            stdin=subprocess.PIPE,
            stdout=ours,
            stderr=ours,
            cwd=directory,
            env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
            text=True,
        )
        os.close(ours)
        # When this process is gone, its input ends.
        self._write("trap 'kill -9 $(jobs -p)' EXIT")
        self._printed = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()
        self._commands = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bash.kill()
        for pid in _of_session(self._bash.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._bash.communicate()
        self._reader.join()
        os.close(self._terminal)

    @property
    def printed(self) -> str:
        """All output so far, without colours."""
        with self._news:
            return _ESCAPE.sub("", self._printed)

    def run(self, command: Command) -> None:
        """Returns when it has ended as it says, and all that is shown below it has come. Raises AssertionError."""
        begin = len(self._printed)
        self._commands += 1
        ended = re.compile(rf"\x1e{self._commands} (\d+)\x1e")
        answered = any(_CONFIRMED in line for line in command.shown)
        text = f"{{ {command.text}\n}} <<<y" if answered else command.text
        self._write(f"{text}\nprintf '\\x1e%d %d\\x1e\\n' {self._commands} $?")
        deadline_s = time.monotonic() + self._patience_s
        with self._news:
            self._news.wait_for(lambda: ended.search(self._printed, begin), self._patience_s)
            found = ended.search(self._printed, begin)
            assert found is not None, self._told(command, begin)
            assert int(found[1]) == command.status, self._told(command, begin)
            self._news.wait_for(lambda: not self._missing(command, begin), deadline_s - time.monotonic())
            assert not self._missing(command, begin), self._told(command, begin)

    def _write(self, line: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{line}\n")
        self._bash.stdin.flush()

    def _missing(self, command: Command, begin: int) -> list[str]:
        """Lines that are shown. A terminal may have wrapped them."""
        wanted = collections.Counter(without_own(line.replace(_CONFIRMED, "[y/N]:")) for line in command.shown)
        came = without_own(self._printed[begin:])
        return [line for line, times in wanted.items() if came.count(line) < times]

    def _told(self, command: Command, begin: int) -> str:
        lines = "\n".join(self._missing(command, begin))
        return f"$ {command.text}\nprinted\n{self._printed[begin:]}\nand not\n{lines}"

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._terminal, 65_536)
            except OSError:
                return  # nobody has the other end any more
            with self._news:
                self._printed += chunk.decode(errors="replace").replace("\r", "")
                self._news.notify_all()


def _of_session(session: int) -> Iterator[int]:
    """The processes that this shell has started, itself among them."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield int(stat.parent.name)
