"""The log that this daemon writes, from its OPEN until it is closed or lost.

Owns: its life, one slot or look at a time, what a slot that is certain tells, and deleting what no shard needs.
Does not own: what may go into a slot (`own_log`), sending one (`log_writer`), when one is due (`slot_sender`), up to
which slot it may be deleted (`log_truncation`), and claims of shards (`takeover`).

A daemon that has closed or lost its log comes back with another one. What it had under way then describes what is
certain: it may land until another daemon has claimed the shard.
"""

from __future__ import annotations

import array
import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

from daemon.core.garbage_rules import NOTHING, ObjectCount
from daemon.errors import InvariantViolated, Unavailable
from daemon.group_commit.confirmation import Probe, ProbedConfirmation
from daemon.group_commit.log_truncation import LogTruncation
from daemon.group_commit.slot_sender import LandedSection, LandedSlot, Section, SlotSender, SlotWriter
from daemon.owner.log_writer import CertainSlot, LogWriter
from daemon.owner.own_log import Encode, LogCursor, SlotDraft
from daemon.runtime.environment import Environment
from daemon.shard.range_operations import OwnLogEnd
from storage_backends import object_store, slot_log
from storage_backends.formats import names, slot_format
from storage_backends.formats.log_slot_format import Head, ShardSlot, Writer
from storage_backends.formats.manifest import ShardManifest

log = logging.getLogger(__name__)

# So long is OPEN, and CLOSE, tried before the store counts as unreachable.
DEADLINE_S = 30.0
# So long are calls to the store that are under way waited for when the log is given up.
ABANDON_S = 1.0


class DaemonLog(SlotWriter, Probe):
    """One log. `opened` makes it, and begins to write what shards stage. Used on one event loop.

    `lost` is called once with what ended it: then nothing that this daemon serves is its own any more.
    """

    def __init__(
        self,
        logs: slot_log.SlotLogs,
        slots: slot_log.SlotLog,
        own: LogCursor,
        environment: Environment,
        *,
        lost: Callable[[BaseException], None],
        company_s: Callable[[], float],
    ) -> None:
        self.logs = logs
        self.truncation = LogTruncation(own.log_id)
        self.deleted = NOTHING
        self.bytes_written = 0
        self.work_written = 0
        self._slots = slots
        self._own = own
        self._environment = environment
        self._lost = lost
        self._company_s = company_s
        self._writer = LogWriter(
            slots,
            own,
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
        own = LogCursor(
            environment.new_id(), Writer(config.daemon_id, config.daemon.address or "", environment.version)
        )
        slots = logs.log(own.log_id)
        living = cls(logs, slots, own, environment, lost=lost, company_s=company_s)
        try:
            opened = await living._within_deadline(own.open(), "OPEN")
        except BaseException:
            await living.abandon()
            raise
        living._begin(opened)
        return living

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
                await self._within_deadline(self._own.close(), "CLOSE")
            log.info("log %s is closed at slot %d", self.log_id, self._own.last_certain)
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

    async def _within_deadline(self, filling: SlotDraft, what: str) -> CertainSlot:
        try:
            written = await asyncio.wait_for(self._writer.write(filling), DEADLINE_S)
        except TimeoutError:
            raise object_store.StoreUnavailable(
                names.log_prefix(self.log_id), f"{what} is not certain after {DEADLINE_S:.0f} s"
            ) from None
        if written.certain is None:
            raise InvariantViolated(f"log {self.log_id}: {what} was not written")
        return written.certain

    # ---- what it says

    @property
    def log_id(self) -> str:
        return self._own.log_id

    @property
    def last_certain(self) -> int:
        """The number of its last slot that is certain."""
        return self._own.last_certain

    @property
    def kept(self) -> ObjectCount:
        """The slots that are not deleted, and their bytes."""
        return ObjectCount(len(self._sizes), self._kept_bytes)

    @property
    def is_ended(self) -> bool:
        return self._ended

    def head(self, shard: int) -> Head | None:
        """How far it certainly goes for the shard; None when it never had a section of it."""
        return self._own.head(shard)

    # ---- slots

    async def write(self, sections: Sequence[Section]) -> LandedSlot:
        """Writes the sections as the next slot. Raises as `LogWriter.write`."""
        async with self._turn:
            encoders: Mapping[int, Encode] = {
                section.shard: functools.partial(_encoded, section) for section in sections
            }
            written = await self._writer.write(self._own.fill(encoders))
        certain = written.certain
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
        self._own.begin(shard, claimed)

    async def stop(self, shard: int) -> Head | None:
        """The shard stages nothing any more; its epoch and last shard slot, None when it did not stage. Returns when
        what it had on its way is certain. Raises Unavailable when the log has ended before that.
        """
        while self._own.has_under_way(shard):
            async with self._turn:
                self._check_lives()
        return self._own.stop(shard) if self._own.stages(shard) else None

    async def end_for_claim(self) -> OwnLogEnd:
        """How far it goes, for a shard that stages no more and is claimed by its own daemon. Raises Unavailable when
        the log has ended.
        """
        async with self._turn:
            self._check_lives()
            return self._own.end()

    def _check_lives(self) -> None:
        """What is under way when the log is lost is never certain."""
        if self._writer.is_closed:
            raise Unavailable(f"log {self.log_id} has ended")

    # ---- deleting

    def learned(self, manifest: ShardManifest) -> None:
        """A manifest of a shard is committed: what no shard needs any more is deleted meanwhile."""
        self.truncation.learned(manifest)
        self.truncate()

    def truncate(self) -> None:
        """Begins to delete what no shard needs any more, unless that is under way."""
        bound = self.truncation.bound(self._own.last_certain)
        if self._ended or bound <= self._deleted_through or (self._deleting and not self._deleting.done()):
            return
        self._deleting = asyncio.ensure_future(self._delete_through(bound))

    async def truncated(self) -> None:
        """Returns when nothing is being deleted."""
        if self._deleting is not None:
            await asyncio.wait([self._deleting])

    def unneeded(self) -> ObjectCount:
        """Slots that no shard needs and that are not deleted yet."""
        count = max(0, self.truncation.bound(self._own.last_certain) - self._deleted_through)
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
