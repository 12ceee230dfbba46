"""Writes this daemon's log, from OPEN until it is closed or lost.

The answers of the store decide what became of a slot that was sent (L1, L10):

    created, one copy was sent              -> certain; confirms when it was sent
    created, several copies were sent       -> check the next number: a fence: lost; else certain
    exists, no answer, an error             -> HEAD
        this slot                           -> certain; confirms when the first copy was sent
        a fence                             -> lost
        none                                -> the same bytes again, after a pause

If several copies were sent, the one that was created may have landed in a number that was emptied: an earlier copy was
there, a fence behind it, and a collector has deleted the slots that the fence covers. The fence is never deleted.

One slot or probe is in flight at a time. After the end the daemon opens another log. Work still in flight describes
only durable state, so it may land until another daemon claims the shard.

Pure: `LogCursor`, `SlotDraft`, `SlotOutcome`, `LogTruncation`. Sending: `LogWriter`. The log: `DaemonLog`. Timing:
`slot_sender`. Claims of shards: `daemon.owner.takeover`.
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

# Time to try OPEN, and CLOSE, before the store counts as unreachable (seconds)
DEADLINE_S = 30.0
# Time to wait for calls to the store in flight when the log is given up (seconds)
ABANDON_S = 1.0

T = TypeVar("T")
S = TypeVar("S")

Encode: TypeAlias = Callable[[Head], bytes]
"""Encodes the section of a shard, with its epoch and section number."""

_NOTHING: Mapping[int, bytes] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnLogEnd:
    """The end of the claimant's own log with no slot in flight: its last certain number and the heads there."""

    log_id: str
    end: int
    heads: Heads


