"""Writes this daemon's log, from OPEN until it is closed or lost.

What became of a slot that was sent, from the answers (L1, L10):

    created, one copy was sent              -> certain; confirms when it was sent
    created, several copies were sent       -> look at the next number: a fence: lost; else certain
    exists, no answer, an error             -> HEAD
        this slot                           -> certain; confirms when the first copy was sent
        a fence                             -> lost
        none                                -> the same bytes again, after a pause

A copy that was created where several were sent may have landed in a number that was emptied: an earlier copy was there,
a fence behind it, and a collector has deleted what the fence covers. The fence is never deleted.

One slot or probe is in flight at a time. After the end the daemon opens another log. Work still in flight describes
only durable state, so it may land until another daemon claims the shard.

Pure: `LogCursor`, `SlotDraft`, `SlotOutcome`, `LogTruncation`. Sending: `LogWriter`. The log: `DaemonLog`. When a slot
is due: `slot_sender`. Claims of shards: `daemon.owner.takeover`.
"""

from __future__ import annotations

import array
import asyncio
import dataclasses
import enum
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeAlias, TypeVar

from daemon.core.garbage_rules import NOTHING, ObjectCount
from daemon.errors import Corruption, InvariantViolated, NotOwner, OutcomeUnknown, Unavailable
from daemon.group_commit.confirmation import Probe, ProbedConfirmation
from daemon.group_commit.slot_sender import LandedSection, LandedSlot, Section, SlotSender, SlotWriter
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from storage_backends import object_store, slot_log
from storage_backends.crash_points import crash_point
from storage_backends.formats import log_slot_format, names, slot_format
from storage_backends.formats.log_slot_format import (
    Head,
    Heads,
    LogSlotHeader,
    LogSlotKind,
    ShardSlot,
    SlotIdentity,
    Writer,
)
from storage_backends.formats.manifest import ShardManifest

log = logging.getLogger(__name__)

# How long to try OPEN, and CLOSE, before the store counts as unreachable (seconds)
DEADLINE_S = 30.0
# How long to wait for calls to the store in flight when the log is given up (seconds)
ABANDON_S = 1.0

T = TypeVar("T")
S = TypeVar("S")

Encode: TypeAlias = Callable[[Head], bytes]
"""Gives the section of a shard, for the epoch and shard slot that it gets."""

_NOTHING: Mapping[int, bytes] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnLogEnd:
    """How far the claimant's own log goes for certain, with no slot under way: its last number and the heads there."""

    log_id: str
    end: int
    heads: Heads


