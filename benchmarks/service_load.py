"""Derives the rows of an ordinary service: which are added when, to which topic, and when each is due.

It is the load as numbers, from which each client process derives its own part.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

import tarry

NAME = "service"
BULK = "bulk"
"""The topic that gets rows at full speed"""
STEP_MS = 10
ROWS_PER_LEDGER = 50_000


class Mode(enum.StrEnum):
    """The way in which dispatchers receive."""

    DEFAULT = "default"
    """The client library as it is, with its defaults."""
    JOINED = "joined"
    """The client library's requests, by a client that makes no objects of the answers: it is never the limit."""
    PLAIN = "plain"
    """A stream for each subscription, and an acknowledgement for each message."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Rows of one topic that are added together, `after_s` after the beginning (seconds)."""

    after_s: float
    topic: str
    rows: NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Load:
    """The load.

    Row n belongs to topic n modulo `topics`. With `one_by_one` each row has a call. `clients` is the number of
    processes that receive, and of those that add. With `bulk` rows are added to one more topic, as fast as it takes
    them.
    """

    seconds: int
    topics: int
    subscriptions: int
    rows_per_s: int
    delays_ms: tuple[int, int]
    seed: int
    mode: Mode
    one_by_one: bool
    clients: int
    bulk: bool = False

    @property
    def rows(self) -> int:
        return self.rows_per_s * self.seconds

    @property
    def rows_a_request(self) -> int:
        return 1 if self.one_by_one else max(1, self.rows_per_s * STEP_MS // 1000)

    def delays(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed).integers(*self.delays_ms, self.rows, endpoint=True)

    def subscribed(self) -> list[tuple[str, int]]:
        """Return topic and number of each subscription."""
        return [(topic_name(topic), number) for topic in range(self.topics) for number in range(self.subscriptions)]

    def requests(self) -> Iterator[Request]:
        """Yield requests in the order of their time.

        Topics take turns: no two have their requests at the same moment.
        """
        rows = self.rows_a_request
        for step, first in enumerate(range(0, self.rows, rows * self.topics)):
            for topic in range(self.topics):
                of_topic = np.arange(first + topic, min(first + rows * self.topics, self.rows), self.topics)
                if len(of_topic):
                    after_s = (step * self.topics + topic) * rows / self.rows_per_s
                    yield Request(after_s, topic_name(topic), of_topic)

    def opening(self, part: int) -> Iterator[Request]:
        """Yield a row of each topic beyond all others, for the client with the number `part`."""
        for topic in range(self.topics):
            yield Request(0.0, topic_name(topic), np.array([self.rows + part * self.topics + topic]))


def topic_name(number: int) -> str:
    return f"{NAME}-{number}"


def subscription_name(number: int) -> str:
    return f"dispatcher-{number}"


def positions(rows: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    return (rows // ROWS_PER_LEDGER).astype(np.uint64), (rows % ROWS_PER_LEDGER).astype(np.uint64)


def rows_at(ledger_id: NDArray[np.uint64], entry_id: NDArray[np.uint64]) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = (ledger_id * np.uint64(ROWS_PER_LEDGER) + entry_id).astype(np.int64)
    return rows


def rows_of(batch: tarry.Batch) -> NDArray[np.int64]:
    return rows_at(batch.ledger_id, batch.entry_id)
