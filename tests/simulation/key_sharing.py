"""The clients of one run that share a subscription by key: dispatchers with consumers that come and go.

Owns: what is asked for when, and which consumer has what. Does not own: every other call (`workload`), and what answers
must be (`promises`, `key_promises`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from daemon.call_values import Consumer, HandedOut, HeldByConsumers, TakenBack
from daemon.errors import TarryError
from daemon.topic.key_shared_streams import KeySharedStream
from daemon.topic.open_streams import StreamClosed
from storage_backends.formats import names
from storage_backends.formats.manifest import HashSelector, KeySharedPolicy, NackOrder, SubscriptionPolicy
from storage_backends.formats.row_columns import U32
from tests._support.engine_fixture import Daemon
from tests._support.outcomes import ignored_by
from tests.simulation.columns import handed_of, held_positions
from tests.simulation.history import History
from tests.simulation.key_promises import KeyPromises
from tests.simulation.nacking import Nacking
from tests.simulation.oracle import Oracle, Removal
from tests.simulation.positions import Position, in_index
from tests.simulation.promises import Claim, OpenStream, Promises

if TYPE_CHECKING:
    from tests.simulation.workload import Clients

# The subscription, and in so many runs of a topic it is there.
NAME = "k"
SHARE = 0.4
# In so many of these runs its dispatchers read late.
LATE_SHARE = 0.4
# Keys are few, so that their rows meet; a position is always of the same one.
KEYS = 6
POLICIES = tuple(
    SubscriptionPolicy(key_shared=KeySharedPolicy(selector=selector, nack_order=nack_order, nack_block_max_ms=20_000))
    for selector in (HashSelector.CONSISTENT_HASHING, HashSelector.AUTO_SPLIT)
    for nack_order in (NackOrder.SKIP, NackOrder.BLOCK_KEY)
)


def key_hashes(positions: Sequence[Position]) -> U32:
    """The hash of each position's key."""
    keys = [(7 * position[0] + 13 * position[1]) % KEYS for position in positions]
    return np.array([key * 0x9E3779B1 & 0xFFFFFFFF for key in keys], np.uint32)


@dataclasses.dataclass(slots=True, eq=False)
class _Dispatcher:
    """A dispatcher on one stream. `consumers`: those that it has, by their ids; `hashes`: of what was received, by
    row, since two of a position may differ; `counts`: of what it declares, as it was handed out. `unanswered`: negative
    acknowledgements beside which it went on.
    """

    consumer_ids: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))
    consumers: dict[int, OpenStream] = dataclasses.field(default_factory=dict)
    hashes: dict[Position, int] = dataclasses.field(default_factory=dict)
    counts: dict[Position, int] = dataclasses.field(default_factory=dict)
    unanswered: list[asyncio.Future[bool]] = dataclasses.field(default_factory=list)

    def next_consumer(self, draw: random.Random) -> Consumer:
        number = next(self.consumer_ids)
        return Consumer(
            number, draw.choice(("one", "two", f"consumer {number}")), permits=draw.choice((0, 1, 3, 1_000))
        )


def _rows_of(position: Position, subscription_id: int) -> tuple[Position, Position]:
    """The rows that may be meant: that for everybody, and that for the subscription alone."""
    return position[:2], in_index(position, subscription_id)