class LogCursor:
    """One incarnation's log, from OPEN on: its next number, how far it is certain for each shard, and the slot in
    flight with its shard slots (L1, L6). Used in one thread.

    A log that has lost a number to a fence, or was closed, is never used again: the daemon opens another one.
    """

    def __init__(self, log_id: str, owner: Writer) -> None:
        self._log_id = log_id
        self._owner = owner
        self._certain = 0
        self._heads: Mapping[int, Head] = {}
        # By shard that may have sections: the epoch, and the last shard slot that is stored or was at the claim.
        self._staging: dict[int, Head] = {}
        self._under_way: SlotDraft | None = None
        self._slot: FrozenSlot | None = None
        self._closed = False

    @property
    def log_id(self) -> str:
        return self._log_id

    @property
    def last_certain(self) -> int:
        """0 before OPEN is certain."""
        return self._certain

    @property
    def rests(self) -> bool:
        """Whether every slot that was begun is certain."""
        return self._under_way is None

    def end(self) -> OwnLogEnd:
        """How far the log goes. Raises InvariantViolated while a slot is under way: it may go further."""
        self._check_rests("its end is asked for")
        return OwnLogEnd(log_id=self._log_id, end=self._certain, heads=self._heads)

    def head(self, shard: int) -> Head | None:
        """How far the log certainly goes for the shard; None when it never had a section of it."""
        return self._heads.get(shard)

    def has_under_way(self, shard: int) -> bool:
        """Whether a section of the shard is in the slot that was begun."""
        return self._under_way is not None and shard in self._under_way.sections

    def stages(self, shard: int) -> bool:
        """Whether the shard may have sections now."""
        return shard in self._staging

    def begin(self, shard: int, claimed: Head) -> None:
        """The claim of a shard is certain: it may have sections of that epoch, behind that shard slot."""
        if self._certain == 0:
            raise InvariantViolated(f"log {self._log_id}: shard {shard} was claimed before OPEN was certain")
        before = self._staging.get(shard)
        if before is not None:
            raise InvariantViolated(
                f"shard {shard}: epoch {claimed.epoch} begins, epoch {before.epoch} was not stopped"
            )
        self._staging[shard] = claimed

    def stop(self, shard: int) -> Head:
        """The shard has no sections from now on, as it is about to be released, given back or claimed anew; its epoch
        and its last shard slot. Raises InvariantViolated while a section of it is under way.
        """
        if self._under_way is not None and self.has_under_way(shard):
            number = self._under_way.header.number
            raise InvariantViolated(f"shard {shard} stops while its section in slot {number} is not certain")
        return self._staging.pop(shard)

    def open(self) -> SlotDraft:
        """OPEN, the first slot."""
        return self._begin_slot(LogSlotKind.OPEN, {})

    def close(self) -> SlotDraft:
        """CLOSE, the last slot. Nothing is handed out any more."""
        draft = self._begin_slot(LogSlotKind.CLOSE, {})
        self._closed = True
        return draft

    def fill(self, sections: Mapping[int, Encode]) -> SlotDraft:
        """DATA with a section of each of these shards, which gets its next shard slot."""
        unknown = sorted(sections.keys() - self._staging.keys())
        if unknown or not sections:
            raise InvariantViolated(
                f"log {self._log_id}: shards {unknown} stage before their claim or after their stop"
            )
        return self._begin_slot(LogSlotKind.DATA, sections)

    def frozen(self, slot: FrozenSlot | None) -> None:
        """The bytes of the slot that was begun are fixed; None: no section could be encoded, and none is sent."""
        if self._under_way is None or self._slot is not None:
            raise InvariantViolated(f"log {self._log_id}: a slot is frozen that was not begun")
        self._slot = slot
        if slot is None:
            self._under_way = None

    def certain(self) -> None:
        """The slot that was frozen is certain."""
        slot = self._slot
        if slot is None:
            raise InvariantViolated(f"log {self._log_id}: no slot is under way")
        self._under_way = self._slot = None
        self._certain = slot.number
        self._heads = slot.header.heads
        self._staging.update((shard, slot.header.heads[shard]) for shard in slot.section_bytes)

    def _begin_slot(self, kind: LogSlotKind, sections: Mapping[int, Encode]) -> SlotDraft:
        self._check_rests(f"{kind.name} begins")
        if self._closed or (kind is LogSlotKind.OPEN) != (self._certain == 0):
            raise InvariantViolated(f"log {self._log_id}: {kind.name} begins behind slot {self._certain}")
        header = LogSlotHeader(
            log_id=self._log_id,
            number=self._certain + 1,
            kind=kind,
            heads=self._heads,
            writer=self._owner if kind is LogSlotKind.OPEN else None,
        )
        before = self._staging
        next_heads = {shard: Head(before[shard].epoch, before[shard].last_slot + 1) for shard in sections}
        self._under_way = SlotDraft(header, {shard: (next_heads[shard], encode) for shard, encode in sections.items()})
        return self._under_way

    def _check_rests(self, what: str) -> None:
        if self._under_way is not None:
            number = self._under_way.header.number
            raise InvariantViolated(f"log {self._log_id}: {what} while slot {number} is not certain")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FrozenSlot:
    """A log slot as it is sent, the same at each try. `section_bytes`: by shard with a section, how long that is."""

    header: LogSlotHeader
    body: bytes
    section_bytes: Mapping[int, int]

    @property
    def number(self) -> int:
        return self.header.number

    @property
    def identity(self) -> SlotIdentity:
        return log_slot_format.identity_of(self.body)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Encoded(Generic[S]):
    """What became of a draft: its slot, first frozen, then certain. `slot` is None if no section could be encoded.
    `unencodable`: by shard, why its section could not: what its memory holds can never be stored.
    """

    slot: S | None
    unencodable: Mapping[int, Exception]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SlotDraft:
    """The next slot before its bytes are fixed: which sections it is to have, and with which shard slots."""

    header: LogSlotHeader
    sections: Mapping[int, tuple[Head, Encode]]

    def freeze(self) -> Encoded[FrozenSlot]:
        """Encodes the slot. Takes its time, and may run in any thread."""
        bodies: dict[int, bytes] = {}
        unencodable: dict[int, Exception] = {}
        for shard, (head, encode) in self.sections.items():
            try:
                bodies[shard] = encode(head)
            except Exception as error:  # noqa: BLE001 - whatever it is costs its shard alone
                unencodable[shard] = error
        if unencodable and not bodies:
            return Encoded(None, unencodable)
        given = {shard: self.sections[shard][0] for shard in bodies}
        header = dataclasses.replace(self.header, heads={**self.header.heads, **given})
        body = log_slot_format.encode_log_slot(header, bodies or _NOTHING)
        frozen = FrozenSlot(header, body, {shard: len(section) for shard, section in bodies.items()})
        return Encoded(frozen, unencodable)


