"""Starts the process of `tarryd`, handling signals from the first moment on.

A signal before anything is served ends the process cleanly, with status 0. `daemon.command` is imported only after
signals are handled, since that takes a while; `daemon.process` handles signals later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        with _ending_when_asked():
            # gRPC reads it when it is imported. Its own lines, past our log, are of callers that break the protocol.
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
            from daemon import command

            return command.run(arguments)
    except _AskedToEnd:
        sys.stderr.write("tarryd: stopped before anything was served\n")
        return 0


class _AskedToEnd(BaseException):
    """A SIGTERM or SIGINT that arrived before anything had to be ended."""


@contextlib.contextmanager
def _ending_when_asked() -> Iterator[None]:
    def asked(*_: object) -> None:
        raise _AskedToEnd

    former = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
