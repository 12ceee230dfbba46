"""Serves the calls of the service LedgerDeletion, across shards.

The engine alone uses it; it stands apart because it is the entrance of the feature. It checks what needs nothing but
the request, the limits and the topic's policy, chooses the shards, and enforces the quotas of the daemon. Long calls
give way between steps, and an answer that says what exists, or does not, is true (R8).

The topic of a deletion need not have positions here: it only determines which shard keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from daemon.core import limits
from daemon.core.deletions import deletion_checks
from daemon.core.deletions.ledger_deletions import DeletionCounts, KindCount, ListedState, Recorded
from daemon.core.deletions.ledger_deletions import DeletionQuery as ShardFilter
from daemon.errors import InvalidArgument, QuotaExceeded
from daemon.group_commit.request_effects import RequestEffects
from daemon.ledger_deletion.deletion_values import (
    DeletionCount,
    DeletionFilter,
    DeletionPage,
    DeletionPlace,
    DeletionStats,
    InUseRecorded,
    ListedDeletion,
    RecordedDeletes,
    Refusal,
    RefusedDelete,
    SweepProgress,
    SweepWish,
)
from daemon.ledger_deletion.shard_deletions import DeletingShard
from daemon.ledger_deletion.sweeping import Sweeping
from daemon.runtime.environment import Environment
from storage_backends.crash_points import crash_point
from storage_backends.formats.deletion_format import (
    ChangeInUse,
    InUseChange,
    InUseLedgers,
    LedgerComponent,
    LedgerType,
    PendingDelete,
    PurgeDeletes,
    RecordDeletes,
    RetryDeletes,
)

PAGE_DELETIONS_DEFAULT = 100
PAGE_DELETIONS_MAX = 1_000
# Deletions that are searched, and dead letters that are decided, before others have a turn
PORTION = 200
# Records that are checked before others have a turn
CHECKED_A_TURN = 500
# A page that searches for this long ends early (seconds).
LOOK_S = 30.0
# Workers make room all the time, unless only dead letters are kept.
ROOM_RETRY_MS = 1_000
NO_PROBLEMS: Final[Mapping[int, str]] = MappingProxyType({})
NOTHING_RECORDED = Recorded((), ())
DISABLED = "two_phase_deletion_enabled is false for the topic"


class DeletingShards(Protocol):
    """The port through which calls use the engine."""

    @property
    def shards(self) -> Mapping[int, DeletingShard]:
        """The shards that are owned and served."""
        ...

    def shard_of(self, topic: str) -> DeletingShard:
        """Return the shard of a topic. Raise the caller's error while the shard is not served here."""
        ...

    def check_serving(self) -> None:
        """Raise the caller's error while nothing is served here."""
        ...