@dataclasses.dataclass(frozen=True, slots=True)
class Certain:
    """The slot is stored for good. `confirmed_at_s`: at that monotonic time the log was this daemon's for certain."""

    confirmed_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """Another process has ended the log at slot `fence`."""

    fence: int


class Next(enum.Enum):
    """`SEND_AGAIN`: the same bytes, after a pause. `ASK`: HEAD of the slot. `LOOK`: HEAD of the number behind it."""

    SEND_AGAIN = enum.auto()
    ASK = enum.auto()
    LOOK = enum.auto()


Decision: TypeAlias = Certain | Lost | Next


class SlotOutcome:
    """One slot from its first copy to its outcome, by the table above. Copies may be sent side by side: a hedge is one
    like any other.
    """

    def __init__(self, log_id: str, number: int, identity: SlotIdentity) -> None:
        self._log_id = log_id
        self._number = number
        self._identity = identity
        self._sent_at_s: list[float] = []
        self._created_sent_at_s: float | None = None

    @property
    def copies(self) -> int:
        """How many were sent."""
        return len(self._sent_at_s)

    def sent(self, at_s: float) -> None:
        """A copy is about to be sent, at that monotonic time."""
        self._sent_at_s.append(at_s)

    def created(self, sent_at_s: float) -> Decision:
        """The store says that the copy which was sent then is what was created."""
        if len(self._sent_at_s) == 1:
            return Certain(sent_at_s)
        self._created_sent_at_s = sent_at_s
        return Next.LOOK

    def open(self) -> Decision:
        """A copy was answered in any other way, or not at all."""
        return Next.ASK

    def asked(self, found: SlotIdentity | None) -> Decision:
        """What HEAD of the slot has shown. Raises Corruption for a slot that nobody can have written."""
        if found is None:
            return Next.SEND_AGAIN
        if found == self._identity:
            return Certain(self._sent_at_s[0])
        if found.kind is LogSlotKind.FENCE:
            return Lost(self._number)
        raise Corruption(
            f"log {self._log_id}: slot {self._number} holds a {found.kind.name} that this daemon did not write, and "
            "nobody else writes there: the log's end was given up (tarryd give-up), the store does not honour "
            "conditional writes, or a log id was used twice"
        )

    def looked(self, behind: SlotIdentity | None) -> Decision:
        """What HEAD of the number behind it has shown, after a copy was created."""
        if behind is not None and behind.kind.ends:
            return Lost(self._number + 1)
        if behind is not None or self._created_sent_at_s is None:
            raise Corruption(
                f"log {self._log_id}: slot {self._number + 1} exists before slot {self._number} was certain"
            )
        return Certain(self._created_sent_at_s)


