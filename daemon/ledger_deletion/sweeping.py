"""Sweeps object stores for orphaned offloaded ledgers, and records their deletion.

`deletion_requests` alone uses it; it stands apart because it asks stores and owners in threads, one sweep of a store at
a time. `daemon.core.deletions.orphans` judges what is found. Nothing is deleted here: the workers verify what is
recorded, as always.

A sweep lists everything, and asks the store and the owners only about ledgers without a record that are not reported as
in use. All of that is in the threads of the workers, so a store that hangs delays nothing else. Every ledger is looked
up in every shard, since objects do not show reliably whose they are. So this daemon must own all shards during the
sweep.

What changes meanwhile: an object that is written after it was listed makes its ledger young, since its metadata is read
later. A ledger that comes into use is looked up again before it is recorded; if that comes even later, the attempt
finds it in use, as with every record.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Final, TypeVar

from daemon.core import garbage_rules
from daemon.core.deletions import deletion_checks, orphans
from daemon.core.deletions.ledger_deletions import LedgerDeletions, Recorded
from daemon.core.deletions.ledger_metadata import OffloadedName
from daemon.core.deletions.orphans import Finding, ListedLedger, ListedPage, OrphanedLedger
from daemon.errors import Conflict, Corruption, InvalidArgument, InvariantViolated, NotOwner, Unavailable
from daemon.group_commit.request_effects import RequestEffects
from daemon.ledger_deletion import shard_deletions
from daemon.ledger_deletion.deletion_values import SweepProgress, SweepWish
from daemon.ledger_deletion.shard_deletions import DeletingShard
from daemon.ledger_stores.ledger_store import DeletionFailed, InUseAnswer
from daemon.runtime.environment import Environment
from storage_backends import object_store
from storage_backends.formats import names
from storage_backends.formats.deletion_format import OffloadContext, PendingDelete

log = logging.getLogger(__name__)

T = TypeVar("T")

LISTED_AT_ONCE: Final = 1_000
# Ledgers whose metadata is read before progress is reported
LOOKED_AT_ONCE: Final = 100
# Look-ups of ledgers in shards before others have a turn; each takes some microseconds.
LOOKUPS_A_TURN: Final = 300
BATCHES_AT_ONCE: Final = 32
UNANSWERED_IN_A_ROW_MAX: Final = 100
"""The sweep ends after this many consecutive questions without an answer."""

Record = Callable[[str, Sequence[PendingDelete], RequestEffects], Awaitable["Recorded | None"]]
"""Records up to `deletion_checks.DELETES_MAX` findings of a topic; returns None if its policy forbids it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """The answers of the store and the owner about a ledger.

    `said` is the store's. `in_use` is None if there is no owner to ask. `reason` explains a missing answer.
    """

    said: orphans.LedgerClaim | Finding
    in_use: InUseAnswer | None = None
    reason: str = ""


