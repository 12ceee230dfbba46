"""The clients of one run: they add, receive, acknowledge and change subscriptions, by the seed.

Owns: what is called when, and what a client does without an answer: it tries again, elsewhere, or gives up.
Does not own: what answers must be (`promises`).

Positions are few, so that requests meet: positions are added while they have a row, added again after they are gone,
acknowledged twice.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from daemon.call_values import Trimmed
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.withdrawal_decisions import CancelOutcome, RescheduleBatch, RescheduleOutcome
from daemon.core.index.containment import EntryRanges
from daemon.errors import InvariantViolated, TarryError
from daemon.topic.open_streams import DispatchStream, StreamClosed
from storage_backends.formats import names
from storage_backends.formats.manifest import TopicPolicy
from storage_backends.formats.schedule_ids import ScheduleIds
from tests._support.engine_fixture import Daemon
from tests._support.outcomes import ignored_by
from tests.simulation.cluster import Cluster
from tests.simulation.columns import (
    batch_by_level,
    batch_of,
    columns_of,
    entries_of,
    handed_of,
    has_ids,
    held_positions,
    ids_of,
)
from tests.simulation.history import History
from tests.simulation.key_sharing import KeySharing, key_hashes
from tests.simulation.leasing import Leasing
from tests.simulation.mergers import Merger
from tests.simulation.nacking import LEVELS_TOP, Nacking
from tests.simulation.offloaded import OffloadedStore
from tests.simulation.oracle import Oracle, Removal, everything
from tests.simulation.owning import Owning
from tests.simulation.positions import Position, is_part
from tests.simulation.promises import Claim, OpenStream, Promises, Withdrawal

T = TypeVar("T")

# A client waits so long for an answer, virtual seconds; some are patient.
CALL_S = 12.0
PATIENT_CALL_S = 70.0
LEDGERS = (1, 2, 3, 7, 1 << 40, (1 << 64) - 1)
ENTRIES = 48
# How far ahead rows are due, ms: (from, to).
DELAYS = ((-2_000, 1_000), (0, 2_500), (0, 2_500), (2_000, 12_000), (5_000, 60_000))
# So much of what is added, cancelled or rescheduled is for one subscription alone; so many topics share no index.
FOR_ONE = 0.15
COPIES = 0.2
# By how much the clock is ahead before a subscription is created, ms.
AHEAD_MS = (0, 0, 0, 700, 15_000, 60_000)
# How many processes beside the daemons merge a topic's buckets.
MERGERS = (0, 0, 1, 2)


class Clients:
    """Every client of a run. `end` lets each finish what it does. `mergers`: of each topic, `nacks`: the share of
    negative acknowledgements; None: as the seed says. `offloaded`: where ledgers are; None: nobody owns any.
    """

    def __init__(
        self,
        seed: int,
        cluster: Cluster,
        oracle: Oracle,
        promises: Promises,
        history: History,
        topics: Sequence[str],
        *,
        mergers: int | None,
        nacks: float | None,
        offloaded: OffloadedStore | None,
    ) -> None:
        self._mergers = mergers
        self._seed = seed
        self._cluster = cluster
        self._oracle = oracle
        self._promises = promises
        self._history = history
        self._topics = tuple(topics)
        self.ended = False
        self._numbers = itertools.count()
        self._calls = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._nacking = Nacking(self, oracle, promises, history, seed, nacks)
        self._leasing = Leasing(self, self._nacking, oracle, promises, history)
        self._key_sharing = KeySharing(self, self._nacking, oracle, promises, history, seed)
        self.owning = None
        if offloaded is not None:
            self.owning = Owning(self, oracle, offloaded, history, cluster.machines.shards_total)

    def start(self) -> None:
        for topic in self._topics:
            self._begin(f"subscriber {topic}", functools.partial(self._change_subscriptions, topic))
            for number in range(2):
                self._begin(f"adder {topic} {number}", functools.partial(self._add, topic))
                self._begin(f"withdrawer {topic} {number}", functools.partial(self._withdraw, topic))
            self._begin(f"puller {topic}", functools.partial(self._leasing.pull, topic))
            self._begin(f"changer {topic}", functools.partial(self._change_topic, topic))
            self._begin(f"reader {topic}", functools.partial(self._read, topic))
            if random.Random(f"copies of {topic} {self._seed}").random() < COPIES:
                self._begin(f"policy {topic}", functools.partial(self._share_nothing, topic))
            drawn = random.Random(f"mergers of {topic} {self._seed}").choice(MERGERS)
            for number in range(drawn if self._mergers is None else self._mergers):
                self._begin(f"merger {topic} {number}", functools.partial(self._merge, topic, number))
            for name, work in self._nacking.clients(topic).items():
                self._begin(f"{name} {topic}", functools.partial(work, topic))
            for name, work in self._key_sharing.clients(topic).items():
                self._begin(f"{name} {topic}", functools.partial(work, topic))
            for subscription in ("a", "a", "b"):
                self._begin(
                    f"receiver {topic} {subscription} {len(self._tasks)}",
                    functools.partial(self._receive, topic, subscription),
                )

        if self.owning is not None:
            for name, own in self.owning.clients().items():
                self._begin(name, own)

    def _begin(self, name: str, work: Callable[[random.Random], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(work(random.Random(f"{name} {self._seed}")), name=name)
        task.add_done_callback(self._client_ended)
        self._tasks.append(task)

    def _client_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._history.breach(f"client {task.get_name()} was answered {error!r}")

    async def end(self) -> None:
        """Nothing new is asked; returns when everybody has been answered, or has given up."""
        self.ended = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- calls

    async def call(self, daemon: Daemon, work: Coroutine[Any, Any, T]) -> T | None:
        """The answer; None when there was none, or an error that a client must expect."""
        request, context = self._oracle.refusals.asked(daemon)
        call = daemon.call(work, context=context)
        await asyncio.wait([call], timeout=PATIENT_CALL_S if next(self._calls) % 4 == 0 else CALL_S)
        if not call.done():
            call.cancel()
            return None
        if call.cancelled():
            return None
        error = call.exception()
        if error is None:
            return call.result()
        self._history.note(f"answer {type(error).__name__}")
        if isinstance(error, InvariantViolated) or not isinstance(error, TarryError):
            raise error
        self._oracle.refusals.refused(request, error)
        return None

    async def daemon(self, draw: random.Random) -> Daemon | None:
        """Whom the client asks: who serves, as a rule; now and then anybody."""
        await asyncio.sleep(draw.random() * 0.4)
        live = list(self._cluster.live.values())
        serving = self._cluster.serving()
        if serving is not None and draw.random() < 0.9:
            return serving
        return draw.choice(live) if live else None

    @staticmethod
    def entry(draw: random.Random) -> Position:
        """Any one."""
        return draw.choice(LEDGERS), draw.randrange(ENTRIES)

    # ---- adding

    async def _add(self, topic: str, draw: random.Random) -> None:
        while not self.ended:
            daemon = await self.daemon(draw)
            if daemon is None:
                continue
            ledger_id = draw.choice(LEDGERS)
            first = draw.randrange(ENTRIES)
            entries = [min(first + n, ENTRIES - 1) for n in range(draw.choice((1, 1, 3, 10, 20)))]
            positions = [(ledger_id, entry_id) for entry_id in entries]
            low_ms, high_ms = draw.choice(DELAYS)
            delays = [draw.randrange(low_ms, high_ms) for _ in entries]
            subscription = draw.choice("ab") if draw.random() < FOR_ONE else None
            await self._add_batch(draw, daemon, topic, positions, delays, subscription)

    async def _add_batch(
        self,
        draw: random.Random,
        daemon: Daemon,
        topic: str,
        positions: Sequence[Position],
        delays: Sequence[int],
        subscription: str | None,
    ) -> None:
        by_delay = draw.random() < 0.2
        now_ms = daemon.now_ms()
        times = [max(0, delay) if by_delay else now_ms + delay for delay in delays]
        hashes = key_hashes(positions) if self._key_sharing.is_there(topic) else None
        ids = self._ids_of(positions, times)
        batch = batch_of(
            positions,
            times,
            by_delay=by_delay,
            return_already_due=draw.random() < 0.1,
            key_hash=hashes,
            schedule_ids=ids,
        )
        if by_delay and draw.random() < 0.5:
            times = [draw.randrange(LEVELS_TOP) for _ in times]
            batch = batch_by_level(positions, times, ids)
        for _ in range(draw.choice((1, 1, 3))):
            asked = [None] * len(times) if by_delay else times
            sent = self._promises.sending_add(daemon, topic, positions, asked, subscription)
            outcome = await self.call(daemon, daemon.engine.requests.add(topic, batch, subscription))
            if outcome is not None:
                whose = subscription or "all"
                self._history.note(f"{daemon.name} add {topic} {whose} {positions} {times} -> {outcome.accepted}")
                self._promises.add_answered(sent, outcome, subscription)
                return
            retry_at = await self.daemon(draw)
            if retry_at is None:
                return
            daemon = retry_at

    def _ids_of(self, positions: Sequence[Position], times: Sequence[int]) -> ScheduleIds | None:
        """The ids of rows to add, other ones when a position is added again; no random number is drawn for them."""
        if not has_ids(self._seed):
            return None
        each = zip(positions, times, strict=True)
        return ids_of([b"%d-%d at %d" % (*at[:2], time) if (at[1] + time) % 3 else b"" for at, time in each])

    def _id_of(self, topic: str, position: Position) -> bytes:
        """The id that a request to reschedule a position names: a row keeps its own only by that."""
        rows = self._oracle.topic(topic).rows
        known = (row.schedule_id for at, row in rows.items() if at[:2] == position and not is_part(at))
        return max(known, default=b"")

    # ---- cancelling and rescheduling

    async def _withdraw(self, topic: str, draw: random.Random) -> None:
        while not self.ended:
            daemon = await self.daemon(draw)
            if daemon is None:
                continue
            known = sorted({each[:2] for each in self._oracle.topic(topic).rows if not is_part(each)})
            subscription = draw.choice("ab") if draw.random() < FOR_ONE else None
            count = draw.choice((1, 2, 8))
            positions = draw.sample(known, min(len(known), count))
            if not positions or draw.random() < 0.2:
                positions = list(dict.fromkeys((*positions, self.entry(draw))))
            if draw.random() < 0.4:
                await self._cancel(daemon, topic, subscription, positions)
            else:
                # One for all and one for one alone, both at one time: nobody can tell them apart.
                rows = self._oracle.topic(topic).rows
                mixed = {position[:2] for position in rows if position[2:]} & rows.keys()
                positions = [position for position in positions if position not in mixed]
                low_ms, high_ms = draw.choice(DELAYS)
                delays = [draw.randrange(low_ms, high_ms) for _ in positions]
                by_delay = draw.random() < 0.2
                await self._reschedule(daemon, topic, subscription, positions, delays, by_delay=by_delay)
            await asyncio.sleep(draw.random() * 1.5)

    async def _cancel(
        self, daemon: Daemon, topic: str, subscription: str | None, positions: Sequence[Position]
    ) -> None:
        asked = self._promises.sending_withdrawal(daemon, topic, positions, (), subscription)
        ledger_id, entry_id = columns_of(positions)
        cancelling = functools.partial(daemon.engine.requests.cancel, topic, subscription, ledger_id, entry_id)
        number = next(self._numbers)
        self._oracle.removals[number] = Removal(topic, subscription, frozenset(positions).__contains__, cancels=True)
        outcome = await self.call(daemon, cancelling())
        if outcome is None:
            return
        del self._oracle.removals[number]
        self._history.note(f"{daemon.name} cancel {topic} {positions} -> {outcome.cancelled}")
        self._withdrawn(daemon, asked, outcome.cancelled, outcome)

    async def _reschedule(
        self,
        daemon: Daemon,
        topic: str,
        subscription: str | None,
        positions: Sequence[Position],
        delays: Sequence[int],
        *,
        by_delay: bool,
    ) -> None:
        now_ms = daemon.now_ms()
        times = [max(0, delay) if by_delay else now_ms + delay for delay in delays]
        new = [None] * len(times) if by_delay else times
        asked = self._promises.sending_withdrawal(daemon, topic, positions, new, subscription)
        ledger_id, entry_id = columns_of(positions)
        column = np.array(times, np.uint64)
        ids = ids_of([self._id_of(topic, each) for each in positions])
        by_time, by = (None, column) if by_delay else (column, None)
        batch = RescheduleBatch(ledger_id, entry_id, by_time, by, None, ids)
        outcome = await self.call(daemon, daemon.engine.requests.reschedule(topic, subscription, batch))
        if outcome is not None:
            self._history.note(f"{daemon.name} reschedule {topic} {positions} {times} -> {outcome.rescheduled}")
            self._withdrawn(daemon, asked, outcome.rescheduled, outcome)

    def _withdrawn(
        self, daemon: Daemon, asked: Withdrawal, count: int, outcome: CancelOutcome | RescheduleOutcome
    ) -> None:
        shard = names.shard_of(asked.sent.topic.name, daemon.engine._shards_total)
        served = daemon.shards.get(shard)
        self._promises.withdrawal_answered(asked, shard, 0 if served is None else served.epoch, count, outcome)

    # ---- subscriptions

    async def _change_subscriptions(self, topic: str, draw: random.Random) -> None:
        await asyncio.sleep(draw.random() * 2)
        clocks = random.Random(f"clocks around {topic} {self._seed}")
        while not self.ended:
            daemon = await self.daemon(draw)
            if daemon is None:
                continue
            name = draw.choice(("a", "a", "a", "b", "c"))
            if draw.random() < 0.7:
                await self._create(clocks, daemon, topic, name)
            else:
                deleting = functools.partial(daemon.engine.requests.delete_subscription, topic, name)
                await self.removing(daemon, Removal(topic, name), deleting)
            await asyncio.sleep(draw.random() * 6)

    async def _create(self, clocks: random.Random, daemon: Daemon, topic: str, name: str) -> None:
        """Now and then the clock was ahead for a while just before."""
        ahead_ms = clocks.choice(AHEAD_MS)
        if ahead_ms:
            self._history.note(f"the clock of {daemon.name} is {ahead_ms} ms ahead for a while")
            daemon.step_clock(ahead_ms)
            await asyncio.sleep(clocks.random() * 2)
            daemon.step_clock(-ahead_ms)
        shard = names.shard_of(topic, self._cluster.machines.shards_total)
        asked = self._promises.sending_creation(daemon, topic, shard)
        created = await self.call(daemon, daemon.engine.requests.create_subscription(topic, name))
        if created is not None:
            self._history.note(f"{daemon.name} created {topic} {name}: {created}")
            self._promises.creation_answered(asked, shard, created)

    async def removing(
        self, daemon: Daemon, removal: Removal, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> tuple[T] | None:
        """A request that may remove rows. One without an answer may do so long after."""
        number = next(self._numbers)
        self._oracle.removals[number] = removal
        self._oracle.topic(removal.topic).trimmed |= removal.positions is not None

        async def answered() -> tuple[T]:
            return (await work(),)

        answer = await self.call(daemon, answered())
        if answer is not None:
            del self._oracle.removals[number]
        return answer

    # ---- receiving

    async def _receive(self, topic: str, subscription: str, draw: random.Random) -> None:
        held: dict[Position, int] = {}
        counts: list[int] = []
        while not self.ended:
            daemon = await self.daemon(draw)
            if daemon is None:
                continue
            declared = held if draw.random() < 0.7 else {}
            claims = held_positions(declared.items(), counts if declared else None)
            opening = daemon.engine.requests.open_dispatch(topic, subscription, claims)
            stream = await self.call(daemon, opening)
            if stream is None:
                await asyncio.sleep(draw.random() * 2)
                continue
            view = await self._listen(draw, daemon, topic, subscription, stream, declared)
            held, counts = view.held, view.counts_of(view.held.items())

    async def _listen(
        self,
        draw: random.Random,
        daemon: Daemon,
        topic: str,
        subscription: str,
        stream: DispatchStream,
        declared: dict[Position, int],
    ) -> OpenStream:
        """Receives and acknowledges for a while; what it holds at the end, among others."""
        view = OpenStream(
            daemon=daemon,
            topic=topic,
            shard=names.shard_of(topic, daemon.engine._shards_total),
            subscription_id=stream.state.subscription_id,
            epoch=stream.epoch,
        )
        self._promises.opened(view, declared)
        stream.grant(draw.choice((1, 5, 1_000)))
        receiving = daemon.call(self._take(stream, view))
        share = self._nacking.share(topic)
        for _ in range(draw.choice((2, 8, 30))):
            await asyncio.sleep(draw.random() * 1.5)
            if self.ended or receiving.done() or daemon.dead:
                break
            if view.held and draw.random() < share:
                await self._nacking.some_of(draw, daemon, view, subscription, stream)
            elif view.held and draw.random() < 0.1 * share:
                await self._nacking.extend(draw, daemon, view, stream)
            else:
                await self._acknowledge_some(draw, daemon, stream, view)
            if stream.permits < 5:
                stream.grant(draw.choice((1, 20, 1_000)))
        view.close()
        if not daemon.dead:
            stream.close()
        return view

    async def _take(self, stream: DispatchStream, view: OpenStream) -> None:
        """Runs in the daemon's process: what is handed out counts from that moment on."""
        while True:
            try:
                handed_out = await stream.next_messages()
            except (TarryError, StreamClosed):
                return
            taken = handed_of(handed_out, view.subscription_id)
            self._history.note(f"{view.daemon.name} hands out {view.topic} {view.subscription_id} {taken}")
            self._promises.handed_out(view, taken, handed_out.rows.listed_ids())

    async def _acknowledge_some(
        self, draw: random.Random, daemon: Daemon, stream: DispatchStream, view: OpenStream
    ) -> None:
        if not view.held or draw.random() < 0.3:
            return
        count = draw.randrange(1, len(view.held) + 1)
        claims: list[Claim] = sorted(draw.sample(list(view.held.items()), count))
        if draw.random() < 0.1:
            # A time that is not the row's: it must be ignored.
            (position, deliver_at_ms), *rest = claims
            claims = [(position, deliver_at_ms + 1), *rest]
        sent = self._promises.sending_acknowledgement(view, claims)
        ignored = await self.call(daemon, ignored_by(stream.acknowledge, held_positions(claims, sent.counts)))
        if ignored is not None:
            self._history.note(f"{daemon.name} acknowledged {view.topic} {view.subscription_id} {claims} -> {ignored}")
            self._promises.acknowledgement_answered(view, sent, claims, ignored)

    def name_of(self, view: OpenStream) -> str:
        stored = self._oracle.topic(view.topic).subscriptions.get(view.subscription_id)
        return "deleted" if stored is None else stored.name

    # ---- the topic as a whole

    async def _change_topic(self, topic: str, draw: random.Random) -> None:
        await asyncio.sleep(draw.random() * 10)
        while not self.ended:
            daemon = await self.daemon(draw)
            if daemon is None:
                continue
            kind = draw.choice(("trim", "trim", "trim", "clear", "seal", "seal", "delete"))
            subscription = draw.choice((None, None, "a", "b"))
            if kind == "trim":
                await self._trim(draw, daemon, topic, subscription)
            elif kind == "clear":
                clearing = functools.partial(daemon.engine.requests.clear, topic, subscription)
                await self._remove(daemon, Removal(topic, subscription, everything), clearing)
            elif kind == "seal":
                await self.call(daemon, daemon.engine.requests.seal(topic))
            elif draw.random() < 0.4:
                deleting = functools.partial(daemon.engine.requests.delete_topic, topic)
                await self._remove(daemon, Removal(topic, None, everything), deleting)
            await asyncio.sleep(draw.random() * 12)

    async def _trim(self, draw: random.Random, daemon: Daemon, topic: str, subscription: str | None) -> None:
        ledgers = sorted(draw.sample(LEDGERS, draw.choice((1, 1, 3))))
        last = {ledger_id: draw.randrange(ENTRIES) for ledger_id in ledgers}
        lower = len(ledgers) == 1 and draw.random() < 0.5

        def trimmed(position: Position) -> bool:
            ledger_id, entry_id = position
            return (lower and ledger_id < ledgers[0]) or entry_id <= last.get(ledger_id, -1)

        ranges = LedgerRanges(
            ledger_id=np.array(ledgers, np.uint64),
            last_entry_id=np.array([last[ledger_id] for ledger_id in ledgers], np.uint64),
            all_lower_ledgers=lower,
        )
        dead_letter = subscription is not None and sum(last.values()) % 2 == 0
        trim = daemon.engine.requests.trim
        trimming = functools.partial(trim, topic, subscription, ranges, dead_letter=dead_letter)
        await self._remove(daemon, Removal(topic, subscription, trimmed, buries=dead_letter), trimming)

    async def _remove(self, daemon: Daemon, removal: Removal, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        sent = self._promises.sending(daemon, removal.topic)
        answer = await self.removing(daemon, removal, work)
        # With dead letters there may have been room for a part of it only.
        partly = answer is not None and isinstance(answer[0], Trimmed) and answer[0].more
        if answer is not None and removal.positions is not None and not partly:
            self._history.note(f"{daemon.name} removed {removal.topic} {removal.subscription} -> {answer[0]}")
            self._promises.trim_answered(sent, removal.positions, removal.subscription)

    async def _share_nothing(self, topic: str, draw: random.Random) -> None:
        """A row for everybody is one row for each from now on, until the topic is deleted."""
        while not self.ended:
            daemon = await self.daemon(draw)
            if daemon is not None:
                await self.call(daemon, daemon.engine.requests.set_topic_policy(topic, TopicPolicy(shared_index=False)))
                await asyncio.sleep(draw.random() * 10)

    # ---- merging

    async def _merge(self, topic: str, number: int, draw: random.Random) -> None:
        machines, name = self._cluster.machines, f"merger-{number}"
        shard = names.shard_of(topic, machines.shards_total)
        merger = Merger(self._cluster.store, topic, shard, name, self._history, machines.now_ms)
        await merger.run(draw, lambda: self.ended)

    # ---- asking

    async def _read(self, topic: str, draw: random.Random) -> None:
        while not self.ended:
            daemon = await self.daemon(draw)
            if daemon is None:
                continue
            ledger_id, first = draw.choice(LEDGERS), draw.randrange(ENTRIES)
            last = first + draw.choice((0, 3, 20))
            subscription = draw.choice((None, "a", "b"))
            sent = self._promises.sending(daemon, topic)
            columns = (np.array([number], np.uint64) for number in (ledger_id, first, last))
            found = await self.call(daemon, daemon.engine.requests.contains(topic, EntryRanges(*columns), subscription))
            if found is not None and found.continuation is None:
                said = {*entries_of(found.pending), *entries_of(found.due)}
                self._history.note(f"{daemon.name} contains {topic} {subscription} {sorted(said)}")
                asked = [(ledger_id, entry_id) for entry_id in range(first, last + 1)]
                self._promises.contains_answered(sent, asked, said, subscription)
            await asyncio.sleep(draw.random() * 2)