class LogTruncation:
    """The number up to which the log `log_id` may be deleted, from this daemon's memory alone (L7).

    Some of the log is needed for each shard that was ever claimed for it and has not certainly been released or given
    back, and for each claim in flight.
    """

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id
        # The number up to which the log is not needed for a shard.
        self._claims: dict[int, int] = {}
        self._needs: dict[int, int] = {}
        self._epochs: dict[int, int] = {}

    def claims(self, shard: int, *, after: int) -> None:
        """A claim was frozen with an open range from there on: from now on it may land."""
        if shard in self._claims:
            raise InvariantViolated(f"shard {shard}: two claims of it are under way")
        self._claims[shard] = after

    def claim_failed(self, shard: int) -> None:
        """The claim under way certainly has not landed, and never will."""
        del self._claims[shard]

    def claimed(self, manifest: ShardManifest) -> None:
        """The claim under way has landed, with this manifest."""
        shard = manifest.shard
        del self._claims[shard]
        self._epochs[shard] = manifest.epoch
        self._needs.pop(shard, None)
        self.manifest_committed(manifest)

    def manifest_committed(self, manifest: ShardManifest) -> None:
        """Take the needs of a shard that was claimed from its manifest, which is at least as new as any before.

        A manifest of another epoch tells nothing: its owner has fenced the log, and its ranges, which no memory of this
        daemon holds, may be the only ones that need the slots.
        """
        shard = manifest.shard
        if self._epochs.get(shard) != manifest.epoch:
            return
        lowest = manifest.lowest_after(self._log_id)
        # Without one a release of this daemon has landed, and it is going to hear of it.
        if lowest is not None:
            self._needs[shard] = max(lowest, self._needs.get(shard, 0))

    def left(self, shard: int) -> None:
        """The shard was released or given back, for certain."""
        del self._needs[shard], self._epochs[shard]

    def bound(self, last_certain: int) -> int:
        """The number up to which the log may be deleted; 0 when nothing may. It never falls."""
        return max(0, min((last_certain - 1, *self._needs.values(), *self._claims.values())))


class LogLost(NotOwner):
    """Another process has ended the log: every shard of this daemon may be another's. `fence`: the slot where."""

    def __init__(self, log_id: str, fence: int) -> None:
        super().__init__(f"log {log_id} was ended at slot {fence}: another daemon takes over what this one owned")
        self.fence = fence


@dataclasses.dataclass(frozen=True, slots=True)
class CertainSlot:
    """`confirmed_at_s`: monotonic time at which the log was this daemon's. `copies`: how many were sent.
    `seconds`: from the first copy until it was certain.
    """

    slot: FrozenSlot
    confirmed_at_s: float
    copies: int
    seconds: float