class KeySharing:
    """What is shared by key in a run."""

    def __init__(
        self, clients: Clients, nacking: Nacking, oracle: Oracle, promises: Promises, history: History, seed: int
    ) -> None:
        self._clients = clients
        self._nacking = nacking
        self._oracle = oracle
        self._promises = promises
        self._history = history
        self._keys = KeyPromises(oracle, history, promises)
        self._seed = seed

    def is_there(self, topic: str) -> bool:
        return random.Random(f"shared by key is {topic} {self._seed}").random() < SHARE

    def _read_late(self, topic: str) -> bool:
        return random.Random(f"late readers of {topic} {self._seed}").random() < LATE_SHARE

    def clients(self, topic: str) -> Mapping[str, Any]:
        """By name, work of a topic that takes a random generator."""
        if not self.is_there(topic):
            return {}
        return {"sharer": self._share, "key receiver": self._receive, "other key receiver": self._receive}

    async def _share(self, topic: str, draw: random.Random) -> None:
        """The subscription is there, with one policy after another."""
        while not self._clients.ended:
            daemon = await self._clients.daemon(draw)
            if daemon is None:
                continue
            requests, policy = daemon.engine.requests, draw.choice(POLICIES)
            properties = self._oracle.objects.properties.of(policy)
            await self._clients.call(daemon, requests.create_subscription(topic, NAME, policy, properties))
            await asyncio.sleep(draw.random() * 20)
            if draw.random() < 0.3:
                deleting = functools.partial(requests.delete_subscription, topic, NAME)
                await self._clients.removing(daemon, Removal(topic, NAME), deleting)

    async def _receive(self, topic: str, draw: random.Random) -> None:
        held: list[Claim] = []
        hashes: dict[Position, int] = {}
        counts: dict[Position, int] = {}
        while not self._clients.ended:
            daemon = await self._clients.daemon(draw)
            if daemon is None:
                continue
            dispatcher = _Dispatcher(counts=counts)
            dispatcher.hashes |= hashes
            consumers = [dispatcher.next_consumer(draw) for _ in range(draw.choice((1, 1, 2, 3)))]
            declared = held if draw.random() < 0.7 else []
            holders = [draw.choice(consumers).consumer_id for _ in declared]
            opening = self._open(daemon, topic, dispatcher, consumers, declared, holders)
            stream = await self._clients.call(daemon, opening)
            if stream is None:
                await asyncio.sleep(draw.random() * 2)
                continue
            await self._listen(draw, daemon, topic, stream, dispatcher)
            held = sorted(claim for view in dispatcher.consumers.values() for claim in view.held.items())
            hashes = {position: dispatcher.hashes[position] for position, _ in held}
            counts = {each: view.counts[each] for view in dispatcher.consumers.values() for each in view.held}

    async def _open(
        self,
        daemon: Daemon,
        topic: str,
        dispatcher: _Dispatcher,
        consumers: Sequence[Consumer],
        declared: Sequence[Claim],
        holders: Sequence[int],
    ) -> KeySharedStream:
        """Runs in the daemon's process: what is held counts from that moment on. `holders`: the consumers of what is
        declared.
        """
        counts = [dispatcher.counts[position] for position, _ in declared]
        claims = HeldByConsumers(held_positions(declared, counts), np.array(holders, np.uint32))
        stream = await daemon.engine.requests.open_key_shared(topic, NAME, consumers, claims)
        for consumer in consumers:
            self._joined(daemon, topic, stream, dispatcher, consumer)
        not_held = set(stream.not_held.tolist())
        claimed = enumerate(zip(declared, holders, strict=True))
        kept = [each for place, each in claimed if place not in not_held]
        for consumer_id, view in dispatcher.consumers.items():
            mine = [claim for claim, holder in kept if holder == consumer_id]
            self._promises.opened(view, [position for position, _ in mine])
            for position, deliver_at_ms in mine:
                view.held[position] = deliver_at_ms
                view.counts[position] = dispatcher.counts[position]
                self._keys.has(view, position, dispatcher.hashes[position])
        return stream

    def _joined(
        self, daemon: Daemon, topic: str, stream: KeySharedStream, dispatcher: _Dispatcher, consumer: Consumer
    ) -> OpenStream:
        shard = names.shard_of(topic, daemon.engine._shards_total)
        number = stream.state.subscription_id
        view = dispatcher.consumers[consumer.consumer_id] = OpenStream(daemon, topic, shard, number, stream.epoch)
        view.reads_late = self._read_late(topic)
        return view

    async def _listen(
        self, draw: random.Random, daemon: Daemon, topic: str, stream: KeySharedStream, dispatcher: _Dispatcher
    ) -> None:
        """Receives for a while, acknowledges, and has consumers come and go."""
        receiving = daemon.call(self._take(stream, dispatcher))
        share = self._nacking.share(topic)
        for _ in range(draw.choice((2, 8, 30))):
            await asyncio.sleep(draw.random() * 1.5)
            if self._clients.ended or receiving.done() or daemon.dead:
                break
            kind = draw.random()
            if kind < 0.1:
                await self._clients.call(daemon, self._join(draw, daemon, topic, stream, dispatcher))
            elif kind < 0.2 and dispatcher.consumers:
                await self._clients.call(daemon, self._leave(draw, stream, dispatcher))
            for consumer_id, view in list(dispatcher.consumers.items()):
                if not await self._go_on(draw, daemon, view, stream, share, dispatcher):
                    break
                if draw.random() < 0.5:
                    stream.grant(draw.choice((1, 20, 1_000)), consumer_id)
            else:
                continue
            break
        await asyncio.gather(*dispatcher.unanswered)
        for view in dispatcher.consumers.values():
            view.close()
        if not daemon.dead:
            stream.close()

    async def _go_on(
        self,
        draw: random.Random,
        daemon: Daemon,
        view: OpenStream,
        stream: KeySharedStream,
        share: float,
        dispatcher: _Dispatcher,
    ) -> bool:
        """A consumer acknowledges, or has something back later; whether the dispatcher knows what became of it, as far
        as it has waited for that.
        """
        if not view.held or draw.random() < 0.3:
            return True
        if draw.random() < share:
            nacking = asyncio.ensure_future(self._nacking.some_of(draw, daemon, view, NAME, stream, parts=False))
            if view.reads_late and draw.random() < 0.5:
                # It is answered when what is taken back for it is sent.
                dispatcher.unanswered.append(nacking)
                return True
            return await nacking
        claims = sorted(draw.sample(list(view.held.items()), draw.randrange(1, len(view.held) + 1)))
        sent = self._promises.sending_acknowledgement(view, claims)
        positions = held_positions(claims, sent.counts)
        ignored = await self._clients.call(daemon, ignored_by(stream.acknowledge, positions))
        if ignored is not None:
            self._history.note(f"{daemon.name} acknowledged {view.topic} {view.subscription_id} {claims} -> {ignored}")
            self._promises.acknowledgement_answered(view, sent, claims, ignored)
        return True

    async def _join(
        self, draw: random.Random, daemon: Daemon, topic: str, stream: KeySharedStream, dispatcher: _Dispatcher
    ) -> None:
        """Runs in the daemon's process."""
        consumer = dispatcher.next_consumer(draw)
        view = self._joined(daemon, topic, stream, dispatcher, consumer)
        self._promises.opened(view, ())
        stream.add_consumer(consumer)

    async def _leave(self, draw: random.Random, stream: KeySharedStream, dispatcher: _Dispatcher) -> None:
        """Runs in the daemon's process."""
        consumer_id = draw.choice(list(dispatcher.consumers))
        dispatcher.consumers.pop(consumer_id).close()
        await stream.remove_consumer(consumer_id)

    async def _take(self, stream: KeySharedStream, dispatcher: _Dispatcher) -> None:
        """Runs in the daemon's process: what is handed out counts from that moment on.

        Those of some topics read slowly: what is on its way to them waits, while they go on with what they have.
        """
        topic = stream._topic.core.name
        reading = random.Random(f"{topic} {stream.dispatcher} {stream.epoch} is read {self._seed}")
        pause_s = reading.choice((0.0, 1.0, 4.0)) if self._read_late(topic) else 0.0
        while True:
            try:
                if pause_s:
                    await asyncio.sleep(reading.random() * pause_s)
                outgoing = await stream.next()
            except (TarryError, StreamClosed):
                return
            if isinstance(outgoing, HandedOut):
                self._handed_out(stream, dispatcher, outgoing)
            elif isinstance(outgoing, TakenBack):
                self._taken_back(stream, dispatcher, outgoing.rows)

    def _handed_out(self, stream: KeySharedStream, dispatcher: _Dispatcher, handed_out: HandedOut) -> None:
        number = stream.state.subscription_id
        taken = handed_of(handed_out, number)
        consumer_ids = self._consumer_ids(handed_out)
        hashes = [0] * len(taken) if handed_out.rows.key_hash is None else handed_out.rows.key_hash.tolist()
        self._history.note(f"hands out by key {stream._topic.core.name} {number} {taken} {consumer_ids}")
        ids = handed_out.rows.listed_ids()
        for row, consumer_id, key_hash, schedule_id in zip(taken, consumer_ids, hashes, ids, strict=True):
            view = dispatcher.consumers.get(consumer_id)
            if view is not None:
                for position in self._promises.handed_out(view, [row], [schedule_id]):
                    dispatcher.hashes[position] = key_hash
                    self._keys.handed_out(view, position, key_hash)

    def _taken_back(self, stream: KeySharedStream, dispatcher: _Dispatcher, rows: HandedOut) -> None:
        number = stream.state.subscription_id
        taken = handed_of(rows, number)
        self._history.note(f"takes back {stream._topic.core.name} {[position for position, _, _ in taken]}")
        for (position, deliver_at_ms, _), consumer_id in zip(taken, self._consumer_ids(rows), strict=True):
            view = dispatcher.consumers.get(consumer_id)
            if view is not None:
                for row in _rows_of(position, number):
                    if view.held.get(row) == deliver_at_ms:
                        view.held.pop(row)
                    # Also when its acknowledgement is under way, which is ignored.
                    view.handed_out.pop(row, None)

    def _consumer_ids(self, rows: HandedOut) -> list[int]:
        if rows.consumer_id is None:
            self._history.breach(f"rows are handed out by key to nobody: {rows}")
            return [0] * len(rows.rows)
        consumer_ids: list[int] = rows.consumer_id.tolist()
        return consumer_ids
