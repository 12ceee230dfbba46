"""Defines the scopes of a failure: one topic, one shard, or the process, and the errors that callers get.

- `TopicFailed`: a wake-up, timer, load, seal, merge, delivery, record or checkpoint part of one topic failed
  unexpectedly, a request broke an invariant of it, or its manifest is damaged. `ServedShard.topic_failed` and
  `TopicLoading` catch it. Its streams end with UNAVAILABLE, its memory is dropped, and it is loaded again from the
  store, later each time when it fails again.
- `ShardLost`: the log, a section of the shard, a checkpoint or the state of deletions failed, or another daemon has the
  shard. `Engine` catches it. The streams of its topics end, the other shards are served on, and this one is taken again
  as soon as possible.
- `ProcessFailed`: a loop of the engine ended that belongs to no topic and no shard. `daemon.process` ends.
"""

from __future__ import annotations

from typing import Literal

from daemon.errors import Corruption, NotOwner, TarryError, Unavailable
from storage_backends import commit

# Delays after the second failure and at most; the delay doubles each time (seconds).
FIRST_DELAY_S = 1.0
LAST_DELAY_S = 30.0
# A topic or shard that has not failed for this long starts again without a delay (seconds).
FORGET_S = 300.0
# By then the dropped topic may be loaded again.
RETRY_MS = 500


class TopicFailed(Unavailable):
    """The failure of `topic` (a name or an id): its memory was dropped and it is loaded again. A retry is safe."""

    def __init__(self, topic: str, *, retry_after_ms: int = RETRY_MS) -> None:
        super().__init__(
            f"topic {topic} has failed and is loaded again, the daemon's log has more; try again",
            retry_after_ms=retry_after_ms,
        )
        self.topic = topic


class ShardLost(Unavailable):
    """The loss of `shard`: nothing of it is served here for now. `cause` is why."""

    def __init__(self, shard: int, cause: BaseException) -> None:
        super().__init__(f"shard {shard} is no longer served by this daemon: {cause}")
        self.shard = shard
        self.cause = cause

    @property
    def kind(self) -> Literal["superseded", "damaged", "failed"]:
        """The kind of loss: another daemon has it, it cannot be read, or something failed here."""
        if isinstance(self.cause, NotOwner | commit.Refused):
            return "superseded"
        return "damaged" if isinstance(self.cause, Corruption) else "failed"

    @property
    def owner_address(self) -> str:
        """The host:port of its current owner, empty if unknown."""
        return self.cause.owner_address if isinstance(self.cause, NotOwner) else ""

    def answer(self) -> TarryError:
        """Return the callers' error: where to go, or to retry.

        Callers that retry learn that the shard is damaged, each for its own topic.
        """
        if isinstance(self.cause, NotOwner):
            return NotOwner(str(self.cause), owner_address=self.owner_address)
        return self


class NewerData(Corruption):
    """Stored data that may be whole, but that only a newer release reads; the message names the object.

    It refuses its topic or shard. Nothing is quarantined or recorded as lost.
    """


class ProcessFailed(TarryError):
    """The end of a task that serves every topic: nothing here can be relied on."""


class Failures:
    """The recent failures of some things, and the delay before each is tried again."""

    def __init__(self) -> None:
        self._seen: dict[str | int, tuple[int, float]] = {}

    def delay_s(self, name: str | int, *, now_s: float) -> float:
        """Count another failure at `now_s` (monotonic seconds).

        Returns how long to wait (seconds), 0.0 the first time.
        """
        self._seen = {each: (count, at_s) for each, (count, at_s) in self._seen.items() if now_s - at_s < FORGET_S}
        count, _ = self._seen.get(name, (0, now_s))
        self._seen[name] = (count + 1, now_s)
        return 0.0 if not count else min(FIRST_DELAY_S * 2 ** (count - 1), LAST_DELAY_S)
