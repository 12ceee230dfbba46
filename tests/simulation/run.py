"""One run: a cluster, its clients and its troubles by a seed; then calm, a last crash, and everything is handed out.

Owns: the course of a run, and its result. Does not own: the parts.

    chaos   clients call, troubles come
    calm    nothing fails any more; somebody serves; what it has in memory is the truth
    crash   everybody is killed; who starts has the truth in memory
    drain   every row comes to every subscription that is owed it, and is acknowledged
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import random
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

from daemon import config
from daemon.call_values import HandedOut
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.errors import InvariantViolated, NotOwner, OutcomeUnknown, TarryError, Unavailable
from storage_backends import crash_points
from storage_backends.commit import CommitOutcomeUnknown, Refused
from storage_backends.formats import names
from storage_backends.formats.manifest import SubscriptionPolicy, TopicPolicy
from storage_backends.object_store import StoreError
from tests._support.engine_fixture import Daemon, Killed
from tests._support.fault_store import Fault
from tests._support.outcomes import ignored_by
from tests._support.virtual_loop import VirtualLoop
from tests.simulation import given_properties, nacking, owning, quiet, quiet_deletions
from tests.simulation.cluster import Cluster, Machines
from tests.simulation.columns import batch_of, handed_of, held_positions
from tests.simulation.faults import EVERYWHERE, Faults, Trouble
from tests.simulation.fired import Fired, at, confirmed_by, missing, slow
from tests.simulation.forwarding import Output
from tests.simulation.history import History
from tests.simulation.offloaded import OffloadedStore
from tests.simulation.oracle import Oracle, TopicTruth, WatchedStore
from tests.simulation.positions import index_of, is_part
from tests.simulation.promises import OpenStream, Promises
from tests.simulation.scheduler import CONFIRMS, Pace
from tests.simulation.workload import Clients

# Virtual seconds.
CHAOS_S = (15.0, 45.0)
SERVING_AFTER_S = 200.0
DRAIN_S = 200.0
DELETED_AFTER_S = 100.0
LOOK_S = 5.0

# What a daemon may log as an error when stores and neighbours fail; anything else is a bug.
EXPECTED = (NotOwner, OutcomeUnknown, Unavailable, StoreError, Refused, CommitOutcomeUnknown, TimeoutError, str)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """`digest`: of every step. `lines`: the story, or its end. `fired`: what has come of faults, by name. `unmet`: what
    should have been met, and was not; a run that ends with a breach may end before.
    """

    seed: int
    digest: str
    steps: int
    seconds: float
    breaches: tuple[str, ...]
    lines: tuple[str, ...]
    fired: Fired
    unmet: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Directed:
    """What a run has whatever its seed says, to look for something in particular.

    `daemons`: how many; `mergers`: processes beside them that merge, for each topic; `nacks`: the share of what is done
    with what was handed out that is a negative acknowledgement; `owners`: whether there are owners of ledgers.
    `properties`: whether policies come with properties. `settings`: of the daemons.
    `chaos_s`: how long things fail. The rest as in `Faults`, `Pace`.
    """

    troubles: tuple[Trouble, ...] = ()
    weights: Mapping[Fault, float] | None = None
    slow_kind: str | None = None
    settings: tuple[str, ...] = ()
    daemons: int | None = None
    chaos_s: float | None = None
    mergers: int | None = None
    nacks: float | None = None
    owners: bool | None = None
    properties: bool | None = None
    weights_of_ledgers: Mapping[Fault, float] | None = None


AS_IT_COMES = Directed()

# In runs of some seeds the tails of all shards together may have so few slots that they, and not those of one shard,
# decide when a checkpoint is written.
TAIL_WORK_MAX = 2
SEEDS_A_SHORT_TAIL = 8
SHORT_TAIL = 5


def run(seed: int, *, everything: bool = False, directed: Directed = AS_IT_COMES) -> Result:
    """The run of a seed, from the first step to the last. `everything`: keep all lines of the story."""
    started_s = time.perf_counter()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            history, fired = runner.run(_run(seed, everything, directed))
    finally:
        gc.enable()
    return Result(
        seed,
        history.digest,
        history.steps,
        time.perf_counter() - started_s,
        tuple(history.breaches),
        history.lines,
        fired,
        tuple(_unmet(directed, fired)),
    )


def settings_of(draw: random.Random) -> tuple[str, ...]:
    """How the daemons of a run are configured: small, so that everything happens often."""
    rows_min = draw.choice((5, 12, 30))
    return (
        f"daemon.shards={draw.choice((1, 1, 2))}",
        f"bucket.min_index_count_per_bucket={rows_min}",
        f"bucket.rows_max={rows_min * draw.choice((1, 3))}",
        f"bucket.age_max_s={draw.choice((2.0, 10.0, 1800.0))}",
        f"bucket.max_indexes_per_bucket_snapshot_segment={draw.choice((2, 7, 5000))}",
        "bucket.min_indexes_per_bucket_snapshot_segment=0",
        f"journal.checkpoint_slots={draw.choice((2, 5, 20))}",
        f"journal.commit_linger_ms={draw.choice((0, 2, 50))}",
        f"ownership.heartbeat_interval_s={draw.choice((0.5, 1.0, 3.0))}",
        f"delivery.ready_rows_max={draw.choice((1, 6, 200_000))}",
        f"delivery.lookahead_ms={draw.choice((0, 5_000))}",
        f"bucket.max_num_buckets={draw.choice((1, 2, 3, 50))}",
        f"bucket.merge_buckets_max={draw.choice((2, 3, 10))}",
        f"collection.interval_s={draw.choice((0.5, 0.5, 2.0))}",
        f"collection.orphan_interval_s={draw.choice((0.5, 5.0))}",
        f"collection.grace_s={draw.choice((0.0, 0.0, 1.0))}",
        f"collection.orphan_age_s={draw.choice((0.0, 0.5, 20.0))}",
        f"collection.manifests_kept={draw.choice((1, 10))}",
        f"collection.attempts_max={draw.choice((1, 10))}",
    )


async def _run(seed: int, everything: bool, directed: Directed) -> tuple[History, Fired]:
    loop = asyncio.get_running_loop()
    history = History(loop.time, everything=everything)
    loop.set_exception_handler(lambda _, context: _unexpected(history, context))
    broken = asyncio.Event()
    history.on_breach = broken.set
    draw = random.Random(f"run {seed}")
    settings = (*settings_of(draw), *nacking.settings_of(seed), *owning.settings_of(seed), *directed.settings)
    configured = config.load(environment={}, overrides=settings)
    oracle = Oracle(history, loop.time, configured.deletion, configured.limits)
    owners = owning.has_owners(seed) if directed.owners is None else directed.owners
    oracle.objects.properties.given = (
        given_properties.are_given(seed) if directed.properties is None else directed.properties
    )
    offloaded = OffloadedStore(oracle.shard_deletions.values, history.breach)
    fired = Fired()
    pace = Pace(seed, fired, slow_kind=directed.slow_kind)
    store = WatchedStore(oracle)
    machines = Machines(store, seed, settings, pace, history, offloaded)
    if seed % SEEDS_A_SHORT_TAIL == SHORT_TAIL:
        machines.tail_work_max = TAIL_WORK_MAX
    drawn = draw.choice((1, 2, 2, 3))
    cluster = Cluster(machines, store, oracle, seed, ("one", "two", "three")[: directed.daemons or drawn], history)
    machines.faults = Faults(
        seed,
        history,
        fired,
        befall=cluster.befall,
        later=cluster.later,
        owners=owners,
        troubles=directed.troubles,
        weights=directed.weights,
        weights_of_ledgers=directed.weights_of_ledgers,
    )
    chaos_s = directed.chaos_s or draw.uniform(*CHAOS_S)
    course = _Course(seed, draw, chaos_s, machines, cluster, oracle, history, directed, offloaded if owners else None)
    with (
        crash_points.intercepted(machines.crash_point),
        _errors_are_breaches(history, everything),
        oracle.refusals.watching(),
        owning.small_decisions(seed),
    ):
        await _until(course.run(), broken)
        machines.faults.end()
        await machines.close()
    return history, fired


def _unmet(directed: Directed, fired: Fired) -> list[str]:
    """What was to be met by every run, or by this one, and was not: then the run has shown nothing of it."""
    wanted = [at(place) for place in (*EVERYWHERE, *(trouble.place for trouble in directed.troubles))]
    wanted += [confirmed_by(operation) for operation in CONFIRMS]
    if directed.slow_kind:
        wanted.append(slow(directed.slow_kind))
    return missing(fired, wanted)


async def _until(work: Coroutine[Any, Any, None], broken: asyncio.Event) -> None:
    """Runs to the end, or to the first breach."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(broken.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if not broken.is_set():
        await tasks[0]