class Sweeping:
    """The sweeps of one daemon, on one event loop.

    `shards` returns those served now, and `shards_total` the number of shards of the root.
    """

    def __init__(
        self,
        environment: Environment,
        shards: Callable[[], Mapping[int, DeletingShard]],
        shards_total: Callable[[], int],
        record: Record,
    ) -> None:
        self._environment = environment
        self._shards = shards
        self._shards_total = shards_total
        self._record = record
        self._under_way: set[str] = set()
        # Questions to stores and owners that have a thread, including those of ended sweeps. Threads change this set.
        self._asked: set[object] = set()
        self._halted = False

    def halt(self) -> None:
        """End sweeps after their current step."""
        self._halted = True

    @property
    def asked(self) -> int:
        """The number of questions to stores and owners without an answer."""
        return len(self._asked)

    async def answered(self) -> None:
        """Wait, after `halt`, until questions are answered or have had as much time as an attempt."""
        left_s = shard_deletions.ending_s(self._environment.config)
        while self._asked and left_s > 0:
            await self._environment.sleep(shard_deletions.END_LOOK_S)
            left_s -= shard_deletions.END_LOOK_S

    async def sweep(self, wish: SweepWish) -> AsyncGenerator[SweepProgress]:
        """Search for orphans; yield progress at each step, the last one `done`.

        Raises NotFound if there is no such object store, Conflict during another sweep of it, and NotOwner unless this
        daemon owns every shard. Raises QuotaExceeded if too much would have to be remembered, Unavailable if the store
        or an owner does not answer, and the errors of recording.
        """
        place = self._environment.ledger_stores.driver_of(wish.store)
        try:
            object_store.check_prefix(wish.prefix)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        if wish.store in self._under_way:
            raise Conflict(f"a sweep of object store {wish.store} is in progress")
        shards = dict(self._shards())
        if not shards or len(shards) < self._shards_total():
            raise NotOwner(
                f"a ledger may be in use in any of {self._shards_total()} shards, this daemon serves {len(shards)} "
                "of them"
            )

        def check() -> None:
            if self._halted:
                raise Unavailable("the daemon is stopping; sweep again when it serves")
            if dict(self._shards()) != shards:
                raise NotOwner("this daemon no longer owns every shard, so it cannot know what is in use")

        self._under_way.add(wish.store)
        try:
            sweep = _Sweep(wish, place, self._environment, shards, self._record, check, self._asked)
            async with contextlib.aclosing(sweep.steps()) as steps:
                async for progress in steps:
                    yield progress
        except object_store.StoreError as error:
            raise Unavailable(f"object store {wish.store}: {error}") from error
        finally:
            self._under_way.remove(wish.store)