class LogWriter:
    """The writer of the slots of `cursor`, each until its outcome is certain. Made and used on one event loop.

    `run` encodes slots and asks the store in an executor. A writer that has raised is never used again: its last slot
    may still land.
    """

    def __init__(
        self,
        slots: slot_log.SlotLog,
        cursor: LogCursor,
        *,
        run: backoff.Run,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        jitter: backoff.Jitter,
    ) -> None:
        self._slots = slots
        self._cursor = cursor
        self._run = run
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._writing = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Nothing more is written: a pending `write` raises OutcomeUnknown, a later one Unavailable."""
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is written, as it was closed or has raised."""
        return self._ended.done()

    async def write(self, draft: SlotDraft) -> Encoded[CertainSlot]:
        """Writes the slot that was begun in `cursor`; returns when it is certain.

        While the store cannot be reached this does not return. Raises LogLost, OutcomeUnknown after `close`, and
        Corruption when the store does not honour conditions.
        """
        if self._writing:
            raise InvariantViolated(f"log {self._slots.log_id}: a slot is still being written")
        if self.is_closed:
            raise Unavailable(f"log {self._slots.log_id} is closed")
        self._writing = True
        try:
            frozen, first = await self._unless_ended(self._run(lambda: self._freeze_and_send(draft)))
            self._cursor.frozen(frozen.slot)
            certain = None if frozen.slot is None else await self._until_certain(frozen.slot, first)
        except BaseException:
            self.close()
            raise
        finally:
            self._writing = False
        if certain is not None:
            self._cursor.certain()
        return Encoded(certain, frozen.unencodable)

    def probe(self) -> Awaitable[float | None]:
        """Looks whether the number behind the last certain slot is absent; the time at which the log was this daemon's.
        None when a slot has been sent there meanwhile, which confirms by itself.

        Raises InvariantViolated at once while a slot is uncertain. Raises LogLost when a fence is there, and the
        store's errors.
        """
        if not self._cursor.rests:
            raise InvariantViolated(f"log {self._slots.log_id}: a probe while a slot is not certain tells nothing")
        return self._probe(self._cursor.last_certain + 1, self._clock())

    async def _probe(self, number: int, sent_at_s: float) -> float | None:
        found = await self._run(lambda: self._slots.head(number))
        if found is None:
            return sent_at_s
        if not self._cursor.rests or self._cursor.last_certain >= number:
            return None
        if found.kind.ends:
            raise LogLost(self._slots.log_id, number)
        raise Corruption(f"log {self._slots.log_id}: slot {number} is DATA, and its owner has not written it")

    def _freeze_and_send(self, draft: SlotDraft) -> tuple[Encoded[FrozenSlot], tuple[float, bool]]:
        """In one go: to hand a slot from thread to thread takes as long as to encode a small one."""
        frozen = draft.freeze()
        return frozen, (self._clock(), False) if frozen.slot is None else self._send(frozen.slot)

    def _send(self, slot: FrozenSlot) -> tuple[float, bool]:
        """Sends a copy; returns when (monotonic seconds), and whether the store says that it was created."""
        crash_point("log.before_put")
        sent_at_s = self._clock()
        try:
            self._slots.create(slot.number, slot.body)
        except object_store.StoreError as error:
            log.info("slot %d of the log is not certain yet: %s", slot.number, error)
            return sent_at_s, False
        crash_point("log.after_put")
        return sent_at_s, True

    async def _until_certain(self, slot: FrozenSlot, first: tuple[float, bool]) -> CertainSlot:
        first_sent_at_s, created = first
        if created:
            # The only copy that was sent: nothing is to be found out.
            return CertainSlot(slot, first_sent_at_s, 1, self._clock() - first_sent_at_s)
        outcome = SlotOutcome(self._slots.log_id, slot.number, slot.identity)
        delays_s = backoff.delays_s(self._jitter)
        outcome.sent(first_sent_at_s)
        decision = outcome.open()
        log.warning("slot %d of the log is uncertain: every shard waits for it", slot.number)
        while not isinstance(decision, Certain):
            if isinstance(decision, Lost):
                raise LogLost(self._slots.log_id, decision.fence)
            if decision is Next.SEND_AGAIN:
                await self._unless_ended(self._sleep(next(delays_s)))
                sent_at_s, created = await self._unless_ended(self._run(lambda: self._send(slot)))
                outcome.sent(sent_at_s)
                decision = outcome.created(sent_at_s) if created else outcome.open()
                continue
            answer = await self._ask(slot, outcome, decision)
            if answer is None:
                await self._unless_ended(self._sleep(next(delays_s)))
                continue
            decision = answer
        log.warning("slot %d of the log is certain, it was sent %d times", slot.number, outcome.copies)
        return CertainSlot(slot, decision.confirmed_at_s, outcome.copies, self._clock() - first_sent_at_s)

    async def _ask(self, slot: FrozenSlot, outcome: SlotOutcome, what: Next) -> Decision | None:
        """None when the store does not say."""
        number = slot.number if what is Next.ASK else slot.number + 1
        try:
            found = await self._unless_ended(self._run(lambda: self._slots.head(number)))
        except object_store.Damaged as error:
            raise Corruption(f"log slot {error}") from error
        except object_store.StoreError as error:
            log.info("slot %d of the log cannot be asked for: %s", number, error)
            return None
        return outcome.asked(found) if what is Next.ASK else outcome.looked(found)

    async def _unless_ended(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`. Raises OutcomeUnknown when the writer is closed first; a thread that has begun
        ends by itself.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        raise OutcomeUnknown(f"log {self._slots.log_id}: its last slot may or may not be durable")


class DaemonLog(SlotWriter, Probe):
    """One log. `opened` makes it, and begins to write what shards stage. Used on one event loop.

    `lost` is called once with what ended it: then nothing that this daemon serves is its own any more.
    """

    def __init__(
        self,
        logs: slot_log.SlotLogs,
        slots: slot_log.SlotLog,
        cursor: LogCursor,
        environment: Environment,
        *,
        lost: Callable[[BaseException], None],
        company_s: Callable[[], float],
    ) -> None:
        self.logs = logs
        self.truncation = LogTruncation(cursor.log_id)
        self.deleted = NOTHING
        self.bytes_written = 0
        self.work_written = 0
        self._slots = slots
        self._cursor = cursor
        self._environment = environment
        self._lost = lost
        self._company_s = company_s
        self._writer = LogWriter(
            slots,
            cursor,
            run=environment.pools.journal.run,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            jitter=environment.jitter,
        )
        # One slot, or one decision that needs the log at rest, at a time; whoever waits longest is next.
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = False
        self._kept_bytes = 0
        # Sizes of the slots that are not deleted, from the one behind `_deleted_through` on.
        self._sizes = array.array("I")
        self._deleted_through = 0
        self._deleting: asyncio.Future[None] | None = None

    @classmethod
    async def opened(
        cls,
        logs: slot_log.SlotLogs,
        environment: Environment,
        *,
        lost: Callable[[BaseException], None],
        company_s: Callable[[], float] = lambda: 0.0,
    ) -> DaemonLog:
        """A new log, whose OPEN is certain. Raises StoreUnavailable when the store stays silent. `company_s`: see
        `SlotSender`.
        """
        config = environment.config
        writer = Writer(config.daemon_id, config.daemon.address or "", environment.version)
        cursor = LogCursor(environment.new_id(), writer)
        made = cls(logs, logs.log(cursor.log_id), cursor, environment, lost=lost, company_s=company_s)
        try:
            opened = await made._within_deadline(cursor.open(), "OPEN")
        except BaseException:
            await made.abandon()
            raise
        made._begin(opened)
        return made

    def _begin(self, opened: CertainSlot) -> None:
        environment = self._environment
        self.confirmation = ProbedConfirmation(
            f"log {self.log_id}",
            self,
            confirmed_at_s=opened.confirmed_at_s,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            jitter=environment.jitter,
        )
        self.sender = SlotSender(
            self,
            self.confirmation,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            linger_s=environment.linger_s,
            every_s=environment.config.journal.commit_latency_ms / 1000,
            company_s=self._company_s,
        )
        self.sender.applied = opened.slot.number
        self._count(opened)
        for work in (self.sender.run(), self.confirmation.watch()):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)
        log.info("log %s is open", self.log_id)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None or self._ended:
            return
        self._ended = True
        log.error("log %s is lost: %s", self.log_id, error)
        self._lost(error)

    async def close(self) -> None:
        """Ends it in order: nothing is staged or handed out any more. Whoever looks sees that at once: CLOSE stands.

        What the store does not take is logged: the next owner fences the log.
        """
        if self._ended:
            await self.abandon()
            return
        self._ended = True
        try:
            async with self._turn:
                # None of them is in the middle of a slot.
                await self._end_tasks()
                await self._within_deadline(self._cursor.close(), "CLOSE")
            log.info("log %s is closed at slot %d", self.log_id, self._cursor.last_certain)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next owner fences the log
            log.warning("log %s is not closed, its next owner fences it: %s", self.log_id, error)
        finally:
            # Also when the time for an orderly end is over.
            await self.abandon()

    async def abandon(self) -> None:
        """Writes and confirms nothing any more, and gives files and locks up. May be repeated.

        A store that does not answer is not waited for: its threads end with the process.
        """
        self._ended = True
        self._writer.close()
        await self._end_tasks()
        closing: set[asyncio.Future[None]] = {
            asyncio.ensure_future(self._environment.pools.journal.run(self._slots.close))
        }
        if self._deleting is not None:
            closing.add(self._deleting)
        await asyncio.wait(closing, timeout=ABANDON_S)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _within_deadline(self, draft: SlotDraft, what: str) -> CertainSlot:
        try:
            written = await asyncio.wait_for(self._writer.write(draft), DEADLINE_S)
        except TimeoutError:
            raise object_store.StoreUnavailable(
                names.log_prefix(self.log_id), f"{what} is not certain after {DEADLINE_S:.0f} s"
            ) from None
        if written.slot is None:
            raise InvariantViolated(f"log {self.log_id}: {what} was not written")
        return written.slot

    # ---- what it says

    @property
    def log_id(self) -> str:
        return self._cursor.log_id

    @property
    def last_certain(self) -> int:
        """The number of its last slot that is certain."""
        return self._cursor.last_certain

    @property
    def kept(self) -> ObjectCount:
        """The slots that are not deleted, and their bytes."""
        return ObjectCount(len(self._sizes), self._kept_bytes)

    @property
    def is_ended(self) -> bool:
        return self._ended

    def head(self, shard: int) -> Head | None:
        """How far it certainly goes for the shard; None when it never had a section of it."""
        return self._cursor.head(shard)

    # ---- slots

    async def write(self, sections: Sequence[Section]) -> LandedSlot:
        """Writes the sections as the next slot. Raises as `LogWriter.write`."""
        async with self._turn:
            encoders: Mapping[int, Encode] = {
                section.shard: functools.partial(_encoded, section) for section in sections
            }
            written = await self._writer.write(self._cursor.fill(encoders))
        certain = written.slot
        if certain is None:
            return LandedSlot(None, {}, written.unencodable)
        self._count(certain)
        self.confirmation.confirmed(certain.confirmed_at_s)
        self._environment.metrics.slot_written(size_bytes=len(certain.slot.body), seconds=certain.seconds)
        heads = certain.slot.header.heads
        landed = {
            shard: LandedSection(ShardSlot(heads[shard].last_slot), size_bytes)
            for shard, size_bytes in certain.slot.section_bytes.items()
        }
        return LandedSlot(certain.slot.number, landed, written.unencodable)

    def _count(self, certain: CertainSlot) -> None:
        self._sizes.append(len(certain.slot.body))
        self._kept_bytes += len(certain.slot.body)
        self.bytes_written += len(certain.slot.body)
        self.work_written += 1 + len(certain.slot.section_bytes)

    async def look(self) -> float | None:
        """Whether nobody has fenced it, as `Probe` says."""
        async with self._turn:
            looking = self._writer.probe()
        return await looking

    # ---- shards

    def begin(self, shard: int, claimed: Head) -> None:
        """The claim of a shard is certain: it may stage from now on, in that epoch and behind that shard slot."""
        self._cursor.begin(shard, claimed)

    async def stop(self, shard: int) -> Head | None:
        """The shard stages nothing any more; its epoch and last shard slot, None when it did not stage. Returns when
        what it had on its way is certain. Raises Unavailable when the log has ended before that.
        """
        while self._cursor.has_under_way(shard):
            async with self._turn:
                self._check_lives()
        return self._cursor.stop(shard) if self._cursor.stages(shard) else None

    async def end_for_claim(self) -> OwnLogEnd:
        """How far it goes, for a shard that stages no more and is claimed by its own daemon. Raises Unavailable when
        the log has ended.
        """
        async with self._turn:
            self._check_lives()
            return self._cursor.end()

    def _check_lives(self) -> None:
        """What is under way when the log is lost is never certain."""
        if self._writer.is_closed:
            raise Unavailable(f"log {self.log_id} has ended")

    # ---- deleting

    def manifest_committed(self, manifest: ShardManifest) -> None:
        """Begin to delete what no shard needs after this commit of a shard's manifest."""
        self.truncation.manifest_committed(manifest)
        self.truncate()

    def truncate(self) -> None:
        """Begins to delete what no shard needs any more, unless that is under way."""
        bound = self.truncation.bound(self._cursor.last_certain)
        if self._ended or bound <= self._deleted_through or (self._deleting and not self._deleting.done()):
            return
        self._deleting = asyncio.ensure_future(self._delete_through(bound))

    async def truncated(self) -> None:
        """Returns when nothing is being deleted."""
        if self._deleting is not None:
            await asyncio.wait([self._deleting])

    def unneeded(self) -> ObjectCount:
        """Slots that no shard needs and that are not deleted yet."""
        count = max(0, self.truncation.bound(self._cursor.last_certain) - self._deleted_through)
        return ObjectCount(count, sum(self._sizes[:count]))

    async def _delete_through(self, bound: int) -> None:
        try:
            await self._environment.pools.collection.run(lambda: self._slots.delete_through(bound))
        except object_store.StoreError as error:
            log.warning("log %s: slots up to %d cannot be deleted yet: %s", self.log_id, bound, error)
            return
        count = bound - self._deleted_through
        deleted = ObjectCount(count, sum(self._sizes[:count]))
        del self._sizes[:count]
        self._deleted_through = bound
        self.deleted += deleted
        self._kept_bytes -= deleted.size_bytes
        self._environment.metrics.collected("journal_slot", objects=deleted.objects, size_bytes=deleted.size_bytes)


def _encoded(section: Section, head: Head) -> bytes:
    count = len(section.records) + len(section.deletions)
    header = slot_format.SlotHeader(section.shard, head.epoch, ShardSlot(head.last_slot), count)
    return slot_format.encode_slot(header, section.records, section.deletions)