class _Course:
    def __init__(
        self,
        seed: int,
        draw: random.Random,
        chaos_s: float,
        machines: Machines,
        cluster: Cluster,
        oracle: Oracle,
        history: History,
        directed: Directed,
        offloaded: OffloadedStore | None,
    ) -> None:
        self._offloaded = offloaded
        self._directed = directed
        self._seed = seed
        self._draw = draw
        self._chaos_s = chaos_s
        self._machines = machines
        self._cluster = cluster
        self._oracle = oracle
        self._history = history
        self._output = Output(oracle, history.breach, seed)
        self._promises = Promises(oracle, history, cluster.live.values, machines.config.redelivery, self._output)

    async def run(self) -> None:
        topics = ("t", "u")[: self._draw.choice((1, 2))]
        clients = Clients(
            self._seed,
            self._cluster,
            self._oracle,
            self._promises,
            self._history,
            topics,
            mergers=self._directed.mergers,
            nacks=self._directed.nacks,
            offloaded=self._offloaded,
        )
        self._cluster.start_all()
        clients.start()
        await asyncio.sleep(self._chaos_s)
        self._history.note("calm")
        self._machines.calm()
        self._cluster.calm()
        await clients.end()
        self._output.fails = False
        daemon = await self._serving()
        if daemon is None:
            return
        await self._compare(daemon)
        for each in list(self._cluster.live.values()):
            self._cluster.kill(each)
        self._history.note("after the last crash")
        self._cluster.start(daemon.daemon_id)
        daemon = await self._serving()
        if daemon is None:
            return
        try:
            await self._compare(daemon)
            await self._drain(daemon)
            if clients.owning is not None:
                await clients.owning.drain(daemon, DELETED_AFTER_S)
                await quiet_deletions.compare(daemon, self._oracle, self._history)
        except TarryError as error:
            self._history.breach(f"nothing fails any more, and {daemon.name} answers {error!r}")

    async def _serving(self) -> Daemon | None:
        """A daemon that serves every shard, with nothing staged."""
        deadline_s = self._machines.elapsed_s() + SERVING_AFTER_S
        while self._machines.elapsed_s() < deadline_s:
            await asyncio.sleep(1.0)
            daemon = self._cluster.serving()
            # A shard that was lost may still be on its way back.
            serves_all = daemon is not None and len(daemon.shards) == self._machines.shards_total
            if daemon is not None and serves_all and daemon.engine.loaded:
                try:
                    for shard in list(daemon.shards.values()):
                        await daemon.call(shard.slots.flush())
                except TarryError as error:
                    self._history.note(f"{daemon.name} answers {error}")
                else:
                    return daemon
        self._history.breach(f"nobody serves after {SERVING_AFTER_S:.0f} s without a fault")
        return None

    async def _compare(self, daemon: Daemon) -> None:
        self._history.note(f"{daemon.name} is compared with what is true")
        await quiet.compare(daemon, self._oracle, self._history)
        await quiet_deletions.compare(daemon, self._oracle, self._history)

    # ---- the drain

    async def _drain(self, daemon: Daemon) -> None:
        """Every row comes to every subscription that is owed it; acknowledged, it is gone."""
        for truth in self._oracle.topics.values():
            if not truth.incarnation or truth.deleted:
                continue
            if not truth.subscriptions:
                await daemon.call(daemon.engine.requests.create_subscription(truth.name, "last"))
            for number in list(truth.subscriptions):
                await self._drain_subscription(daemon, truth.name, number)
            if truth.missing:
                await self._heal(daemon, truth)
        self._output.compare()
        await asyncio.sleep(5.0)
        for truth in self._oracle.topics.values():
            due = [position for position, row in truth.rows.items() if row.deliver_at_ms < daemon.now_ms()]
            if due:
                self._history.breach(f"topic {truth.name}: nobody is owed {due} any more, and they stay")
        await self._compare(daemon)

    async def _heal(self, daemon: Daemon, truth: TopicTruth) -> None:
        """What is missing with damaged buckets is added again: each position is a row, and comes once."""
        if not truth.shared_index:
            await daemon.call(daemon.engine.requests.set_topic_policy(truth.name, TopicPolicy()))
        # Of a message of a batch whoever has it asks for it again.
        for position in [position for position in truth.missing if is_part(position)]:
            del truth.missing[position]
        for index in sorted({index_of(position) for position in truth.missing}):
            positions = sorted(position[:2] for position in truth.missing if index_of(position) == index)
            times = [daemon.now_ms() + 500] * len(positions)
            name = truth.subscriptions[index].name if index else None
            sent = self._promises.sending_add(daemon, truth.name, positions, times, name)
            outcome = await daemon.call(daemon.engine.requests.add(truth.name, batch_of(positions, times), name))
            self._promises.add_answered(sent, outcome, name)
            if outcome.accepted != len(positions):
                self._history.breach(
                    f"topic {truth.name}: {outcome.accepted} of {len(positions)} missing rows were accepted"
                )
        if truth.missing:
            self._history.breach(f"topic {truth.name}: {sorted(truth.missing)} are missing still")
        for number in list(truth.subscriptions):
            await self._drain_subscription(daemon, truth.name, number)

    async def _drain_subscription(self, daemon: Daemon, topic: str, number: int) -> None:
        truth = self._oracle.topic(topic)
        stored = truth.subscriptions[number]
        requests = daemon.engine.requests
        # From here on nothing is nacked: everything comes as it is.
        await daemon.call(requests.update_subscription(topic, stored.name, SubscriptionPolicy()))
        await self._replay(daemon, topic, stored.name)
        stream = await daemon.call(requests.open_dispatch(topic, stored.name, held_positions(())))
        shard = names.shard_of(topic, daemon.engine._shards_total)
        view = OpenStream(daemon, topic, shard, number, stream.epoch)
        stream.grant(1_000_000)
        deadline_s = daemon.elapsed_s() + DRAIN_S
        receiving: asyncio.Task[HandedOut] | None = None
        while owed := [each for each, row in truth.rows.items() if number in truth.owes(row) and each not in view.held]:
            receiving = receiving or daemon.call(stream.next_messages())
            await asyncio.wait([receiving], timeout=LOOK_S)
            if receiving.done():
                handed_out = receiving.result()
                self._promises.handed_out(view, handed_of(handed_out, number), handed_out.rows.listed_ids())
                receiving = None
            elif daemon.elapsed_s() > deadline_s:
                self._history.breach(f"topic {topic}: {owed} did not come to {stored.name} in {DRAIN_S:.0f} s")
                return
        if receiving is not None:
            # A bucket was found to be damaged while some of its rows were waited for.
            receiving.cancel()
        if view.held:
            # A bucket may be found to be damaged after some of its rows were handed out.
            view.held = {position: time for position, time in view.held.items() if position not in truth.missing}
            # A message of a batch leaves with its entry: of both in one request one is ignored.
            claims = sorted(view.held.items(), key=lambda claim: is_part(claim[0]), reverse=True)
            parts = sum(is_part(position) for position, _ in claims)
            ignored = 0
            for some in (claims[:parts], claims[parts:]):
                if some:
                    counts = self._promises.sending_acknowledgement(view, some).counts
                    positions = held_positions(some, counts)
                    acknowledging = ignored_by(requests.acknowledge, topic, stored.name, positions)
                    ignored += await daemon.call(acknowledging)
            if ignored:
                self._history.breach(f"topic {topic}: {ignored} acknowledgements of rows just handed out were ignored")
        view.close()
        stream.close()

    async def _replay(self, daemon: Daemon, topic: str, name: str) -> None:
        """Every dead letter is a row again, but of positions that have one."""
        sending = self._promises.sending(daemon, topic)
        asked = self._promises.redeliveries.sending_letters(sending, name, DeadLetterFilter(), replays=True)
        if asked is not None:
            answer = await daemon.call(
                daemon.engine.requests.replay_dead_letters(topic, name, DeadLetterFilter(), delay_ms=0)
            )
            self._promises.redeliveries.replayed(asked, answer)


def _unexpected(history: History, context: dict[str, Any]) -> None:
    """What nobody waited for."""
    error = context.get("exception")
    if error is not None and not isinstance(error, (*EXPECTED, TarryError, Killed)):
        history.breach(f"{context['message']}: {error!r}")


class _Errors(logging.Handler):
    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            arguments = record.args if isinstance(record.args, tuple) else ()
            unexpected = [
                each for each in arguments if isinstance(each, BaseException) and not isinstance(each, EXPECTED)
            ]
            if unexpected or any(isinstance(each, InvariantViolated) for each in arguments):
                self._history.breach(f"a daemon logged {record.getMessage()!r}: {unexpected!r}")
        self._history.remark(record.getMessage())


@contextlib.contextmanager
def _errors_are_breaches(history: History, everything: bool) -> Iterator[None]:
    """What the daemons log is part of the story; an error that no fault explains is a breach."""
    logger = logging.getLogger("daemon")
    handler = _Errors(history)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if everything else logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
