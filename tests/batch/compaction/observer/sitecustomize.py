"""What Python imports first in every process of a job that a test observes: the driver, the workers of its engine.

Owns: the record of which process opens which bucket for reading, and what happens at a crash point. The product knows
nothing of it: this folder is on the PYTHONPATH of the job (`tests._support.jobs`).
Does not own: the names of the points, and what must be true afterwards.

By the environment, which processes inherit:
`OBSERVED_READS`: a file to which a line `<pid> <path>` is appended for each bucket that is opened to be read.
`OBSERVED_POINT`: a crash point. The first process that reaches it puts the file `OBSERVED_MARKER` in place, with its
pid, and does `OBSERVED_ACTION`: `kill` ends itself, `kill-driver` the driver and itself, `stop` stops itself, each as
the signal does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile

_BUCKETS = "/buckets/"


def _record(reads: str) -> None:
    import sys

    def opened(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        if isinstance(path, str) and _BUCKETS in path and isinstance(flags, int) and flags & os.O_ACCMODE == 0:
            file = os.open(reads, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, f"{os.getpid()} {path}\n".encode())
            finally:
                os.close(file)

    sys.addaudithook(opened)


def _is_first(marker: str) -> bool:
    """Whether this process is the first at its point; the marker is put in place whole."""
    handle, name = tempfile.mkstemp(dir=os.path.dirname(marker))  # noqa: PTH120 - at every start of Python: no pathlib
    try:
        os.write(handle, str(os.getpid()).encode())
        os.link(name, marker)
    except FileExistsError:
        return False
    finally:
        os.close(handle)
        os.unlink(name)  # noqa: PTH108
    return True


def _act(action: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill-driver":
            os.kill(int(os.environ["OBSERVED_DRIVER"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            raise ValueError(f"OBSERVED_ACTION is {action!r}")


def _observe() -> contextlib.AbstractContextManager[None]:
    os.environ.setdefault("OBSERVED_DRIVER", str(os.getpid()))
    if reads := os.environ.get("OBSERVED_READS"):
        _record(reads)
    point = os.environ.get("OBSERVED_POINT")
    if not point:
        return contextlib.nullcontext()
    marker, action = os.environ["OBSERVED_MARKER"], os.environ["OBSERVED_ACTION"]
    from storage_backends import crash_points

    def reached(name: str) -> None:
        if name == point and _is_first(marker):
            _act(action)

    return crash_points.intercepted(reached)


# It lasts as long as the process: whoever forgets the context ends it.
_observed = _observe()
_observed.__enter__()