class DeletionRequests:
    """The calls of one engine.

    Those on a topic raise NotOwner, Unavailable and Corruption, and OutcomeUnknown if the result may or may not be
    durable.
    """

    def __init__(self, engine: DeletingShards, environment: Environment, *, shards_total: Callable[[], int]) -> None:
        self._engine = engine
        self._environment = environment
        self._settings = environment.config.deletion
        self.sweeping = Sweeping(environment, lambda: engine.shards, shards_total, self.record_orphans)

    # ---- records

    async def record_pending_deletes(
        self,
        topic: str,
        deletes: Sequence[PendingDelete],
        *,
        problems: Mapping[int, str] = NO_PROBLEMS,
    ) -> RecordedDeletes:
        """Record deletes of a topic and return when they are durable.

        `problems` describes the unreadable deletes, by their places in the request; `deletes` are the others, in order.
        Raises InvalidArgument, QuotaExceeded.
        """
        self._check_topic(topic)
        good, refused = await _checked(deletes, problems)
        shard = self._engine.shard_of(topic)
        recorded: Recorded | None = NOTHING_RECORDED
        if good:
            recorded = await self._record(shard, topic, tuple(good.values()), RequestEffects())
        if recorded is None:
            refused |= {place: RefusedDelete(place, Refusal.DISABLED, DISABLED) for place in good}
            good, recorded = {}, NOTHING_RECORDED
        places = list(good)
        return RecordedDeletes(
            recorded=len(good),
            already_recorded=tuple(places[place] for place in recorded.already),
            refused=tuple(refused[place] for place in sorted(refused)),
        )

    async def record_orphans(
        self, topic: str, deletes: Sequence[PendingDelete], effects: RequestEffects
    ) -> Recorded | None:
        """Record well-formed deletes that a sweep with these effects found, and return when they are durable.

        Returns None if the topic's policy disables deletion.
        """
        return await self._record(self._engine.shard_of(topic), topic, tuple(deletes), effects, by_sweeper=True)

    async def _record(
        self,
        shard: DeletingShard,
        topic: str,
        deletes: tuple[PendingDelete, ...],
        effects: RequestEffects,
        *,
        by_sweeper: bool = False,
    ) -> Recorded | None:
        """Record deletes. Return None if the topic's policy disables them."""
        settings = await shard.settings_of(topic)
        enabled = self._settings.two_phase_deletion_enabled
        if settings is not None:
            enabled = bool(settings.effective.two_phase_deletion_enabled)
        if not enabled:
            await shard.slots.confirmed()
            return None
        self._check_pending(len(deletes))
        record = RecordDeletes(topic, self._environment.clock.now_ms(), deletes, by_sweeper)
        recorded = await shard.deletions.record(record, effects)
        crash_point("deletion.after_record")
        return recorded

    def _check_pending(self, deletes: int) -> None:
        kept, kept_max = sum(shard.deletions.kept for shard in self._engine.shards.values()), self._settings.pending_max
        if kept + deletes > kept_max:
            raise QuotaExceeded(
                f"deletion.pending_max is {kept_max}; {kept} deletions are pending, dead letters or held as their "
                f"ledgers are in use, and the request has {deletes}",
                retry_after_ms=None if deletes > kept_max else ROOM_RETRY_MS,
            )

    # ---- in use

    async def record_in_use(self, topic: str, ledgers: InUseLedgers, *, replace: bool) -> InUseRecorded:
        """Record ledgers as in use; return when that is in force.

        With `replace`, no others of their type are in use. Raises InvalidArgument, QuotaExceeded.
        """
        self._check_ledgers(topic, ledgers, least=0 if replace else 1)
        shard = self._engine.shard_of(topic)
        in_use = shard.deletions.state.in_use
        replaced = in_use.ledgers_of(topic, ledgers.ledger_type) if replace else 0
        self._check_in_use(len(ledgers) - replaced)
        change = InUseChange.REPLACE if replace else InUseChange.RECORD
        changed = await shard.deletions.change_in_use(ChangeInUse(topic, change, ledgers))
        return InUseRecorded(len(ledgers) - len(changed.being_deleted), changed.being_deleted)

    async def forget_in_use(self, topic: str, ledgers: InUseLedgers) -> int:
        """Record that ledgers are no longer in use; return how many were.

        Raise InvalidArgument if the request is invalid.
        """
        self._check_ledgers(topic, ledgers, least=1)
        shard = self._engine.shard_of(topic)
        changed = await shard.deletions.change_in_use(ChangeInUse(topic, InUseChange.FORGET, ledgers))
        return changed.changed

    def _check_ledgers(self, topic: str, ledgers: InUseLedgers, *, least: int) -> None:
        self._check_topic(topic)
        rows_max = self._environment.request_limits.rows_max
        if not least <= len(ledgers) <= rows_max:
            raise InvalidArgument(f"ledger_id has {len(ledgers)} rows; a request must have {least} to {rows_max}")

    def _check_in_use(self, ledgers: int) -> None:
        shards, in_use_max = self._engine.shards.values(), self._settings.in_use_max
        in_use = sum(shard.deletions.ledgers_in_use for shard in shards)
        if ledgers > 0 and in_use + ledgers > in_use_max:
            raise QuotaExceeded(
                f"deletion.in_use_max is {in_use_max}; {in_use} ledgers are in use, and the request has {ledgers} more",
                retry_after_ms=None,
            )

    # ---- reading

    async def list_deletes(
        self, state: ListedState, wanted: DeletionFilter, page_size: int, after: DeletionPlace | None
    ) -> DeletionPage:
        """Return a page of matching deletions after the place `after`, the `next_after` of the page before."""
        if not 0 <= page_size <= PAGE_DELETIONS_MAX:
            raise InvalidArgument(f"page_size is {page_size}; it must be 0 to {PAGE_DELETIONS_MAX}")
        limit, clock = page_size or PAGE_DELETIONS_DEFAULT, self._environment.clock
        as_of_ms, until_s = clock.now_ms(), clock.elapsed_s() + LOOK_S
        found: list[ListedDeletion] = []
        place = after or DeletionPlace(0, 0)
        for shard in self._shards_of(wanted):
            if shard.number < place.shard:
                continue
            after_id: int | None = place.deletion_id if shard.number == place.shard else 0
            while after_id is not None:
                if len(found) == limit or clock.elapsed_s() > until_s:
                    return DeletionPage(tuple(found), DeletionPlace(shard.number, after_id), as_of_ms)
                here, portion = _in_shard(wanted, shard.number), min(limit - len(found), PORTION)
                deletions, after_id = shard.deletions.state.page(state, here, after_id, portion)
                found += (ListedDeletion(shard.number, deletion) for deletion in deletions)
                await asyncio.sleep(0)
        return DeletionPage(tuple(found), None, as_of_ms)

    def _shards_of(self, wanted: DeletionFilter) -> list[DeletingShard]:
        """Return the shards that may have matching deletions, by number.

        Raise the caller's error while nothing is served.
        """
        if wanted.topic:
            self._check_topic(wanted.topic)
            return [self._engine.shard_of(wanted.topic)]
        self._engine.check_serving()
        shards = [self._engine.shards[number] for number in sorted(self._engine.shards)]
        if wanted.deletions is None:
            return shards
        named = {place.shard for place in wanted.deletions}
        return [shard for shard in shards if shard.number in named]

    async def stats(self, topic: str) -> DeletionStats:
        """Count the deletions of the topic, or of all topics if the name is empty."""
        as_of_ms = self._environment.clock.now_ms()
        if topic:
            self._check_topic(topic)
            state = self._engine.shard_of(topic).deletions.state
            cut, in_use = state.cut(), state.in_use.ledgers_of(topic)
            counts = [] if cut is None else [await self._environment.run(lambda: cut.counts(topic))]
            return _stats(counts, in_use, as_of_ms)
        self._engine.check_serving()
        states = [shard.deletions.state for shard in self._engine.shards.values()]
        return _stats([state.counts for state in states], sum(state.in_use.ledgers for state in states), as_of_ms)

    # ---- sweeps

    def sweep(self, wish: SweepWish) -> AsyncGenerator[SweepProgress]:
        """Search an object store for orphaned offloaded ledgers, step by step; see `sweeping`."""
        self._engine.check_serving()
        return self.sweeping.sweep(wish)

    # ---- dead letters

    async def retry_dead(self, wanted: DeletionFilter, *, all: bool) -> int:
        """Retry dead letters at once; return how many when that is durable.

        Raise InvalidArgument for an empty filter.
        """
        retried = 0
        with RequestEffects() as effects:
            for shard in self._shards_to_change(wanted, all):
                async for ids in self._dead(shard, wanted):
                    decided = await shard.deletions.retry(RetryDeletes(self._environment.clock.now_ms(), ids), effects)
                    retried += decided.retried
        return retried

    async def purge_dead(self, wanted: DeletionFilter, *, all: bool) -> int:
        """Forget dead letters; return how many when that is durable. Raise InvalidArgument for an empty filter."""
        purged = 0
        with RequestEffects() as effects:
            for shard in self._shards_to_change(wanted, all):
                async for ids in self._dead(shard, wanted):
                    decided = await shard.deletions.purge(PurgeDeletes(ids), effects)
                    purged += decided.purged
        return purged

    def _shards_to_change(self, wanted: DeletionFilter, all: bool) -> list[DeletingShard]:
        if wanted == DeletionFilter() and not all:
            raise InvalidArgument("filter is empty, and all is false; give one of them")
        return self._shards_of(wanted)

    async def _dead(self, shard: DeletingShard, wanted: DeletionFilter) -> AsyncIterator[tuple[int, ...]]:
        """Yield ids of dead letters of the shard, in portions; if there are none, confirm the ownership instead."""
        here, found = _in_shard(wanted, shard.number), False
        after_id: int | None = 0
        while after_id is not None:
            ids, after_id = shard.deletions.state.dead_ids(here, after_id, PORTION)
            if ids:
                found = True
                yield tuple(ids)
            await asyncio.sleep(0)
        if not found:
            await shard.slots.confirmed()

    def _check_topic(self, topic: str) -> None:
        limits.check_name("topic", topic, self._environment.request_limits.topic_max_bytes)
        deletion_checks.check_topic(topic)