class LogCursor:
    """The log of one incarnation, from OPEN on. Used in one thread.

    It knows the next number, how far the log is certain for each shard, and the slot in flight with its section numbers
    (L1, L6). A log that has lost a number to a fence, or was closed, is never used again: the daemon opens another one.
    """

    def __init__(self, log_id: str, owner: Writer) -> None:
        self._log_id = log_id
        self._owner = owner
        self._certain = 0
        self._heads: Mapping[int, Head] = {}
        # Shard that may have sections -> its epoch, and the last section number that is stored or was at the claim
        self._staging: dict[int, Head] = {}
        self._under_way: SlotDraft | None = None
        self._slot: FrozenSlot | None = None
        self._closed = False

    @property
    def log_id(self) -> str:
        return self._log_id

    @property
    def last_certain(self) -> int:
        """The number of the last certain slot; 0 before OPEN is certain."""
        return self._certain

    @property
    def rests(self) -> bool:
        """True if every slot that was begun is certain."""
        return self._under_way is None

    def end(self) -> OwnLogEnd:
        """Return how far the log goes. Raises InvariantViolated while a slot is in flight, since it may go further."""
        self._check_rests("its end was asked for")
        return OwnLogEnd(log_id=self._log_id, end=self._certain, heads=self._heads)

    def head(self, shard: int) -> Head | None:
        """Return how far the log certainly goes for the shard, or None if it never had a section of it."""
        return self._heads.get(shard)

    def has_under_way(self, shard: int) -> bool:
        """Return whether the slot that was begun has a section of the shard."""
        return self._under_way is not None and shard in self._under_way.sections

    def stages(self, shard: int) -> bool:
        """Return whether the shard may have sections now."""
        return shard in self._staging

    def begin(self, shard: int, claimed: Head) -> None:
        """Allow sections of a shard whose claim is certain, in that epoch and behind that section number."""
        if self._certain == 0:
            raise InvariantViolated(f"log {self._log_id}: shard {shard} was claimed before OPEN was certain")
        before = self._staging.get(shard)
        if before is not None:
            raise InvariantViolated(
                f"shard {shard}: epoch {claimed.epoch} begins, epoch {before.epoch} was not stopped"
            )
        self._staging[shard] = claimed

    def stop(self, shard: int) -> Head:
        """Allow no more sections of a shard, which is about to be released, given back or claimed again.

        Returns its epoch and its last section number. Raises InvariantViolated while a section of it is in flight.
        """
        if self._under_way is not None and self.has_under_way(shard):
            number = self._under_way.header.number
            raise InvariantViolated(f"shard {shard} stops while its section in slot {number} is not certain")
        return self._staging.pop(shard)

    def open(self) -> SlotDraft:
        """Begin OPEN, the first slot."""
        return self._begin_slot(LogSlotKind.OPEN, {})

    def close(self) -> SlotDraft:
        """Begin CLOSE, the last slot. Nothing is delivered any longer."""
        draft = self._begin_slot(LogSlotKind.CLOSE, {})
        self._closed = True
        return draft

    def fill(self, sections: Mapping[int, Encode]) -> SlotDraft:
        """Begin DATA with a section of each of these shards, which gets its next section number."""
        unknown = sorted(sections.keys() - self._staging.keys())
        if unknown or not sections:
            raise InvariantViolated(
                f"log {self._log_id}: shards {unknown} stage before their claim or after their stop"
            )
        return self._begin_slot(LogSlotKind.DATA, sections)

    def frozen(self, slot: FrozenSlot | None) -> None:
        """Record that the bytes of the slot that was begun are fixed.

        `slot` is None if no section could be encoded, so that none is sent.
        """
        if self._under_way is None or self._slot is not None:
            raise InvariantViolated(f"log {self._log_id}: a slot was frozen that had not begun")
        self._slot = slot
        if slot is None:
            self._under_way = None

    def certain(self) -> None:
        """Record that the frozen slot is certain."""
        slot = self._slot
        if slot is None:
            raise InvariantViolated(f"log {self._log_id}: no slot is in flight")
        self._under_way = self._slot = None
        self._certain = slot.number
        self._heads = slot.header.heads
        self._staging.update((shard, slot.header.heads[shard]) for shard in slot.section_bytes)

    def _begin_slot(self, kind: LogSlotKind, sections: Mapping[int, Encode]) -> SlotDraft:
        self._check_rests(f"{kind.name} begins")
        if self._closed or (kind is LogSlotKind.OPEN) != (self._certain == 0):
            raise InvariantViolated(f"log {self._log_id}: {kind.name} begins after slot {self._certain}")
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
    """A slot as it is sent, the same at each try. `section_bytes` maps shards to the sizes of their sections."""

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
    """The result of a draft: its slot, first frozen, then certain; None if no section could be encoded.

    `unencodable` maps shards to the reason why their section could not be encoded: their memory can never be stored.
    """

    slot: S | None
    unencodable: Mapping[int, Exception]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SlotDraft:
    """The next slot before its bytes are fixed: its sections and their section numbers."""

    header: LogSlotHeader
    sections: Mapping[int, tuple[Head, Encode]]

    def freeze(self) -> Encoded[FrozenSlot]:
        """Encode the slot. This takes long and may run in any thread."""
        bodies: dict[int, bytes] = {}
        unencodable: dict[int, Exception] = {}
        for shard, (head, encode) in self.sections.items():
            try:
                bodies[shard] = encode(head)
            except Exception as error:  # noqa: BLE001 - any error costs its shard alone
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
    """The slot is stored for good. `confirmed_at_s` is when the log certainly was this daemon's (monotonic seconds)."""

    confirmed_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """Another process has ended the log at slot `fence`."""

    fence: int


class Next(enum.Enum):
    """The next step to find out what became of a slot.

    `SEND_AGAIN` sends the same bytes after a pause, `ASK` is a HEAD of the slot, `LOOK` a HEAD of the number behind it.
    """

    SEND_AGAIN = enum.auto()
    ASK = enum.auto()
    LOOK = enum.auto()


Decision: TypeAlias = Certain | Lost | Next


