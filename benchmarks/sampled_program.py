"""Runs a Python program and samples the stack of its main thread, each time it has used some CPU.

    python -P benchmarks/sampled_program.py FILE -m daemon.main [what the program is given]
    python -P benchmarks/sampled_program.py FILE -P benchmarks/slow_store.py [what the program is given]

The clock of the samples is the CPU time of the thread: each stands for about as much of it, whatever else runs. For
compiled code a stack has the Python function that called it. The program is that of the PYTHONPATH: this module is a
script of its own, and imports nothing of its own checkout. `cpu_layers` reads the stacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

# If the ticks of Linux are 4 ms, some samples come later.
SAMPLE_S = 0.005
_THREAD_CPU_CLOCK, _TO_THREAD = 3, 4


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec` of Linux."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("in_s", ctypes.c_long),
        ("in_ns", ctypes.c_long),
    )


def program(samples: Path, sampled: Sequence[str]) -> tuple[str, ...]:
    """Return the command that replaces `sampled`, which begins with an interpreter and one option."""
    return (sampled[0], "-P", str(Path(__file__).resolve()), str(samples), *sampled[1:])


def clock_s() -> float:
    """Return the clock of the log, which all processes of the machine share (seconds)."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def read_stacks(samples: Path, from_s: float, until_s: float) -> Iterator[tuple[str, ...]]:
    """Yield the stacks sampled within that time, the innermost function last, each as `module:function`."""
    for line in samples.read_text().rpartition("\n")[0].splitlines():
        at_s, _, stack = line.partition(" ")
        if from_s <= float(at_s) < until_s:
            yield tuple(stack.split(";"))


@contextlib.contextmanager
def sampled(samples: Path) -> Iterator[None]:
    """Sample this thread, the main one, during the block. Raises `OSError`."""
    file = os.open(samples, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(_: int, frame: FrameType | None) -> None:
        functions = []
        while frame is not None:
            functions.append(f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        os.write(file, f"{clock_s():.6f} {';'.join(reversed(functions))}\n".encode())

    signal.signal(signal.SIGPROF, note)
    system = ctypes.CDLL(None, use_errno=True)
    timer, every_ns = ctypes.c_void_p(), int(SAMPLE_S * 1e9)
    event = _Event(None, signal.SIGPROF, _TO_THREAD, threading.get_native_id())
    if system.timer_create(_THREAD_CPU_CLOCK, ctypes.byref(event), ctypes.byref(timer)) or system.timer_settime(
        timer, 0, ctypes.byref(_Times(0, every_ns, 0, every_ns)), None
    ):
        raise OSError(ctypes.get_errno(), "no timer of CPU time")
    try:
        yield
    finally:
        # A sample that comes when the interpreter has dropped its handlers would end the process.
        system.timer_delete(timer)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        os.close(file)


def main() -> None:
    samples, option, name, *given = sys.argv[1:]
    sys.argv = [name, *given]
    with sampled(Path(samples)):
        if option == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
