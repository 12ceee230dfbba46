"""What a failure costs: one topic, one shard, or the process.

- `TopicFailed`: a wake, timer, load, seal, merge, hand-out, record or part of a checkpoint of one topic failed by what
  was not foreseen, a request found an invariant of it broken, or its manifest is damaged. `ServedShard.topic_failed`
  and `TopicLoading` catch it: its streams end with UNAVAILABLE, what is in memory of it is let go, and it is loaded
  again from the store, later each time when it fails again.
- `ShardLost`: the log, a section of the shard, a checkpoint or the state of deletions failed, or another daemon has the
  shard. `Engine` catches it: the streams of its topics end, the other shards are served on, and this one is taken again
  as soon as it may be.
- `ProcessFailed`: a loop of the engine ended that belongs to no topic and no shard. `daemon.process` ends.

Owns: the three scopes, and what callers are told of each.
Does not own: the recovery from any of them.
"""

from __future__ import annotations

from typing import Literal

from daemon.errors import Corruption, NotOwner, TarryError, Unavailable
from storage_backends import commit

# What has failed is not tried again sooner than this after its second failure, then twice as late each time.
FIRST_DELAY_S = 1.0
LAST_DELAY_S = 30.0
# What has not failed for so long begins anew.
FORGET_S = 300.0
# Until then what was let go may be there again.
RETRY_MS = 500


class TopicFailed(Unavailable):
    """What is in memory of `topic` (a name or an id) was let go, and it is loaded again: a retry is safe."""

    def __init__(self, topic: str, *, retry_after_ms: int = RETRY_MS) -> None:
        super().__init__(
            f"topic {topic} has failed and is loaded again, the daemon's log has more; try again",
            retry_after_ms=retry_after_ms,
        )
        self.topic = topic


class ShardLost(Unavailable):
    """Nothing of `shard` is served here for now; `cause` is why."""

    def __init__(self, shard: int, cause: BaseException) -> None:
        super().__init__(f"shard {shard} is served by this daemon no longer: {cause}")
        self.shard = shard
        self.cause = cause

    @property
    def kind(self) -> Literal["superseded", "damaged", "failed"]:
        """Another daemon has it, it cannot be read, or something went wrong here."""
        if isinstance(self.cause, NotOwner | commit.Refused):
            return "superseded"
        return "damaged" if isinstance(self.cause, Corruption) else "failed"

    @property
    def owner_address(self) -> str:
        """host:port of the daemon that has it now, empty where that is not known."""
        return self.cause.owner_address if isinstance(self.cause, NotOwner) else ""

    def answer(self) -> TarryError:
        """What its callers are told: where to go, or to come again. That the shard is damaged is told to those who
        come again, each for its own topic.
        """
        if isinstance(self.cause, NotOwner):
            return NotOwner(str(self.cause), owner_address=self.owner_address)
        return self


class ProcessFailed(TarryError):
    """A task that serves every topic has ended: nothing here can be relied on."""


class Failures:
    """How often each of some things has failed of late, and how long it is left alone therefore."""

    def __init__(self) -> None:
        self._seen: dict[str | int, tuple[int, float]] = {}

    def delay_s(self, name: str | int, *, now_s: float) -> float:
        """Something failed once more at `now_s`, monotonic seconds: how long to wait. The first time costs nothing."""
        self._seen = {each: (count, at_s) for each, (count, at_s) in self._seen.items() if now_s - at_s < FORGET_S}
        count, _ = self._seen.get(name, (0, now_s))
        self._seen[name] = (count + 1, now_s)
        return 0.0 if not count else min(FIRST_DELAY_S * 2 ** (count - 1), LAST_DELAY_S)
