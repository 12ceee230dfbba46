"""What a daemon promises of keys, held against what its consumers were handed out.

Owns: the rules that one owner has no hash unacknowledged at two consumers, that none hands out by key while a former
one may, and that no row of a hash is handed out before one that comes before it. Does not own: every other promise of
what is handed out (`promises`): a consumer is to them as a dispatcher is.

Of some rows only it is certain that they come first. A row that was added late, one that was ever handed
out to the subscription or negatively acknowledged, and one that is about to leave may be anywhere.

A row counts as unacknowledged until its consumer is about to ask for its acknowledgement, or to have it back later, or
leaves, or is told that it was taken back; and no longer than the subscription is owed it.
"""

from __future__ import annotations

import dataclasses

from tests.simulation.history import History
from tests.simulation.oracle import Oracle, Row, TopicTruth
from tests.simulation.positions import Position, is_part
from tests.simulation.promises import OpenStream, Promises

SLOT_BITS = 0xFFFF
# What is handed out may wait so long until its dispatcher takes it, ms.
UNSENT_MS = 30_000


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A row at a consumer. `generation`: that of the row then."""

    consumer: OpenStream
    position: Position
    generation: tuple[int, int]


class KeyPromises:
    """Holds what consumers of all subscriptions of a run hold against each other."""

    def __init__(self, oracle: Oracle, history: History, promises: Promises) -> None:
        self._promises = promises
        self._oracle = oracle
        self._history = history
        # By topic, subscription, epoch and hash slot.
        self._held: dict[tuple[str, int, int, int], list[_Held]] = {}
        # Rows (topic, subscription, position, slot) that a consumer has had, and the last epoch under which it did.
        self._had: dict[tuple[str, int, Position, int], int] = {}
        self.ordered = 0
        """How often a row was handed out of whose hash it is certain that others had to come behind it."""
        self.moved = 0
        """How often a hash was handed to another consumer than before."""

    def handed_out(self, consumer: OpenStream, position: Position, key_hash: int) -> None:
        """A consumer received a row."""
        what = f"topic {consumer.topic}: {position} of hash {key_hash} is handed to a consumer"
        self._promises.check_former_owners(consumer.shard, consumer.epoch, what)
        self._check_order(consumer, position, what)
        self.has(consumer, position, key_hash)

    def _check_order(self, consumer: OpenStream, position: Position, what: str) -> None:
        topic, number = self._oracle.topic(consumer.topic), consumer.subscription_id
        row, policy = topic.rows.get(position), topic.subscriptions.get(number)
        if row is None or policy is None or self._promises.is_stale(consumer) or is_part(position):
            return
        if consumer.reads_late:
            # What was on its way to a consumer that left goes first, and nobody saw it.
            return
        in_any_order = policy.policy.key_shared is None or policy.policy.key_shared.allow_out_of_order_delivery
        again = self._had.get((consumer.topic, number, position, row.slot)) == consumer.epoch
        if in_any_order or again or number in row.nacked or (number, position[:2]) in topic.redeliveries.died:
            return
        alike = [
            (each, other)
            for each, other in topic.rows.items()
            if other is not row and (other.key_hash ^ row.key_hash) & SLOT_BITS == 0 and not is_part(each)
        ]
        due_ms = consumer.daemon.now_ms()
        if consumer.daemon.latest_ms() > due_ms:
            # It may have been due while the clock was ahead, as others were that were not read then.
            due_ms -= UNSENT_MS
        others = sorted(
            (other.deliver_at_ms, *each)
            for each, other in alike
            if other.deliver_at_ms <= due_ms and self._is_certain(consumer, topic, each, other)
        )
        self.ordered += bool(others)
        if others and others[0] < (row.deliver_at_ms, *position[:2]):
            self._history.breach(f"{what} of {row.deliver_at_ms} before {others[:3]} of its hash")

    def _is_certain(self, consumer: OpenStream, topic: TopicTruth, position: Position, row: Row) -> bool:
        """Whether a row is owed to the subscription, was there before its time, and can be nowhere but in READY."""
        number = consumer.subscription_id
        applied_ms = self._oracle.applied_ms.get((consumer.shard, row.slot))
        in_time = row.slot <= self._oracle.began_behind[consumer.shard, consumer.epoch] or (
            applied_ms is not None and applied_ms < row.deliver_at_ms
        )
        return (
            in_time
            and number in topic.owes(row)
            and (consumer.topic, number, position, row.slot) not in self._had
            and number not in row.nacked
            and (number, position[:2]) not in topic.redeliveries.died
            and position[:2] not in self._oracle.objects.unreadable
            and not self._promises.has_twin(consumer.topic, (position, row.deliver_at_ms))
            and not self._promises.may_be_leaving(consumer.topic, position)
        )

    def has(self, consumer: OpenStream, position: Position, key_hash: int) -> None:
        """A consumer received a row, or is told that it holds it still."""
        row = self._oracle.topic(consumer.topic).rows.get(position)
        if row is None:
            return
        self._had[consumer.topic, consumer.subscription_id, position, row.slot] = consumer.epoch
        key = consumer.topic, consumer.subscription_id, consumer.epoch, key_hash & SLOT_BITS
        before = self._held.get(key, [])
        held = [each for each in before if self._is_held(each)]
        others = [each.position for each in held if each.consumer is not consumer]
        if others:
            self._history.breach(
                f"topic {consumer.topic}: {position} of hash {key_hash} is handed to a consumer of subscription "
                f"{consumer.subscription_id} while another one holds {others} of it"
            )
        self.moved += bool(before) and before[-1].consumer is not consumer
        held.append(_Held(consumer, position, row.generation(consumer.subscription_id)))
        self._held[key] = held

    def _is_held(self, held: _Held) -> bool:
        consumer, position = held.consumer, held.position
        if consumer.closed or position not in consumer.held:
            return False
        topic = self._oracle.topic(consumer.topic)
        row = topic.rows.get(position)
        if row is None or position[:2] in self._oracle.objects.unreadable:
            return False
        generation = row.generation(consumer.subscription_id)
        return generation == held.generation and consumer.subscription_id in topic.owes(row)