class _Sweep:
    """One sweep. `place` names in records what is swept. `check` raises when the sweep must end.

    `asked` has the questions that wait in a thread.
    """

    def __init__(
        self,
        wish: SweepWish,
        place: OffloadContext,
        environment: Environment,
        shards: Mapping[int, DeletingShard],
        record: Record,
        check: Callable[[], None],
        asked: set[object],
    ) -> None:
        settings = environment.config.deletion
        self._wish = wish
        self._environment = environment
        self._ledger_stores = environment.ledger_stores
        self._place = place
        self._topic_bytes_max = environment.config.limits.topic_bytes_max
        self._states: dict[int, LedgerDeletions] = {number: each.deletions.state for number, each in shards.items()}
        self._record = record
        self._check = check
        self._asked = asked
        self._grace_ms = int(settings.sweep_grace_s * 1000) if wish.grace_ms is None else wish.grace_ms
        self._guard = orphans.Guard(settings.guard_share, settings.guard_bytes)
        self._pairing = orphans.Pairing()
        self._tally = orphans.Tally()
        # Orphans found since the last progress; and those to record, by topic
        self._fresh: list[OrphanedLedger] = []
        self._wanted: dict[str, list[OrphanedLedger]] = {}
        self._wanted_count = 0
        self._orphans = 0
        self._unanswered_in_a_row = 0

    async def steps(self) -> AsyncGenerator[SweepProgress]:
        yield self._progress()
        async for ledgers in self._listed():
            async for _ in self._look_at(ledgers):
                yield self._progress()
        refused = ""
        if self._wish.delete:
            if not self._wish.force:
                counts = self._tally.counts()
                unknown = counts.of_unknown_topics if self._wish.unknown_topics else garbage_rules.NOTHING
                refused = self._guard.refusal(counts.orphaned + unknown, counts.listed)
            if not refused:
                with RequestEffects() as effects:
                    async for _ in self._record_all(effects):
                        yield self._progress()
        self._tell(refused)
        yield dataclasses.replace(self._progress(), done=True, refused=refused)

    # ---- listing

    async def _listed(self) -> AsyncIterator[Sequence[ListedLedger]]:
        """Yield ledgers that no shard knows: complete ones as they are listed, then those with one object."""
        entries = await self._run(lambda: iter(self._store.list(self._wish.prefix)))
        while (page := await self._run(functools.partial(_page, entries))) is not None:
            self._tally.listed(page)
            unknown = []
            async for ledger, finding in self._looked_up(page.ledgers, lambda ledger: ledger.name):
                if finding is None:
                    unknown.append(ledger)
                else:
                    self._tally.found(finding, ledger.swept)
            yield self._pairing.add(unknown)
        for portion in self._pairing.rest(LISTED_AT_ONCE):
            yield portion

    async def _looked_up(
        self, ledgers: Sequence[T], name_of: Callable[[T], OffloadedName]
    ) -> AsyncIterator[tuple[T, Finding | None]]:
        """Yield each ledger with what any shard knows of it, or None.

        Every shard is checked, since objects do not show reliably whose they are.
        """
        portion = max(1, LOOKUPS_A_TURN // len(self._states))
        for start in range(0, len(ledgers), portion):
            self._check()
            for ledger in ledgers[start : start + portion]:
                yield ledger, self._known(name_of(ledger))
            await asyncio.sleep(0)

    def _known(self, name: OffloadedName) -> Finding | None:
        states = self._states.values()
        if any(state.in_use.holds(name.uuid_msb, name.uuid_lsb, name.ledger_id) for state in states):
            return Finding.IN_USE
        if any(state.has_record(name.uuid_msb, name.uuid_lsb, name.ledger_id) for state in states):
            return Finding.RECORDED
        return None

    # ---- examining unknown ledgers

    async def _look_at(self, ledgers: Sequence[ListedLedger]) -> AsyncIterator[None]:
        now_ms = self._environment.clock.now_ms()
        grown: list[ListedLedger] = []
        for ledger in ledgers:
            if orphans.is_young(ledger, now_ms, self._grace_ms):
                self._tally.found(Finding.YOUNG, ledger.swept)
            else:
                grown.append(ledger)
        if not grown:
            yield
        for start in range(0, len(grown), LOOKED_AT_ONCE):
            portion = (self._look_at_one(ledger) for ledger in grown[start : start + LOOKED_AT_ONCE])
            await _in_parallel(portion, self._environment.config.deletion.parallelism)
            yield

    async def _look_at_one(self, ledger: ListedLedger) -> None:
        look = await self._run(functools.partial(self._ask, ledger))
        if look.said is Finding.UNANSWERED:
            if not self._unanswered_in_a_row:
                log.warning("sweep of object store %s: a ledger is left alone: %s", self._wish.store, look.reason)
            self._unanswered_in_a_row += 1
            if self._unanswered_in_a_row >= UNANSWERED_IN_A_ROW_MAX:
                raise Unavailable(
                    f"{self._unanswered_in_a_row} questions in a row had no answer, the last one: {look.reason}"
                )
        else:
            self._unanswered_in_a_row = 0
        finding = self._judged(look)
        self._tally.found(finding, ledger.swept)
        if isinstance(look.said, orphans.LedgerClaim) and finding is not Finding.IN_USE:
            self._found_orphan(ledger, look.said, unknown_topic=finding is Finding.OF_UNKNOWN_TOPIC)

    def _judged(self, look: _Look) -> Finding:
        if isinstance(look.said, Finding):
            return look.said
        if look.in_use is InUseAnswer.IN_USE:
            return Finding.IN_USE
        topic = look.said.topic
        # The owner reported all offloaded ledgers in use of a topic that is known.
        known = look.in_use is not None or self._states[names.shard_of(topic, len(self._states))].in_use.knows(topic)
        return Finding.ORPHANED if known else Finding.OF_UNKNOWN_TOPIC

    def _ask(self, ledger: ListedLedger) -> _Look:
        """Ask the store and the owner about a ledger. In a thread."""
        try:
            data, index = self._metadata(ledger.name.data), self._metadata(ledger.name.index)
            claim = orphans.claim_of(ledger, data, index, self._place, topic_bytes_max=self._topic_bytes_max)
            if isinstance(claim, Finding):
                return _Look(claim)
            return _Look(claim, self._ledger_stores.ask_in_use(claim.topic, claim.pending_delete))
        except (object_store.StoreRefused, DeletionFailed) as error:
            return _Look(Finding.UNANSWERED, reason=str(error))

    @functools.cached_property
    def _store(self) -> object_store.ObjectStore:
        """The object store, opened at the first use. In a thread."""
        return self._ledger_stores.object_store(self._wish.store)

    def _metadata(self, key: str) -> Mapping[str, str] | None:
        try:
            return self._store.head(key).metadata
        except object_store.NotFound:
            return None
        except object_store.Damaged:
            return object_store.NO_METADATA

    def _found_orphan(self, ledger: ListedLedger, claim: orphans.LedgerClaim, *, unknown_topic: bool) -> None:
        orphan = OrphanedLedger(claim.topic, claim.pending_delete, ledger.size_bytes, ledger.modified_ms, unknown_topic)
        self._orphans += 1
        self._fresh.append(orphan)
        if not self._wish.delete or (unknown_topic and not self._wish.unknown_topics):
            return
        if self._wanted_count < orphans.ORPHANS_MAX:
            self._wanted_count += 1
            self._wanted.setdefault(claim.topic, []).append(orphan)
        else:
            self._tally.ledgers_left += 1

    # ---- recording what is orphaned

    async def _record_all(self, effects: RequestEffects) -> AsyncIterator[None]:
        batches = (
            (topic, found[start : start + deletion_checks.DELETES_MAX])
            for topic, found in self._wanted.items()
            for start in range(0, len(found), deletion_checks.DELETES_MAX)
        )
        while some := list(itertools.islice(batches, BATCHES_AT_ONCE)):
            await _in_parallel((self._record_batch(topic, found, effects) for topic, found in some), BATCHES_AT_ONCE)
            yield

    async def _record_batch(self, topic: str, found: Sequence[OrphanedLedger], effects: RequestEffects) -> None:
        """Record what is still unknown."""
        looked_up = self._looked_up(found, _name_of)
        deletes = [orphan.pending_delete async for orphan, finding in looked_up if finding is None]
        self._check()
        try:
            recorded = await self._record(topic, deletes, effects) if deletes else None
        except Corruption as error:
            log.warning("sweep of object store %s: orphans of %s are not recorded: %s", self._wish.store, topic, error)
            recorded = None
        new = 0 if recorded is None else len(recorded.new)
        self._tally.ledgers_recorded += new
        self._tally.ledgers_left += len(found) - new

    # ---- reporting and running

    def _progress(self) -> SweepProgress:
        fresh, self._fresh = self._fresh, []
        return SweepProgress(tuple(fresh), self._tally.counts())

    def _tell(self, refused: str) -> None:
        counts = self._tally.counts()
        self._environment.metrics.deletions.set_orphans(self._wish.store, self._orphans)
        log.info(
            "swept store=%s prefix=%r listed=%d orphaned=%d of_unknown_topics=%d unidentified=%d unanswered=%d "
            "ledgers_recorded=%d ledgers_left=%d refused=%r",
            self._wish.store,
            self._wish.prefix,
            counts.listed.objects,
            counts.orphaned.objects,
            counts.of_unknown_topics.objects,
            counts.unidentified.objects,
            counts.unanswered.objects,
            counts.ledgers_recorded,
            counts.ledgers_left,
            refused,
        )

    async def _run(self, work: Callable[[], T]) -> T:
        """Run work that may block in a thread, if the sweep may go on."""

        def ask() -> T:
            question = object()
            self._asked.add(question)
            try:
                return work()
            finally:
                self._asked.discard(question)

        self._check()
        return await self._environment.pools.deletions.run(ask)


def _page(entries: Iterator[object_store.ListedObject]) -> ListedPage | None:
    """Return the next part of a listing, or None at its end. In a thread."""
    some = list(itertools.islice(entries, LISTED_AT_ONCE))
    return ListedPage.of(some) if some else None


def _name_of(orphan: OrphanedLedger) -> OffloadedName:
    context = orphan.pending_delete.offload_context
    if context is None:
        raise InvariantViolated("an orphan is an offloaded ledger, and says where it is")
    return OffloadedName(context.uuid_msb, context.uuid_lsb, orphan.pending_delete.ledger_id)


async def _in_parallel(work: Iterable[Coroutine[Any, Any, None]], at_once: int) -> None:
    """Run all of the work, `at_once` at a time; the first failure cancels the rest and is raised."""
    left = iter(work)

    async def some() -> None:
        for each in left:
            await each

    tasks = [asyncio.ensure_future(some()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
