"""What a daemon promises of keys, held against what its consumers were handed out.

Owns: the rules that one owner has no hash unacknowledged at two consumers, and that none hands out by key while a
former one may. Does not own: every other promise of what is handed out (`promises`): a consumer is to them as a
dispatcher is.

A row counts as unacknowledged until its consumer is about to ask for its acknowledgement, or to have it back later, or
leaves, or is told that it was taken back; and no longer than the subscription is owed it.
"""

from __future__ import annotations

import dataclasses

from tests.simulation.history import History
from tests.simulation.oracle import Oracle
from tests.simulation.positions import Position
from tests.simulation.promises import OpenStream, Promises

SLOT_BITS = 0xFFFF


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
        self.moved = 0
        """How often a hash was handed to another consumer than before."""

    def handed_out(self, consumer: OpenStream, position: Position, key_hash: int) -> None:
        """A consumer received a row."""
        what = f"topic {consumer.topic}: {position} of hash {key_hash} is handed to a consumer"
        self._promises.check_former_owners(consumer.shard, consumer.epoch, what)
        self.has(consumer, position, key_hash)

    def has(self, consumer: OpenStream, position: Position, key_hash: int) -> None:
        """A consumer received a row, or is told that it holds it still."""
        row = self._oracle.topic(consumer.topic).rows.get(position)
        if row is None:
            return
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
