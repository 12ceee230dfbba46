"""What a root must serve, by an account of what was done to it; and what a daemon serves of it.

Owns: the naive account (sets and lists, no daemon's code), its form as JSON, asking a daemon for the same, and the
comparison. Does not own: what is done (`make`).

A time that only the daemon knew is a pair: not before the first, not after the second, in ms.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import tarry

Json = Any
Time = int | tuple[int, int]
NO_BATCH_INDEX = -1
SHARED = ""


@dataclasses.dataclass
class Row:
    """A position in an index (`SHARED`, or a subscription) and the subscriptions that are owed it."""

    index: str
    ledger_id: int
    entry_id: int
    deliver_at_ms: Time
    key_hash: int
    owed: set[str]
    batch_index: int = NO_BATCH_INDEX
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    redelivered_ms: dict[str, Time] = dataclasses.field(default_factory=dict)


class TopicAccount:
    """One topic. `due_until_ms`: what is due later is pending for good."""

    def __init__(self, due_until_ms: int) -> None:
        self.rows: list[Row] = []
        self.subscriptions: dict[str, tarry.SubscriptionPolicy] = {}
        self.dead: dict[str, list[list[Json]]] = {}
        self.policy = tarry.TopicPolicy()
        self.levels: tarry.DelayLevels | None = None
        self.by_level: dict[int, int] = {}
        self.rebuild: list[list[int]] = []
        self._last_dead: dict[str, int] = {}
        self._due_until_ms = due_until_ms

    def add(
        self,
        ledger_id: int,
        entries: Iterable[int],
        times: Sequence[Time],
        *,
        owed: Iterable[str],
        keys: Sequence[int] | None = None,
        index: str = SHARED,
    ) -> None:
        for number, entry_id in enumerate(entries):
            key_hash = 0 if keys is None else keys[number]
            self.rows.append(Row(index, ledger_id, entry_id, times[number], key_hash, set(owed)))

    def find(self, ledger_id: int, entries: Iterable[int], *, batch_index: int = NO_BATCH_INDEX) -> list[Row]:
        wanted = set(entries)
        return [
            row
            for row in self.rows
            if row.ledger_id == ledger_id and row.entry_id in wanted and row.batch_index == batch_index
        ]

    def leave(self, rows: Iterable[Row]) -> None:
        """Cancelled, or trimmed."""
        left = {id(row) for row in rows}
        self.rows = [row for row in self.rows if id(row) not in left]

    def owe_no_longer(self, subscription: str, rows: Iterable[Row]) -> None:
        """Acknowledged by one, or trimmed for it."""
        for row in rows:
            row.owed.discard(subscription)
            row.counts.pop(subscription, None)
            row.redelivered_ms.pop(subscription, None)
        self.leave([row for row in self.rows if not row.owed])

    def nack(self, subscription: str, rows: Iterable[Row], redelivered_ms: Time) -> None:
        for row in rows:
            row.counts[subscription] = row.counts.get(subscription, 0) + 1
            row.redelivered_ms[subscription] = redelivered_ms

    def bury(self, subscription: str, rows: Iterable[Row], reason: tarry.DeadLetterReason, text: str = "") -> None:
        """They become dead letters of a subscription, in their order."""
        rows = list(rows)
        for row in rows:
            self._last_dead[subscription] = number = self._last_dead.get(subscription, 0) + 1
            # What waits for its redelivery was counted.
            count = row.counts.get(subscription, 0) + (subscription not in row.redelivered_ms)
            named = [row.ledger_id, row.entry_id, row.batch_index, _time(row.deliver_at_ms), row.key_hash]
            self.dead.setdefault(subscription, []).append([number, *named, count, int(reason), text])
        self.owe_no_longer(subscription, rows)

    def to_json(self) -> Json:
        return {
            "scheduled": sorted(
                [row.index, row.ledger_id, row.entry_id, row.deliver_at_ms, row.key_hash]
                for row in self.rows
                if not self._is_due(row)
            ),
            "policy": self.policy_json(self.policy),
            "levels": None if self.levels is None else [self.levels.table, self.levels.clamp],
            "pending_by_level": sorted([level, rows] for level, rows in self.by_level.items()),
            "rebuild": self.rebuild,
            "subscriptions": {
                name: {
                    "policy": self.policy_json(policy),
                    "backlog": sorted(self._backlog(name)),
                    "dead": self.dead.get(name, []),
                }
                for name, policy in self.subscriptions.items()
            },
        }

    def _backlog(self, name: str) -> Iterable[list[Json]]:
        for row in self.rows:
            if self._is_due(row) and name in row.owed:
                named = [row.ledger_id, row.entry_id, row.batch_index, _time(row.deliver_at_ms), row.key_hash]
                yield [*named, row.counts.get(name, 0), _time(row.redelivered_ms.get(name, 0))]

    def _is_due(self, row: Row) -> bool:
        last = row.deliver_at_ms if isinstance(row.deliver_at_ms, int) else row.deliver_at_ms[1]
        return last <= self._due_until_ms

    @staticmethod
    def policy_json(policy: tarry.TopicPolicy | tarry.SubscriptionPolicy) -> Json:
        """What was set, and of how keys are shared what is set by that."""
        shared = policy.key_shared if isinstance(policy, tarry.SubscriptionPolicy) else None
        if isinstance(policy, tarry.SubscriptionPolicy) and shared is not None:
            policy = dataclasses.replace(policy, key_shared=_with_defaults(shared))
        return _plain({name: value for name, value in dataclasses.asdict(policy).items() if value not in (None, {})})


def _with_defaults(shared: tarry.KeySharedPolicy) -> tarry.KeySharedPolicy:
    selector = shared.selector or tarry.HashSelector.CONSISTENT_HASHING
    return dataclasses.replace(
        shared,
        selector=selector,
        points_per_consumer=shared.points_per_consumer
        or (100 if selector is tarry.HashSelector.CONSISTENT_HASHING else None),
        order=shared.order or tarry.KeyOrder.DRAINING_HASHES,
        nack_order=shared.nack_order or tarry.NackOrder.SKIP,
        allow_out_of_order_delivery=bool(shared.allow_out_of_order_delivery),
    )


def _time(value: Time) -> Json:
    return list(value) if isinstance(value, tuple) else value


def _plain(value: Json) -> Json:
    return json.loads(json.dumps(value))


# ---- what a daemon serves


def served(client: tarry.Client, topic: str) -> Json:
    """The same of a topic as a daemon answers it. Raises `tarry.NotFound`."""
    stats = client.stats(topic)
    levels = client.delay_levels(topic)
    return {
        "scheduled": sorted(_scheduled(client, topic)),
        "policy": TopicAccount.policy_json(client.policy(topic).policy),
        "levels": [levels.levels.table, levels.levels.clamp] if levels.of_topic else None,
        "pending_by_level": [[number, rows] for number, rows in enumerate(levels.pending, start=1) if rows],
        "rebuild": [[each.first_ledger_id, each.last_ledger_id] for each in stats.rebuild_needed],
        "subscriptions": {
            each.subscription: {
                "policy": TopicAccount.policy_json(each.policy),
                "backlog": sorted(_backlog(client, topic, each.subscription)),
                "dead": list(_dead(client, topic, each.subscription)),
            }
            for each in stats.subscriptions
        },
    }


def _scheduled(client: tarry.Client, topic: str) -> Iterable[list[Json]]:
    for page in client.scheduled(topic):
        of = [page.subscriptions[number] for number in page.subscription_index.tolist()]
        columns = (page.ledger_id, page.entry_id, page.deliver_at_ms, page.key_hash)
        yield from map(list, zip(of, *(column.tolist() for column in columns), strict=True))


def _backlog(client: tarry.Client, topic: str, subscription: str) -> Iterable[list[Json]]:
    for page in client.backlog(topic, subscription):
        columns = (page.deliver_at_ms, page.key_hash, page.redelivery_count, page.redeliver_at_ms)
        named = (page.ledger_id.tolist(), page.entry_id.tolist(), _batch_indexes(page))
        yield from map(list, zip(*named, *(column.tolist() for column in columns), strict=True))


def _dead(client: tarry.Client, topic: str, subscription: str) -> Iterable[list[Json]]:
    for page in client.dead_letters(topic, subscription):
        texts = [page.texts[number] for number in page.text_index.tolist()]
        named = (page.dead_letter_id.tolist(), page.ledger_id.tolist(), page.entry_id.tolist(), _batch_indexes(page))
        columns = (page.deliver_at_ms, page.key_hash, page.redelivery_count, page.reason)
        yield from map(list, zip(*named, *(column.tolist() for column in columns), texts, strict=True))


def _batch_indexes(page: tarry.BacklogPage | tarry.DeadLetterPage) -> list[int]:
    if page.batch_index is None:
        return [NO_BATCH_INDEX] * len(page)
    return [NO_BATCH_INDEX if each == tarry.NO_BATCH_INDEX else each for each in page.batch_index.tolist()]


def deletions_served(client: tarry.Client) -> Json:
    """[topic, component, type, ledger, outcome] of what is pending, given up and over, and how many are in use."""
    return {
        "pending": _deletions(client.pending_deletes()),
        "given_up": _deletions(client.dead_deletes()),
        "ended": _deletions(client.ended_deletes()),
        "in_use": client.deletion_stats().in_use,
    }


def _deletions(found: Iterable[tarry.Deletion]) -> list[list[Json]]:
    return sorted(
        [
            each.topic,
            each.pending_delete.component.name,
            each.pending_delete.ledger_type.name,
            each.pending_delete.ledger_id,
            each.by_sweeper,
            None if each.outcome is None else each.outcome.name,
        ]
        for each in found
    )


# ---- the comparison


def differences(expected: Json, found: Json, where: str = "") -> list[str]:
    """Where they differ; a pair of numbers that is expected where one is found is a range."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted(expected.keys() | found.keys())
        return [line for key in keys for line in differences(expected.get(key), found.get(key), f"{where}/{key}")]
    if isinstance(expected, list) and isinstance(found, int) and not isinstance(found, bool):
        low, high = expected
        return [] if low <= found <= high else [f"{where}: {found} is not in {expected}"]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for number, (one, other) in pairs for line in differences(one, other, f"{where}/{number}")]
    return [] if expected == found else [f"{where}: expected {expected!r}, found {found!r}"]
