"""What the parts of a topic see of it: ports, so that none of them knows the whole.

Owns: what every part may ask of its topic and of the topic's shard. What one part alone asks stands beside that part.
Does not own: who answers (`served_topic`, `shard`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.segments import SegmentRange
from daemon.group_commit.shard_slots import TopicSlots
from daemon.runtime.due_loop import Pace
from daemon.topic.topic_settings import TopicSettings


class ShardPort(Protocol):
    """The shard of a topic."""

    @property
    def number(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def commits(self) -> TopicSlots: ...

    @property
    def may_hand_out(self) -> bool:
        """Whether the epoch is confirmed, and the topic has not ended."""
        ...

    @property
    def alone_in_s(self) -> float:
        """When no former owner acts any more; 0.0 when that is so."""
        ...

    async def alone(self) -> None:
        """Returns when no former owner acts any more. Raises what ended the shard before."""
        ...


class Gate(Protocol):
    """Where requests wait while the topic changes as a whole."""

    @property
    def is_open(self) -> bool: ...

    async def passed(self) -> None:
        """Returns when requests may be decided. Raises Unavailable, and what ended the topic."""
        ...


class TopicPort(Protocol):
    """A topic, for its parts."""

    @property
    def core(self) -> TopicState: ...

    @property
    def shard(self) -> ShardPort: ...

    @property
    def settings(self) -> TopicSettings: ...

    @property
    def gate(self) -> Gate: ...

    @property
    def pace(self) -> Pace: ...

    def check_there(self, state: SubscriptionState) -> None:
        """Raises NotFound when the subscription was deleted, and what ended the topic."""
        ...

    def check_room(self) -> None:
        """Raises QuotaExceeded when too many buckets wait to be sealed for more rows to come."""
        ...

    def notify(self, state: SubscriptionState) -> None:
        """There may be something to hand out."""
        ...

    async def settle_due(self) -> None:
        """Returns when every row that is due now has been passed."""
        ...

    async def load(self, wanted: Iterable[SegmentRange]) -> None:
        """Returns when the segments are in memory, or cannot be."""
        ...

    def failed(self, error: BaseException) -> None:
        """The topic cannot be relied on any more."""
        ...