async def _checked(
    deletes: Sequence[PendingDelete], problems: Mapping[int, str]
) -> tuple[dict[int, PendingDelete], dict[int, RefusedDelete]]:
    """Return (deletes that may be recorded, refused ones), by place. Raise InvalidArgument if there are too many."""
    count = len(deletes) + len(problems)
    if not 1 <= count <= deletion_checks.DELETES_MAX:
        raise InvalidArgument(f"deletes has {count} records; a request must have 1 to {deletion_checks.DELETES_MAX}")
    good: dict[int, PendingDelete] = {}
    refused = {place: RefusedDelete(place, Refusal.MALFORMED, text) for place, text in problems.items()}
    places = (place for place in range(count) if place not in problems)
    for place, delete in zip(places, deletes, strict=True):
        if place % CHECKED_A_TURN == CHECKED_A_TURN - 1:
            await asyncio.sleep(0)
        try:
            deletion_checks.check_pending_delete(delete)
        except InvalidArgument as error:
            refused[place] = RefusedDelete(place, Refusal.MALFORMED, str(error))
        else:
            good[place] = delete
    return good, refused


def _in_shard(wanted: DeletionFilter, shard: int) -> ShardFilter:
    ids = wanted.deletions
    return ShardFilter(
        topic=wanted.topic,
        component=wanted.component,
        ledger_type=wanted.ledger_type,
        ledger_id=wanted.ledger_id,
        deletion_ids=None if ids is None else frozenset(place.deletion_id for place in ids if place.shard == shard),
    )


