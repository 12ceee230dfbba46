"""Daemons that write a log each, on one store, in an order that a seed decides.

Owns: the walk: which step comes next, what is under way and lands later or never, what was answered, and what must hold
after each step.
Does not own: the steps; they are those of the product: slots, fences, claims and other operations, bounds, reading.

A daemon that takes no more steps has crashed; what it had under way may still land. A shard's memory is the set of the
sections that it has applied, a checkpoint object the same set.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import random
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from daemon.errors import InvariantViolated
from daemon.group_commit.daemon_log import (
    Certain,
    Decision,
    FrozenSlot,
    LogCursor,
    LogTruncation,
    Lost,
    Next,
    OwnLogEnd,
    SlotOutcome,
)
from daemon.shard import range_operations
from storage_backends import commit, log_fence, object_store
from storage_backends.formats import log_slot_format
from storage_backends.formats.log_slot_format import Head, Writer
from storage_backends.formats.manifest import CheckpointCut, ObjectReference, ShardManifest, slot_of
from storage_backends.log_fence import CreateFence, Fence, ListHighest, ReadOne
from storage_backends.log_reading import LogEnd, ShardSections, read_logs
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLog, ObjectLogs

T = TypeVar("T")
DAEMONS_MAX = 5
COPIES_MAX = 2


class Broken(AssertionError):
    """Something that must hold does not."""


class AtOnce(concurrent.futures.Executor):
    """Runs what it is given before it returns."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the future's caller is told
            future.set_exception(error)
        return future


@dataclasses.dataclass
class Owned:
    """A shard in a daemon's memory. `state`: claimed, serving or stopped; `before`: what it was until it stopped."""

    epoch: int
    last_slot: int
    memory: frozenset[bytes] = frozenset()
    state: str = "claimed"
    before: str = "claimed"


class Daemon:
    """What one incarnation knows, and what it has under way."""

    def __init__(self, number: int, logs: ObjectLogs, pace: float) -> None:
        self.name = f"daemon {number}"
        self.pace = pace
        self.writer = Writer(self.name, "", "")
        log_id = f"{number:026d}"
        self.own = LogCursor(log_id, self.writer)
        self.slots: ObjectLog = logs.log(log_id)
        self.truncation = LogTruncation(log_id)
        self.alive = True
        self.slot: FrozenSlot | None = None
        self.outcome: SlotOutcome | None = None
        self.next: Next | None = None
        self.copies: list[tuple[float, FrozenSlot]] = []
        self.owned: dict[int, Owned] = {}
        self.operations: dict[int, Any] = {}
        self.fences: dict[str, Fence] = {}
        self.fencing: Generator[log_fence.Step, Any, Fence] | None = None
        self.fenced: ObjectLog | None = None
        self.step: log_fence.Step | None = None
        self.bound = 0
        self.deleted = 0

    def lose_everything(self) -> None:
        self.alive, self.owned = False, {}


Action = tuple[str, Callable[[], None], float]