class SlotOutcome:
    """One slot from its first copy to its outcome, by the table above.

    Copies may be sent side by side: a hedge is one like any other.
    """

    def __init__(self, log_id: str, number: int, identity: SlotIdentity) -> None:
        self._log_id = log_id
        self._number = number
        self._identity = identity
        self._sent_at_s: list[float] = []
        self._created_sent_at_s: float | None = None

    @property
    def copies(self) -> int:
        """The number of copies that were sent."""
        return len(self._sent_at_s)

    def sent(self, at_s: float) -> None:
        """Record that a copy is about to be sent at this time (monotonic seconds)."""
        self._sent_at_s.append(at_s)

    def created(self, sent_at_s: float) -> Decision:
        """Decide after the store answered that the copy sent at that time was created."""
        if len(self._sent_at_s) == 1:
            return Certain(sent_at_s)
        self._created_sent_at_s = sent_at_s
        return Next.LOOK

    def open(self) -> Decision:
        """Decide after a copy got any other answer, or none."""
        return Next.ASK

    def asked(self, found: SlotIdentity | None) -> Decision:
        """Decide from the HEAD of the slot. Raises Corruption for a slot that no daemon can have written."""
        if found is None:
            return Next.SEND_AGAIN
        if found == self._identity:
            return Certain(self._sent_at_s[0])
        if found.kind is LogSlotKind.FENCE:
            return Lost(self._number)
        raise Corruption(
            f"log {self._log_id}: slot {self._number} holds a {found.kind.name} that this daemon did not write. No "
            "other daemon writes there: the log's end was given up (tarryd give-up), the store does not honour "
            "conditional writes, or a log id was used twice"
        )

    def looked(self, behind: SlotIdentity | None) -> Decision:
        """Decide from the HEAD of the number behind it, after a copy was created."""
        if behind is not None and behind.kind.ends:
            return Lost(self._number + 1)
        if behind is not None or self._created_sent_at_s is None:
            raise Corruption(
                f"log {self._log_id}: slot {self._number + 1} exists before slot {self._number} was certain"
            )
        return Certain(self._created_sent_at_s)


class LogTruncation:
    """The number up to which the log `log_id` may be deleted, from this daemon's memory alone (L7).

    A shard needs part of the log from its claim until it was certainly released or given back; so does each claim in
    flight.
    """

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id
        # Shard -> the number up to which the log is not needed for it
        self._claims: dict[int, int] = {}
        self._needs: dict[int, int] = {}
        self._epochs: dict[int, int] = {}

    def claims(self, shard: int, *, after: int) -> None:
        """Record a claim that was frozen with an open log range behind `after`: from now on it may land."""
        if shard in self._claims:
            raise InvariantViolated(f"shard {shard}: two claims of it are in flight")
        self._claims[shard] = after

    def claim_failed(self, shard: int) -> None:
        """Forget the claim in flight, which certainly has not landed and never will."""
        del self._claims[shard]

    def claimed(self, manifest: ShardManifest) -> None:
        """Record that the claim in flight has landed, with this manifest."""
        shard = manifest.shard
        del self._claims[shard]
        self._epochs[shard] = manifest.epoch
        self._needs.pop(shard, None)
        self.manifest_committed(manifest)

    def manifest_committed(self, manifest: ShardManifest) -> None:
        """Take the needs of a shard that was claimed from its manifest, which is at least as new as any before.

        A manifest of another epoch is ignored: its owner has fenced the log, and its log ranges, which no memory of
        this daemon holds, may be the only ones that need the slots.
        """
        shard = manifest.shard
        if self._epochs.get(shard) != manifest.epoch:
            return
        lowest = manifest.lowest_after(self._log_id)
        # Without one, a release of this daemon has landed, and its result is on the way.
        if lowest is not None:
            self._needs[shard] = max(lowest, self._needs.get(shard, 0))

    def left(self, shard: int) -> None:
        """Forget a shard that was certainly released or given back."""
        del self._needs[shard], self._epochs[shard]

    def bound(self, last_certain: int) -> int:
        """Return the number up to which the log may be deleted, or 0 if nothing may. It never falls."""
        return max(0, min((last_certain - 1, *self._needs.values(), *self._claims.values())))


class LogLost(NotOwner):
    """Another process has ended the log at slot `fence`: every shard of this daemon may have another owner."""

    def __init__(self, log_id: str, fence: int) -> None:
        super().__init__(f"log {log_id} was ended at slot {fence} by another daemon, which takes over the shards")
        self.fence = fence