def _stats(counts: Sequence[DeletionCounts], in_use: int, as_of_ms: int) -> DeletionStats:
    """Add up the counts of several shards."""
    by_kind: dict[tuple[LedgerComponent, LedgerType], list[KindCount]] = {}
    for of_shard in counts:
        for kind in of_shard.kinds:
            by_kind.setdefault((kind.component, kind.ledger_type), []).append(kind)
    return DeletionStats(
        in_flight=sum(each.in_flight for each in counts),
        begun=sum(each.begun for each in counts),
        oldest_ms=_oldest_ms(each.oldest_ms for each in counts),
        given_up=sum(each.dead for each in counts),
        held=sum(each.held for each in counts),
        in_use=in_use,
        counts=tuple(
            DeletionCount(
                component,
                ledger_type,
                in_flight=sum(kind.in_flight for kind in kinds),
                oldest_ms=_oldest_ms(kind.oldest_ms for kind in kinds),
                given_up=sum(kind.dead for kind in kinds),
                held=sum(kind.held for kind in kinds),
            )
            for (component, ledger_type), kinds in sorted(by_kind.items())
        ),
        as_of_ms=as_of_ms,
    )


def _oldest_ms(times: Iterable[int]) -> int:
    """Return the earliest time that is not 0 (Unix ms); 0 if all are."""
    return min((time for time in times if time), default=0)
