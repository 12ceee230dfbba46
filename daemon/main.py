"""`tarryd`: the process from its first moment on.

Owns: what a signal does before anything is served: the end is orderly, with status 0.
Does not own: the command (`daemon.command`), which is imported only when signals are heeded, since that takes a while;
and signals to a daemon that starts or serves (`daemon.process`).
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        with _ending_when_asked():
            from daemon import command

            return command.run(arguments)
    except _AskedToEnd:
        sys.stderr.write("tarryd: stopped before anything was served\n")
        return 0


class _AskedToEnd(BaseException):
    """SIGTERM or SIGINT came before there was anything to bring to an end."""


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