@dataclasses.dataclass(frozen=True, slots=True)
class CertainSlot:
    """A slot that is certain.

    `confirmed_at_s` is a time at which the log was this daemon's (monotonic seconds). `copies` is how many were sent,
    `seconds` the time from the first copy until it was certain.
    """

    slot: FrozenSlot
    confirmed_at_s: float
    copies: int
    seconds: float


class LogWriter:
    """The writer of the slots of `cursor`, each until its outcome is certain. Made and used on one event loop.

    `run` encodes slots and calls the store in an executor. A writer that has raised is never used again: its last slot
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
        """Stop writing: a pending `write` raises OutcomeUnknown, a later one Unavailable."""
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def is_closed(self) -> bool:
        """True if nothing more is written, since it was closed or has raised."""
        return self._ended.done()

    async def write(self, draft: SlotDraft) -> Encoded[CertainSlot]:
        """Write the slot that was begun in `cursor`; return when it is certain.

        It does not return while the store is unreachable. Raises LogLost, OutcomeUnknown after `close`, and Corruption
        if the store does not honour conditional writes.
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
        """Check that the number behind the last certain slot is absent.

        Returns a time at which the log was this daemon's (monotonic seconds), or None if a slot was sent there
        meanwhile, which is a confirmation itself. Raises InvariantViolated at once while a slot is uncertain, LogLost
        if a fence is there, and the store's errors.
        """
        if not self._cursor.rests:
            raise InvariantViolated(f"log {self._slots.log_id}: a probe proves nothing while a slot is not certain")
        return self._probe(self._cursor.last_certain + 1, self._clock())

    async def _probe(self, number: int, sent_at_s: float) -> float | None:
        found = await self._run(lambda: self._slots.head(number))
        if found is None:
            return sent_at_s
        if not self._cursor.rests or self._cursor.last_certain >= number:
            return None
        if found.kind.ends:
            raise LogLost(self._slots.log_id, number)
        raise Corruption(f"log {self._slots.log_id}: slot {number} is DATA that its owner did not write")

    def _freeze_and_send(self, draft: SlotDraft) -> tuple[Encoded[FrozenSlot], tuple[float, bool]]:
        """Encode the slot and send the first copy, in one call.

        Passing a slot from thread to thread takes as long as encoding a small one.
        """
        frozen = draft.freeze()
        return frozen, (self._clock(), False) if frozen.slot is None else self._send(frozen.slot)

    def _send(self, slot: FrozenSlot) -> tuple[float, bool]:
        """Send a copy; return when (monotonic seconds), and whether the store says that it was created."""
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
            # The only copy that was sent, so the outcome is clear
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
        log.warning("slot %d of the log is certain after %d attempts", slot.number, outcome.copies)
        return CertainSlot(slot, decision.confirmed_at_s, outcome.copies, self._clock() - first_sent_at_s)

    async def _ask(self, slot: FrozenSlot, outcome: SlotOutcome, what: Next) -> Decision | None:
        """Return the decision from a HEAD, or None if the store does not answer."""
        number = slot.number if what is Next.ASK else slot.number + 1
        try:
            found = await self._unless_ended(self._run(lambda: self._slots.head(number)))
        except object_store.Damaged as error:
            raise Corruption(f"log slot {error}") from error
        except object_store.StoreError as error:
            log.info("cannot read slot %d of the log: %s", number, error)
            return None
        return outcome.asked(found) if what is Next.ASK else outcome.looked(found)

    async def _unless_ended(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises OutcomeUnknown if the writer is closed first.

        A thread that has begun runs to its end.
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
    """The log of this daemon. `opened` creates it and begins to write the staged sections. Used on one event loop.

    `lost` is called once with the error that ended it: then this daemon no longer owns anything that it serves.
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
        # Held for one slot, or for one decision that needs the log at rest; the longest waiting caller is next.
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = False
        self._kept_bytes = 0
        # Sizes of the slots that are not deleted (bytes), from the one behind `_deleted_through` on
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
        """Return a new log whose OPEN is certain. Raises StoreUnavailable if the store does not answer.

        For `company_s` see `SlotSender`.
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
        """End the log cleanly; nothing may be staged or delivered any longer. CLOSE tells other daemons at once.

        If the store does not accept CLOSE, that is logged: the next owner fences the log.
        """
        if self._ended:
            await self.abandon()
            return
        self._ended = True
        try:
            async with self._turn:
                # No task is in the middle of a slot.
                await self._end_tasks()
                await self._within_deadline(self._cursor.close(), "CLOSE")
            log.info("log %s is closed at slot %d", self.log_id, self._cursor.last_certain)
        except Exception as error:  # noqa: BLE001 - after any error the next owner fences the log
            log.warning("cannot close log %s; the next owner will fence it: %s", self.log_id, error)
        finally:
            # Also when the time for a clean end is over
            await self.abandon()

    async def abandon(self) -> None:
        """Stop writing and confirming, and release files and locks. May be repeated.

        It does not wait for a store that does not answer: its threads end with the process.
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

    # ---- state

    @property
    def log_id(self) -> str:
        return self._cursor.log_id

    @property
    def last_certain(self) -> int:
        """The number of its last certain slot."""
        return self._cursor.last_certain

    @property
    def kept(self) -> ObjectCount:
        """The slots that are not deleted, and their bytes."""
        return ObjectCount(len(self._sizes), self._kept_bytes)

    @property
    def is_ended(self) -> bool:
        return self._ended

    def head(self, shard: int) -> Head | None:
        """Return how far the log certainly goes for the shard, or None if it never had a section of it."""
        return self._cursor.head(shard)

    # ---- slots

    async def write(self, sections: Sequence[Section]) -> LandedSlot:
        """Write the sections as the next slot. Raises as `LogWriter.write`."""
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
        """Check that no other process has fenced the log; see `Probe`."""
        async with self._turn:
            looking = self._writer.probe()
        return await looking

    # ---- shards

    def begin(self, shard: int, claimed: Head) -> None:
        """Let a shard whose claim is certain stage from now on, in that epoch and behind that section number."""
        self._cursor.begin(shard, claimed)

    async def stop(self, shard: int) -> Head | None:
        """Stop staging for a shard; return its epoch and last section number, or None if it did not stage.

        Returns once its section in flight is certain. Raises Unavailable if the log ends before that.
        """
        while self._cursor.has_under_way(shard):
            async with self._turn:
                self._check_lives()
        return self._cursor.stop(shard) if self._cursor.stages(shard) else None

    async def end_for_claim(self) -> OwnLogEnd:
        """Return how far the log goes, for a shard that no longer stages and is claimed by its own daemon.

        Raises Unavailable if the log has ended.
        """
        async with self._turn:
            self._check_lives()
            return self._cursor.end()

    def _check_lives(self) -> None:
        """Raise Unavailable if the log has ended, since a slot in flight when it is lost is never certain."""
        if self._writer.is_closed:
            raise Unavailable(f"log {self.log_id} has ended")

    # ---- deleting

    def manifest_committed(self, manifest: ShardManifest) -> None:
        """Begin to delete what no shard needs after this commit of a shard's manifest."""
        self.truncation.manifest_committed(manifest)
        self.truncate()

    def truncate(self) -> None:
        """Begin to delete what no shard needs any longer, unless a deletion is in flight."""
        bound = self.truncation.bound(self._cursor.last_certain)
        if self._ended or bound <= self._deleted_through or (self._deleting and not self._deleting.done()):
            return
        self._deleting = asyncio.ensure_future(self._delete_through(bound))

    async def truncated(self) -> None:
        """Wait until nothing is being deleted."""
        if self._deleting is not None:
            await asyncio.wait([self._deleting])

    def unneeded(self) -> ObjectCount:
        """Return the slots that no shard needs and that are not deleted yet."""
        count = max(0, self.truncation.bound(self._cursor.last_certain) - self._deleted_through)
        return ObjectCount(count, sum(self._sizes[:count]))

    async def _delete_through(self, bound: int) -> None:
        try:
            await self._environment.pools.collection.run(lambda: self._slots.delete_through(bound))
        except object_store.StoreError as error:
            log.warning("log %s: cannot delete slots up to %d yet: %s", self.log_id, bound, error)
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
