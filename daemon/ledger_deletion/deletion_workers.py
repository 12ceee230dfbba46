"""Makes attempts to delete ledgers: which begin, in which thread, and how they end.

The engine alone uses it; it stands apart because it is a loop with threads of its own. Every shard has its turn.
`shard_deletions` knows what is due and what the end of an attempt means; `daemon.ledger_stores` verifies and deletes.

A begin must be durable before its attempt is made, which takes a slot. So begins are written ahead, in batches: as many
as the workers complete in the time of two slots, or in a moment. No more begin than that, since an owner that reports a
begun ledger as in use is told that it is too late.

The threads belong to the attempts. A store that hangs holds one of them and delays nothing else.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence

from daemon.errors import InvariantViolated, TarryError
from daemon.ledger_deletion.shard_deletions import Attempt, DeletingShard, ShardDeletions
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed
from daemon.runtime.environment import Environment
from storage_backends.crash_points import crash_point
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, LedgerType

log = logging.getLogger(__name__)

# Limit of one decision: each begin costs the loop some 30 us, and its answer as much again.
BEGIN_MAX = 32
# Without a wake-up the workers check again at this interval (seconds), since a clock may step or a store return.
LOOK_S = 1.0
# Least time that begins are written ahead (seconds), since each batch of them is a slot
MOMENT_S = 0.1
# Assumed durations of an attempt and a begin before any has ended (seconds), and the weight of the newest one
ATTEMPT_S = 0.1
BEGIN_S = 0.05
NEWEST_COUNTS = 0.2


class DeletionWorkers:
    """The workers of one daemon, on one event loop.

    `shards` returns those served; `failed` is called with ended tasks.
    """

    def __init__(
        self,
        environment: Environment,
        shards: Callable[[], Mapping[int, DeletingShard]],
        *,
        failed: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._environment = environment
        self._shards = shards
        self._failed = failed
        self._parallelism = environment.config.deletion.parallelism
        self._woken = asyncio.Event()
        # Begun attempts that are not made yet
        self._ready: collections.deque[Attempt] = collections.deque()
        # Attempt with a thread -> when it began (seconds), including those of lost shards
        self._made: dict[Attempt, float] = {}
        self._beginning = 0
        self._attempt_s = ATTEMPT_S
        self._begin_s = BEGIN_S
        # Shards that have deletions which are not over, the next one first
        self._busy: dict[ShardDeletions, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def look_at(self, deletions: ShardDeletions) -> None:
        """Check a shard in which something may be due, or may begin now."""
        self._busy.setdefault(deletions)
        self._woken.set()

    def wake(self) -> None:
        """Wake the workers after the clock was set, or the machine was suspended."""
        self._woken.set()

    @property
    def under_way(self) -> int:
        """The number of attempts whose threads have not ended."""
        return len(self._made)

    def report_metrics(self) -> None:
        """Report the numbers and kinds of deletions, and since when. Called once a second."""
        in_flight: collections.Counter[LedgerComponent] = collections.Counter()
        dead = held = ledgers_in_use = 0
        now_ms = oldest_ms = self._environment.clock.now_ms()
        for shard in self._shards().values():
            state = shard.deletions.state
            ledgers_in_use += state.in_use.ledgers
            for kind in state.counts.kinds:
                in_flight[kind.component] += kind.in_flight
                dead += kind.dead
                held += kind.held
                if kind.in_flight:
                    oldest_ms = min(oldest_ms, kind.oldest_ms)
        self._environment.metrics.deletions.set_state(
            in_flight=in_flight,
            dead=dead,
            held=held,
            oldest_seconds=(now_ms - oldest_ms) / 1000,
            ledgers_in_use=ledgers_in_use,
        )

    async def run(self) -> None:
        """Begin and make attempts until cancelled; attempts in flight continue."""
        while True:
            self._woken.clear()
            self._make_ready()
            self._begin_due()
            await self._sleep()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _sleep(self) -> None:
        due_ms = [due for deletions in self._busy if (due := deletions.next_due_ms) is not None]
        until_s = LOOK_S
        if due_ms and (wait_ms := min(due_ms) - self._environment.clock.now_ms()) > 0:
            until_s = min(LOOK_S, wait_ms / 1000)
        timer = asyncio.get_running_loop().call_later(until_s, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()

    # ---- beginning

    def _begin_due(self) -> None:
        """Begin what is due. A shard that got some of the room comes last the next time."""
        room = self._room()
        for deletions in list(self._busy) if room > 0 else ():
            if deletions.is_closed or deletions.next_due_ms is None:
                del self._busy[deletions]
            elif deletions.may_begin and (ids := deletions.due(min(room, BEGIN_MAX))):
                del self._busy[deletions]
                self._busy[deletions] = None
                room -= len(ids)
                self._beginning += len(ids)
                self._go(self._begin(deletions, ids))
            if room <= 0:
                return

    def _room(self) -> int:
        """Return how many more may begin now; none while enough begun attempts are not made yet."""
        now_s = self._environment.clock.elapsed_s()
        longest_s = max((now_s - began_s for began_s in self._made.values()), default=0.0)
        # Attempts that hang do not end sooner because others were quick.
        attempt_s = max(self._attempt_s, longest_s, 1e-6)
        ahead = min(BEGIN_MAX, math.ceil(max(2 * self._begin_s, MOMENT_S) / attempt_s * self._parallelism))
        begun = len(self._ready) + self._beginning
        idle = self._parallelism - len(self._made)
        return 0 if begun > idle + ahead // 2 else idle + ahead - begun

    async def _begin(self, deletions: ShardDeletions, ids: Sequence[int]) -> None:
        began_s = self._environment.clock.elapsed_s()
        try:
            attempts = await deletions.begin(ids)
        except InvariantViolated:
            raise
        except TarryError as error:
            log.info("deletions that were to begin are left to the next owner: %s", error)
            return
        finally:
            self._beginning -= len(ids)
            self.wake()
        self._begin_s = _mean(self._begin_s, self._environment.clock.elapsed_s() - began_s)
        self._ready.extend(attempts)

    # ---- making

    def _make_ready(self) -> None:
        """Start begun attempts that may start, in the order in which they began."""
        waiting: list[Attempt] = []
        while self._ready and len(self._made) < self._parallelism:
            attempt = self._ready.popleft()
            if attempt.deletions.is_closed:
                continue
            if not attempt.deletions.may_start:
                waiting.append(attempt)
                continue
            if (stated := self._stated_elsewhere(attempt)) is not None:
                attempt.deletions.answered(attempt, stated)
                continue
            self._made[attempt] = self._environment.clock.elapsed_s()
            attempt.deletions.started(attempt)
            self._go(self._make(attempt))
        self._ready.extendleft(reversed(waiting))

    def _stated_elsewhere(self, attempt: Attempt) -> Answer | None:
        """Return IN_USE if another topic uses the ledger under its UUID, since the record then names a wrong topic.

        The record's own topic was checked before.
        """
        delete = attempt.deletion.pending_delete
        context = delete.offload_context
        if delete.ledger_type is not LedgerType.OFFLOADED_LEDGER or context is None:
            return None
        for shard in self._shards().values():
            in_use = shard.deletions.state.in_use
            if in_use.holds_exactly(context.uuid_msb, context.uuid_lsb, delete.ledger_id):
                return Answer(DeletionOutcome.IN_USE, "it is in use by another topic, as its owner says")
        return None

    async def _make(self, attempt: Attempt) -> None:
        try:
            came = await self._environment.pools.deletions.run(functools.partial(self._delete, attempt))
        finally:
            began_s = self._made.pop(attempt)
            self.wake()
        self._attempt_s = _mean(self._attempt_s, self._environment.clock.elapsed_s() - began_s)
        if isinstance(came, Answer):
            attempt.deletions.answered(attempt, came)
        elif not attempt.refused:
            attempt.deletions.failed(attempt, came)
        elif attempt.deletions.put_back(attempt):
            # Not a failure of the store: the attempt is made as soon as it may be.
            attempt.refused = False
            self._ready.appendleft(attempt)

    def _delete(self, attempt: Attempt) -> Answer | DeletionFailed:
        """Make the attempt in a thread and return its result."""
        crash_point("deletion.after_begin")
        deletion = attempt.deletion
        try:
            came: Answer | DeletionFailed = self._environment.ledger_stores.delete(
                deletion.topic, deletion.pending_delete, attempt.guard, step=crash_point
            )
        except DeletionFailed as failure:
            came = failure
        crash_point("deletion.before_answer")
        return came

    def _go(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._failed(task)


def _mean(mean_s: float, newest_s: float) -> float:
    """Return a mean that gives the newest value more weight than older ones (seconds)."""
    return mean_s + NEWEST_COUNTS * (newest_s - mean_s)