class Walk:
    """One walk. Raises Broken."""

    def __init__(self, seed: int, shards: int) -> None:
        self.random = random.Random(seed)
        self.store = MemoryStore()
        self.logs = ObjectLogs(self.store, AtOnce())
        self.tips: list[ShardManifest | None] = [None] * shards
        self.answered: list[set[bytes]] = [set() for _ in range(shards)]
        self.superseded_at: dict[tuple[int, int], int] = {}
        self.checkpoints: dict[str, frozenset[bytes]] = {}
        self.daemons: list[Daemon] = []
        self.collecting: tuple[str, int, int] | None = None
        self.now = 0
        self.trace: list[str] = []
        self.counts = {"claims": 0, "takeovers": 0, "answers": 0, "deleted": 0, "releases": 0, "collected": 0}
        self.changed = False
        self._come()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 1
            actions = [*self._actions()]
            label, act, _ = self.random.choices(actions, [weight for *_, weight in actions])[0]
            self.trace.append(label)
            act()
            self._check_daemons()
            if self.changed:
                self._check_stored()
                self.changed = False

    # ---- what may happen

    def _actions(self) -> Iterable[Action]:
        if len(self.daemons) < DAEMONS_MAX:
            yield "another daemon comes", self._come, 0.2
        for daemon in self.daemons:
            for label, act, weight in self._actions_of(daemon):
                yield f"{daemon.name} {label}", act, weight * daemon.pace
        yield "the collector goes on", self._collect, 0.5

    def _come(self) -> None:
        self.daemons.append(Daemon(len(self.daemons), self.logs, self.random.random() ** 2 + 0.05))

    def _actions_of(self, daemon: Daemon) -> Iterable[Action]:
        for copy in daemon.copies:
            yield f"slot {copy[1].number} lands", functools.partial(self._land, daemon, copy), 1.0
        for shard in daemon.operations:
            what = type(daemon.operations[shard]).__name__
            yield f"{what} of shard {shard} lands", functools.partial(self._commit, daemon, shard), 1.0
        if daemon.deleted < daemon.bound:
            yield "deletes a slot", lambda: self._delete(daemon), 0.5
        if not daemon.alive:
            return
        own = daemon.own
        if own.last_certain == 0 and own.rests:
            yield "opens its log", lambda: self._freeze(daemon, own.open()), 3.0
        elif own.rests:
            yield "fills a slot", lambda: self._fill(daemon), 2.0
        if daemon.slot is not None:
            if len(daemon.copies) == 1 and daemon.outcome is not None and daemon.outcome.copies < COPIES_MAX:
                yield "sends its slot side by side", lambda: self._send(daemon), 0.3
            yield "hears nothing of its slot", lambda: self._learn(daemon, Next.ASK), 0.2
            if daemon.next is not None:
                yield f"goes on: {daemon.next.name}", lambda: self._go_on(daemon), 2.0
        if own.last_certain == 0:
            return
        for shard, owned in daemon.owned.items():
            if shard in daemon.operations:
                continue
            if owned.state == "claimed":
                yield f"replays shard {shard}", functools.partial(self._replay, daemon, shard), 3.0
            for name, begin in self._operations(daemon, shard, owned):
                yield f"begins {name} of shard {shard}", begin, 0.3
        for shard in range(len(self.tips)):
            if shard not in daemon.owned and shard not in daemon.operations:
                yield f"freezes a claim of shard {shard}", functools.partial(self._claim, daemon, shard), 1.0
        yield "goes on fencing", lambda: self._fence(daemon), 0.7
        if daemon.bound == daemon.deleted:
            yield "plans what to delete", lambda: self._plan(daemon), 0.5

    # ---- the log

    def _fill(self, daemon: Daemon) -> None:
        shards = [shard for shard in daemon.owned if self.random.random() < 0.7]
        try:
            filling = daemon.own.fill({shard: self._encoding(daemon, shard) for shard in shards})
        except InvariantViolated:
            return  # it was stopped, or was not replayed yet
        self._freeze(daemon, filling)

    def _encoding(self, daemon: Daemon, shard: int) -> Callable[[Head], bytes]:
        unencodable = self.random.random() < 0.05

        def encode(head: Head) -> bytes:
            if unencodable:
                raise OverflowError("it cannot be encoded")
            return f"{shard} {head.epoch} {head.last_slot} {daemon.name} {self.now}".encode()

        return encode

    def _freeze(self, daemon: Daemon, filling: Any) -> None:
        frozen = filling.freeze()
        daemon.own.frozen(frozen.slot)
        if frozen.slot is not None:
            daemon.slot = frozen.slot
            daemon.outcome = SlotOutcome(daemon.own.log_id, frozen.slot.number, frozen.slot.identity)
            self._send(daemon)

    def _send(self, daemon: Daemon) -> None:
        assert daemon.slot is not None
        assert daemon.outcome is not None
        daemon.next = None
        daemon.outcome.sent(self.now)
        daemon.copies.append((self.now, daemon.slot))

    def _land(self, daemon: Daemon, copy: tuple[float, FrozenSlot]) -> None:
        daemon.copies.remove(copy)
        sent_at_s, slot = copy
        try:
            daemon.slots.create(slot.number, slot.body)
            created = True
        except object_store.AlreadyExists:
            created = False
        self.changed = True
        if daemon.alive and daemon.slot is slot and daemon.outcome is not None and self.random.random() < 0.7:
            self._learn(daemon, daemon.outcome.created(sent_at_s) if created else daemon.outcome.open())

    def _go_on(self, daemon: Daemon) -> None:
        assert daemon.outcome is not None
        assert daemon.slot is not None
        if daemon.next is Next.SEND_AGAIN:
            if daemon.outcome.copies < COPIES_MAX:
                self._send(daemon)
            else:
                daemon.next = Next.ASK
        elif daemon.next is Next.ASK:
            self._learn(daemon, daemon.outcome.asked(daemon.slots.head(daemon.slot.number)))
        else:
            self._learn(daemon, daemon.outcome.looked(daemon.slots.head(daemon.slot.number + 1)))

    def _learn(self, daemon: Daemon, decision: Decision) -> None:
        if isinstance(decision, Next):
            daemon.next = decision
            return
        slot = daemon.slot
        assert slot is not None
        daemon.slot = daemon.outcome = daemon.next = None
        if isinstance(decision, Lost):
            daemon.lose_everything()
            return
        daemon.own.certain()
        self._answer(daemon, slot, decision)

    def _answer(self, daemon: Daemon, slot: FrozenSlot, certain: Certain) -> None:
        for shard, owned in daemon.owned.items():
            if owned.state == "serving" and certain.confirmed_at_s >= self.superseded_at.get((shard, owned.epoch), 1e9):
                raise Broken(f"{daemon.name} confirms shard {shard}, which it had lost when the slot was sent")
        read = log_slot_format.decode_log_slot(slot.body)
        for shard in read.shards:
            section, head = read.section(shard), read.header.heads[shard]
            self.answered[shard].add(section)
            self.counts["answers"] += 1
            owned = daemon.owned[shard]
            if owned.epoch == head.epoch:
                owned.memory |= {section}
                owned.last_slot = head.last_slot
        self.changed = True

    # ---- shards

    def _claim(self, daemon: Daemon, shard: int) -> None:
        tip = self.tips[shard]
        opened = None if tip is None else tip.open_range
        former = None
        if opened is not None:
            former = daemon.fences.get(opened.log_id) or next(iter(daemon.fences.values()), None)
        self._begin_claim(daemon, shard, former)

    def _begin_claim(self, daemon: Daemon, shard: int, former: Fence | OwnLogEnd | None) -> None:
        tip = self.tips[shard]
        claim = range_operations.ClaimShard(
            shard=shard,
            epoch=1 if tip is None else tip.epoch + 1,
            owner=daemon.name,
            address="",
            log_id=daemon.own.log_id,
            after=daemon.own.last_certain,
            former=former,
        )
        if claim.precondition(tip) is not None and self.random.random() < 0.9:
            return  # it would be refused, unless the tip changes: mostly a waste of steps
        daemon.truncation.claims(shard, after=claim.after)
        daemon.operations[shard] = claim

    def _operations(self, daemon: Daemon, shard: int, owned: Owned) -> Iterable[tuple[str, Callable[[], None]]]:
        def begin(operation: Any) -> None:
            daemon.operations[shard] = operation

        own = daemon.own
        if owned.state == "serving":
            yield (
                "a checkpoint",
                lambda: begin(
                    range_operations.WriteCheckpoint(cut=self._cut(daemon, owned), epoch=owned.epoch, delete_after_ms=0)
                ),
            )
            yield (
                "needing less",
                lambda: begin(
                    range_operations.NeedLess(
                        epoch=owned.epoch, log_id=own.log_id, after=own.last_certain, last_slot=owned.last_slot
                    )
                ),
            )
            yield (
                "a release",
                lambda: self._stopping(
                    daemon,
                    shard,
                    lambda: begin(
                        range_operations.Release(
                            epoch=owned.epoch,
                            log_id=own.log_id,
                            last_slot=owned.last_slot,
                            cut=self._cut(daemon, owned),
                            second=self._cut(daemon, owned),
                            delete_after_ms=0,
                        )
                    ),
                ),
            )
            if own.rests or self._tries_what_is_refused():
                yield "claiming anew", lambda: self._reclaim(daemon, shard)
        if owned.state in ("claimed", "serving"):
            yield (
                "giving back",
                lambda: self._stopping(
                    daemon,
                    shard,
                    lambda: begin(
                        range_operations.GiveBack(epoch=owned.epoch, log_id=own.log_id, own_head=own.head(shard))
                    ),
                ),
            )

    def _tries_what_is_refused(self) -> bool:
        return self.random.random() < 0.3

    def _stopping(self, daemon: Daemon, shard: int, begin: Callable[[], None]) -> None:
        owned = daemon.owned[shard]
        if owned.state == "serving":
            try:
                daemon.own.stop(shard)
            except InvariantViolated:
                return
        owned.before, owned.state = owned.state, "stopped"
        begin()

    def _reclaim(self, daemon: Daemon, shard: int) -> None:
        try:
            end = daemon.own.end()
            daemon.own.stop(shard)
        except InvariantViolated:
            return
        daemon.owned[shard].state = "stopped"
        self._begin_claim(daemon, shard, end)
        if shard not in daemon.operations:
            del daemon.owned[shard]

    def _cut(self, daemon: Daemon, owned: Owned) -> CheckpointCut:
        name = f"checkpoint {len(self.checkpoints)}"
        self.checkpoints[name] = owned.memory
        reference = ObjectReference(name=name, base=0, size_bytes=0, sha256=b"")
        return CheckpointCut(
            object=reference, slot=owned.last_slot, log_id=daemon.own.log_id, at=daemon.own.last_certain
        )

    def _commit(self, daemon: Daemon, shard: int) -> None:
        operation = daemon.operations.pop(shard)
        tip = self.tips[shard]
        committed = operation.precondition(tip) is None
        if committed:
            made = operation.apply(tip)
            made = dataclasses.replace(made, head=dataclasses.replace(commit.NO_HEAD, number=self.now))
            if tip is not None and made.epoch != tip.epoch:
                self.superseded_at[shard, tip.epoch] = self.now
                self.counts["takeovers"] += isinstance(operation.former, Fence)
            self.tips[shard] = made
            self.changed = True
        self._hear(daemon, shard, operation, committed=committed)

    def _hear(self, daemon: Daemon, shard: int, operation: Any, *, committed: bool) -> None:
        tip = self.tips[shard]
        if tip is not None:
            daemon.truncation.manifest_committed(tip)
        if isinstance(operation, range_operations.ClaimShard):
            daemon.owned.pop(shard, None)
            if not committed:
                daemon.truncation.claim_failed(shard)
            elif tip is not None:
                self.counts["claims"] += 1
                daemon.truncation.claimed(tip)
                if daemon.alive:
                    daemon.owned[shard] = Owned(tip.epoch, tip.ranges[-1].first_slot - 1)
            return
        leaves = isinstance(operation, range_operations.Release | range_operations.GiveBack)
        if leaves and committed:
            self.counts["releases"] += 1
            daemon.truncation.left(shard)
            daemon.owned.pop(shard, None)
        elif leaves and daemon.alive:
            owned = daemon.owned[shard]
            owned.state = owned.before
            if owned.state == "serving":
                daemon.own.begin(shard, Head(owned.epoch, owned.last_slot))

    def _replay(self, daemon: Daemon, shard: int) -> None:
        tip, owned = self.tips[shard], daemon.owned[shard]
        if tip is None or tip.epoch != owned.epoch or tip.open_range is None:
            return
        memory, last_slot = self._recovered(tip, tip.checkpoint)
        if last_slot != tip.ranges[-1].first_slot - 1:
            raise Broken(
                f"replay of shard {shard} ends at {last_slot}, the range begins at {tip.ranges[-1].first_slot}"
            )
        daemon.owned[shard] = Owned(owned.epoch, last_slot, memory, "serving")
        daemon.own.begin(shard, Head(owned.epoch, last_slot))

    def _fence(self, daemon: Daemon) -> None:
        if daemon.fencing is None or daemon.step is None:
            named = {tip.open_range.log_id for tip in self.tips if tip is not None and tip.open_range is not None}
            others = sorted(named - {daemon.own.log_id})
            if others:
                daemon.fenced = self.logs.log(self.random.choice(others))
                daemon.fencing = log_fence.fencing(daemon.fenced.log_id, daemon.writer)
                daemon.step = next(daemon.fencing)
            return
        answer: Any
        slots = daemon.fenced
        assert slots is not None
        match daemon.step:
            case ListHighest():
                answer = slots.highest()
            case ReadOne(number):
                answer = log_fence.read_one(slots, number)
            case CreateFence(number, body):
                try:
                    slots.create(number, body)
                    answer = True
                except object_store.AlreadyExists:
                    answer = slots.head(number) == log_slot_format.identity_of(body)
        try:
            daemon.step = daemon.fencing.send(answer)
        except StopIteration as ended:
            fence: Fence = ended.value
            daemon.fences[fence.log_id] = fence
            daemon.fencing = daemon.step = None

    # ---- what goes

    def _plan(self, daemon: Daemon) -> None:
        bound = daemon.truncation.bound(daemon.own.last_certain)
        if bound < daemon.bound:
            raise Broken(f"the bound of {daemon.name} fell from {daemon.bound} to {bound}")
        daemon.bound = bound

    def _delete(self, daemon: Daemon) -> None:
        daemon.deleted += 1
        daemon.slots.delete_through(daemon.deleted)
        self.counts["deleted"] += 1
        self.changed = True

    def _collect(self) -> None:
        """Sees the end of a log, then reads the tips one by one, then deletes what lies before the end."""
        if self.collecting is None:
            log_id = self.random.choice(self.daemons).own.log_id
            slots = self.logs.log(log_id)
            highest = slots.highest()
            if highest is not None:
                end = slots.head(highest)
                if end is not None and end.kind.ends:
                    self.collecting = (log_id, highest, 0)
            return
        log_id, end_number, shard = self.collecting
        if shard < len(self.tips):
            tip = self.tips[shard]
            named = tip is not None and tip.lowest_after(log_id) is not None
            self.collecting = None if named else (log_id, end_number, shard + 1)
            return
        self.collecting = None
        self.logs.log(log_id).delete_through(end_number - 1)
        self.counts["collected"] += 1
        self.changed = True

    # ---- what must hold

    def _check_daemons(self) -> None:
        for daemon in self.daemons:
            absent = daemon.own.rests and daemon.slots.head(daemon.own.last_certain + 1) is None
            for shard, owned in daemon.owned.items():
                tip = self.tips[shard]
                is_owner = tip is not None and tip.epoch == owned.epoch
                if owned.state == "serving" and is_owner and not self.answered[shard] <= owned.memory:
                    raise Broken(f"{daemon.name} serves shard {shard} and does not know {self._missing(shard, owned)}")
                if owned.state == "serving" and not is_owner and absent:
                    raise Broken(f"a probe of {daemon.name} confirms shard {shard}, which it has lost")

    def _missing(self, shard: int, owned: Owned) -> set[bytes]:
        return self.answered[shard] - owned.memory

    def _check_stored(self) -> None:
        for shard, tip in enumerate(self.tips):
            for start in () if tip is None else (tip.checkpoint, tip.previous_checkpoint):
                assert tip is not None
                memory, _ = self._recovered(tip, start)
                if not self.answered[shard] <= memory:
                    lost = self.answered[shard] - memory
                    raise Broken(f"shard {shard} from slot {slot_of(start)}: answered and not stored: {lost}")

    def _recovered(self, tip: ShardManifest, start: CheckpointCut | None) -> tuple[frozenset[bytes], int]:
        """What a replay from a checkpoint gives: the memory of the shard, and its last shard slot."""
        sections = ShardSections(tip, slot_of(start))
        ends: dict[str, LogEnd] = {}
        if tip.open_range is not None:
            slots = self.logs.log(tip.open_range.log_id)
            highest = slots.highest()
            newest = None if highest is None else log_fence.read_one(slots, highest)
            if newest is None:
                raise Broken(f"log {tip.open_range.log_id} is named and empty")
            ends[slots.log_id] = LogEnd(newest.header.number, newest.header.heads)
        try:
            read_logs(self.logs, [sections], ends)
            found = sections.complete(ends)
        except object_store.Damaged as error:
            raise Broken(f"false damage: {error}") from error
        memory = frozenset() if start is None else self.checkpoints[start.object.name]
        last_slot = found[-1].slot if found else slot_of(start)
        return memory | {section.body for section in found}, last_slot


def walk(seed: int, *, steps: int, shards: int = 2) -> dict[str, int]:
    """How often what happened. Raises Broken, or what the product raises, with the story of the walk."""
    walking = Walk(seed, shards)
    try:
        walking.run(steps)
    except Exception as error:
        error.add_note(" | ".join(walking.trace[-60:]))
        raise
    return walking.counts
