"""Defines the port through which the parts of a topic use it, so that no part knows the whole.

`daemon.topic.served_topic` fills it. A part is given its siblings by its constructor.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.segments import SegmentRange
from daemon.group_commit.shard_slots import TopicSlots
from daemon.runtime.due_loop import Pace
from daemon.topic.topic_gate import TopicGate
from daemon.topic.topic_quotas import TopicQuotas
from daemon.topic.topic_settings import TopicSettings


class TopicPort(Protocol):
    """A topic as its parts see it."""

    @property
    def core(self) -> TopicState: ...

    @property
    def slots(self) -> TopicSlots: ...

    @property
    def epoch(self) -> int: ...

    @property
    def gate(self) -> TopicGate: ...

    @property
    def quotas(self) -> TopicQuotas: ...

    @property
    def settings(self) -> TopicSettings: ...

    @property
    def pace(self) -> Pace: ...

    @property
    def has_ended(self) -> bool:
        """True if the topic is no longer served here."""
        ...

    # ---- former owners

    @property
    def alone_in_s(self) -> float:
        """Seconds until no former owner acts any longer; 0.0 if none does."""
        ...

    async def alone(self) -> None:
        """Wait until no former owner acts any longer. Raises the error that ended the shard before."""
        ...

    @property
    def may_send(self) -> bool:
        """True if delivered rows may leave now: the epoch is confirmed, and the topic has not ended."""
        ...

    def may_hand_out(self, state: SubscriptionState) -> bool:
        """Return whether rows may be delivered to the subscription now."""
        ...

    # ---- requests

    def subscription(self, name: str) -> SubscriptionState:
        """Return the state of a subscription. Raises NotFound if it does not exist."""
        ...

    def is_there(self, state: SubscriptionState) -> bool:
        """Return whether the subscription still exists."""
        ...

    def check_there(self, state: SubscriptionState) -> None:
        """Raise NotFound if the subscription was deleted, or the error that ended the topic."""
        ...

    def check_room(self) -> None:
        """Raise QuotaExceeded if too many buckets wait for their seal to accept more rows."""
        ...

    # ---- rows

    def notify(self, state: SubscriptionState) -> None:
        """Wake the subscription's streams and pullers, since rows may be ready."""
        ...

    def take_back(self, state: SubscriptionState) -> None:
        """Take back what consumers have behind a nacked row of its key. Call it whenever rows may be NACKED."""
        ...

    def pass_due(self, now_ms: int) -> int:
        """Pass some portions of the rows that are due and in memory; return how many."""
        ...

    async def settle_due(self) -> None:
        """Wait until every row that is due now has been passed."""
        ...

    async def load(self, wanted: Iterable[SegmentRange]) -> None:
        """Wait until the segments are in memory, or cannot be loaded."""
        ...

    def wake_at(self, at_ms: int | None) -> None:
        """Wake the topic at this time (Unix ms) unless it wakes earlier. None changes nothing."""
        ...

    def wake(self, now_ms: int) -> int | None:
        """Pass what is due and start loading; return the time of the next wake-up (Unix ms)."""
        ...

    def changed(self) -> None:
        """Schedule the next wake-up again, since segments were loaded or buckets changed."""
        ...

    def read_on(self) -> None:
        """Let subscriptions read their backlogs on, since a bucket replaced others."""
        ...

    # ---- failure

    def failed(self, error: BaseException) -> None:
        """End the topic, since it can no longer be relied on."""
        ...

    def contained(self) -> AbstractContextManager[None]:
        """Turn errors inside into this topic's failure."""
        ...
