"""The effects of a refused request are never seen: not before its answer, nor after, whoever owns the shard by then.

Owns: which request of a client has staged what and committed what, and the rule. A request is known by its context,
which every task and every thread that works for it inherits.
Does not own: what lands (`oracle`), what is asked (`workload`).

A row of a record is known by all that it says, in one shard and epoch: of two requests that have staged the same, the
first to stage it is the first to land.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias
from unittest import mock

from daemon.errors import OutcomeUnknown, TarryError
from daemon.group_commit.shard_slots import ShardSlots
from daemon.topic.topic_acks import NackRequests
from storage_backends.formats import manifest, record_columns, slot_format
from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    PurgeDeletes,
    RecordDeletes,
    RetryDeletes,
)
from storage_backends.formats.slot_format import DeletionRecord, GoneReason, GoneRecord, Record, SlotHeader, WaiveRecord
from tests._support.engine_fixture import Daemon
from tests.simulation.history import History
from tests.simulation.objects import positions_of

# What only requests change in the manifest of a topic.
ASKED_FOR = (
    "incarnation",
    "deleted",
    "subscriptions",
    "last_subscription_id",
    "properties_object",
    "policy",
    "delay_levels",
)

Fact: TypeAlias = tuple[object, ...]
"""What one row, position or id of a record says, the record's kind and topic included."""


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """`seen`: what of it has landed. `refusal`: of its answer, if that was one."""

    seen: list[str] = dataclasses.field(default_factory=list)
    refusal: TarryError | None = None


_request: contextvars.ContextVar[Request | None] = contextvars.ContextVar("request", default=None)


class Refusals:
    """Told of each request, of what is staged and what lands."""

    def __init__(self, history: History) -> None:
        self._history = history
        # By shard, epoch and fact: the requests that have staged it, and of whose records it has not landed.
        self._staged: dict[tuple[int, int, Fact], collections.deque[Request]] = {}

    @staticmethod
    def asked(daemon: Daemon) -> tuple[Request, contextvars.Context]:
        """A request of a client, and the context in which the daemon is to work for it."""
        request, context = Request(), daemon.context.copy()
        context.run(_request.set, request)
        return request, context

    def refused(self, request: Request, error: TarryError) -> None:
        """The request was answered with an error."""
        if isinstance(error, OutcomeUnknown):
            return
        request.refusal = error
        if request.seen:
            self._breach(request, request.seen[0])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See what each request stages."""
        append, stage_deletions, look = ShardSlots._append, ShardSlots.stage_deletions, NackRequests._look

        def appended(slots: ShardSlots, records: Sequence[Record], effects: Any) -> Any:
            appended = append(slots, records, effects)
            for record in records:
                self._stage(slots, facts_of(record))
            return appended

        def staged(slots: ShardSlots, record: DeletionRecord, **how: Any) -> Any:
            staged = stage_deletions(slots, record, **how)
            self._stage(slots, facts_of_deletions(record))
            return staged

        def looked(nacks: NackRequests) -> None:
            # The timer was set while somebody asked for something.
            _request.set(None)
            look(nacks)

        with (
            mock.patch.object(ShardSlots, "_append", appended),
            mock.patch.object(ShardSlots, "stage_deletions", staged),
            mock.patch.object(NackRequests, "_look", looked),
        ):
            yield

    def _stage(self, slots: ShardSlots, facts: Iterator[Fact]) -> None:
        request, daemon = _request.get(), Daemon.of(None)
        if request is None or not isinstance(daemon, Daemon):
            return
        shard = next((each for each in daemon.shards.values() if each.slots is slots), None)
        if shard is not None:
            for fact in facts:
                self._staged.setdefault((shard.number, shard.epoch, fact), collections.deque()).append(request)

    # ---- what lands

    def landed(self, header: SlotHeader, facts: Iterator[Fact]) -> None:
        """A section has landed that says this."""
        for fact in facts:
            requests = self._staged.get((header.shard, header.epoch, fact))
            if requests:
                self._see(requests.popleft(), f"slot {header.slot} of epoch {header.epoch} says {fact}")

    def committed(self, before: manifest.TopicManifest | None, landed: manifest.TopicManifest) -> None:
        """A manifest of a topic has landed, whose PUT was sent on behalf of the request in whose context this is."""
        request = _request.get()
        if request is None:
            return
        changed = [name for name in ASKED_FOR if before is None or getattr(before, name) != getattr(landed, name)]
        if changed:
            self._see(request, f"manifest {landed.head.number} of topic {landed.topic} has other {changed}")

    def _see(self, request: Request, what: str) -> None:
        request.seen.append(what)
        if request.refusal is not None:
            self._breach(request, what)

    def _breach(self, request: Request, what: str) -> None:
        self._history.breach(f"a request was refused with {request.refusal!r}, and has changed something: {what}")


def facts_of(record: Record) -> Iterator[Fact]:
    """What a record says; nothing if nobody asks for such records."""
    if isinstance(record, GoneRecord) and record.reason is GoneReason.NOT_OWED:
        return
    kind = (*slot_format.merge_key(record), record.topic_id)
    if isinstance(record, GoneRecord | WaiveRecord):
        columns = [positions_of(record.positions)]
    else:
        columns = [getattr(record, name).tolist() for name in record_columns.COLUMNS.get(type(record), ())]
        if not isinstance(record, slot_format.PurgeRecord):
            rows = record.rows
            columns += [column.tolist() for column in (rows.ledger_id, rows.entry_id, rows.deliver_at_ms)]
    for values in zip(*columns, strict=True):
        yield *kind, *values


def facts_of_deletions(record: DeletionRecord) -> Iterator[Fact]:
    """The same of a record on deletions of ledgers."""
    match record:
        case RecordDeletes():
            for delete in record.deletes:
                yield "record", record.topic, record.recorded_at_ms, delete
        case RetryDeletes():
            for deletion_id in record.deletion_id:
                yield "retry", record.at_ms, deletion_id
        case PurgeDeletes():
            for deletion_id in record.deletion_id:
                yield "purge", deletion_id
        case ChangeInUse():
            ledgers = record.ledgers
            columns = (ledgers.ledger_id.tolist(), ledgers.uuid_msb.tolist(), ledgers.uuid_lsb.tolist())
            for ledger in zip(*columns, strict=True):
                yield "in use", record.topic, record.change, ledgers.ledger_type, *ledger
        case BeginDeletes() | AnswerDeletes():
            return
