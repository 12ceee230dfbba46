"""Makes plans of the unary calls of two-phase deletion, and the request of a sweep.

Separate from `tarry.calls`, whose part it is, because these calls serve owners of ledgers rather than dispatchers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tarry import attempts, columns, deletions, errors
from tarry.v1 import ledger_deletion_pb2

RECORD_PENDING_DELETES = attempts.Method(
    "/tarry.v1.LedgerDeletion/RecordPendingDeletes", ledger_deletion_pb2.RecordPendingDeletesResponse.FromString
)
RECORD_IN_USE = attempts.Method(
    "/tarry.v1.LedgerDeletion/RecordInUse", ledger_deletion_pb2.RecordInUseResponse.FromString
)
FORGET_IN_USE = attempts.Method(
    "/tarry.v1.LedgerDeletion/ForgetInUse", ledger_deletion_pb2.ForgetInUseResponse.FromString
)
LIST_PENDING_DELETES = attempts.Method(
    "/tarry.v1.LedgerDeletion/ListPendingDeletes", ledger_deletion_pb2.ListPendingDeletesResponse.FromString
)
LIST_DEAD_DELETES = attempts.Method(
    "/tarry.v1.LedgerDeletion/ListDeadDeletes", ledger_deletion_pb2.ListDeadDeletesResponse.FromString
)
LIST_ENDED_DELETES = attempts.Method(
    "/tarry.v1.LedgerDeletion/ListEndedDeletes", ledger_deletion_pb2.ListEndedDeletesResponse.FromString
)
RETRY_DEAD_DELETES = attempts.Method(
    "/tarry.v1.LedgerDeletion/RetryDeadDeletes", ledger_deletion_pb2.RetryDeadDeletesResponse.FromString
)
PURGE_DEAD_DELETES = attempts.Method(
    "/tarry.v1.LedgerDeletion/PurgeDeadDeletes", ledger_deletion_pb2.PurgeDeadDeletesResponse.FromString
)
GET_DELETION_STATS = attempts.Method(
    "/tarry.v1.LedgerDeletion/GetDeletionStats", ledger_deletion_pb2.GetDeletionStatsResponse.FromString
)
SWEEP_ORPHANS = attempts.Method(
    "/tarry.v1.LedgerDeletion/SweepOrphans", ledger_deletion_pb2.SweepOrphansResponse.FromString
)

# The daemon's limits of a request
DELETES_MAX = 1_000
DELETION_IDS_MAX = 1_000

# Page size of a list that is read to its end: the maximum
ITERATED_PAGE_SIZE = 1_000

_Listed: TypeAlias = tuple[type[Any], attempts.Method[Any]]
PENDING: _Listed = (ledger_deletion_pb2.ListPendingDeletesRequest, LIST_PENDING_DELETES)
DEAD: _Listed = (ledger_deletion_pb2.ListDeadDeletesRequest, LIST_DEAD_DELETES)
ENDED: _Listed = (ledger_deletion_pb2.ListEndedDeletesRequest, LIST_ENDED_DELETES)
"""The list of deletions to read: the request's class and the method"""


class DeletionCalls(attempts.Planning):
    """The deletion calls of `tarry.calls.Calls`."""

    def record_pending_deletes(
        self, topic: str, deletes: Iterable[deletions.PendingDelete], *, timeout_s: float | None
    ) -> attempts.Plan[deletions.RecordedDeletes]:
        attempts.check_names(topic)
        given = tuple(deletes)
        # Encode all before the first is sent, so that one that cannot be sent refuses the whole.
        messages = [_message(index, each) for index, each in enumerate(given)]
        asking = self.asking(timeout_s)
        answers = []
        for rows in _portions(messages, self.bytes_max):
            request = ledger_deletion_pb2.RecordPendingDeletesRequest(topic=topic, deletes=messages[rows])
            message = yield from asking.ask(RECORD_PENDING_DELETES, request.SerializeToString(), topic=topic)
            answers.append(deletions.RecordedDeletes.from_message(message, given[rows]))
        return deletions.RecordedDeletes.merge(answers)

    def record_in_use(
        self,
        topic: str,
        ledger_id: columns.Column,
        *,
        ledger_type: deletions.LedgerType,
        uuid: deletions.UuidColumn | None,
        replace: bool,
        timeout_s: float | None,
    ) -> attempts.Plan[deletions.InUseRecorded]:
        requests = list(self._in_use(topic, ledger_id, ledger_type, uuid))
        if replace and len(requests) > 1:
            raise errors.InvalidArgument(
                f"ledger_id has {sum(len(rows) for _, rows in requests)} ledgers; with replace they are one request, "
                f"and it may have {len(requests[0][1])}"
            )
        asking = self.asking(timeout_s)
        answers = []
        for fields, rows in requests:
            request = ledger_deletion_pb2.RecordInUseRequest(**fields, replace=replace)
            message = yield from asking.ask(RECORD_IN_USE, request.SerializeToString(), topic=topic)
            answers.append((rows.start, deletions.InUseRecorded.from_message(message)))
        return deletions.InUseRecorded.merge(answers)

    def forget_in_use(
        self,
        topic: str,
        ledger_id: columns.Column,
        *,
        ledger_type: deletions.LedgerType,
        uuid: deletions.UuidColumn | None,
        timeout_s: float | None,
    ) -> attempts.Plan[int]:
        requests = list(self._in_use(topic, ledger_id, ledger_type, uuid))
        asking = self.asking(timeout_s)
        forgotten = 0
        for fields, _ in requests:
            request = ledger_deletion_pb2.ForgetInUseRequest(**fields)
            message = yield from asking.ask(FORGET_IN_USE, request.SerializeToString(), topic=topic)
            forgotten += message.forgotten
        return forgotten

    def deletions_page(
        self,
        listed: _Listed,
        which: deletions.DeletionFilter | None,
        page_token: str,
        *,
        page_size: int,
        timeout_s: float | None,
    ) -> attempts.Plan[deletions.DeletionPage]:
        columns.check_unsigned("page_size", page_size, bits=32)
        (wanted,) = _filters(which, ids_max=2**32)
        request_of, method = listed
        request = request_of(filter=wanted, page_size=page_size, page_token=page_token)
        asking = self.asking(timeout_s)
        message = yield from asking.ask(method, request.SerializeToString(), topic=wanted.topic or None)
        return deletions.DeletionPage.from_message(message)

    def retry_dead_deletes(
        self, which: deletions.DeletionFilter | None, *, timeout_s: float | None
    ) -> attempts.Plan[int]:
        asking = self.asking(timeout_s)
        retried = 0
        for wanted in _filters(which, DELETION_IDS_MAX):
            request = ledger_deletion_pb2.RetryDeadDeletesRequest(filter=wanted, all=which is None)
            message = yield from asking.ask(RETRY_DEAD_DELETES, request.SerializeToString(), topic=wanted.topic or None)
            retried += message.retried
        return retried

    def purge_dead_deletes(
        self, which: deletions.DeletionFilter | None, *, timeout_s: float | None
    ) -> attempts.Plan[int]:
        asking = self.asking(timeout_s)
        purged = 0
        for wanted in _filters(which, DELETION_IDS_MAX):
            request = ledger_deletion_pb2.PurgeDeadDeletesRequest(filter=wanted, all=which is None)
            message = yield from asking.ask(PURGE_DEAD_DELETES, request.SerializeToString(), topic=wanted.topic or None)
            purged += message.purged
        return purged

    def deletion_stats(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[deletions.DeletionStats]:
        attempts.check_names(topic)
        request = ledger_deletion_pb2.GetDeletionStatsRequest(topic=topic)
        asking = self.asking(timeout_s)
        message = yield from asking.ask(GET_DELETION_STATS, request.SerializeToString(), topic=topic or None)
        return deletions.DeletionStats.from_message(message)

    def sweep_orphans(
        self,
        store: str,
        *,
        prefix: str,
        grace_ms: int | None,
        delete: bool,
        unknown_topics: bool,
        force: bool,
        timeout_s: float | None,
    ) -> attempts.Plan[attempts.Send]:
        """Plan a call as `tarry.calls.Calls.collect_garbage` does. Raises InvalidArgument at once."""
        columns.check_unsigned("grace_ms", grace_ms or 0, bits=64)
        try:
            request = ledger_deletion_pb2.SweepOrphansRequest(
                store=store, prefix=prefix, grace_ms=grace_ms, delete=delete, unknown_topics=unknown_topics, force=force
            )
        except (TypeError, ValueError) as wrong:
            raise errors.InvalidArgument(f"store is {store!r}, prefix {prefix!r}: {wrong}") from wrong
        return self.once(SWEEP_ORPHANS, request.SerializeToString(), timeout_s)

    def _in_use(
        self,
        topic: str,
        ledger_id: columns.Column,
        ledger_type: deletions.LedgerType,
        uuid: deletions.UuidColumn | None,
    ) -> Iterator[tuple[dict[str, Any], range]]:
        """Yield the fields of each request with the range of its ledgers.

        Yields at least one, because an empty list of ledgers is a statement too.
        """
        attempts.check_names(topic)
        ledgers = columns.u64("ledger_id", ledger_id)
        halves = _uuid_columns(uuid, len(ledgers))
        row_bytes = ledgers.itemsize * (1 + len(halves))
        step = columns.rows_per_request(row_bytes, self.rows_max, self.bytes_max)
        for first in range(0, max(1, len(ledgers)), step):
            rows = range(first, min(first + step, len(ledgers)))
            cut = slice(rows.start, rows.stop)
            uuids = {name: (half if len(half) == 1 else half[cut]).tolist() for name, half in halves.items()}
            yield {"topic": topic, "ledger_type": ledger_type, "ledger_id": ledgers[cut].tolist(), **uuids}, rows


def _message(index: int, delete: deletions.PendingDelete) -> ledger_deletion_pb2.PendingDelete:
    """Encode a deletion. Raises InvalidArgument if a field cannot hold a value."""
    columns.check_unsigned(f"ledger_id of deletion {index}", delete.ledger_id, bits=64)
    try:
        return delete.to_message()
    except (TypeError, ValueError, AttributeError) as wrong:
        raise errors.InvalidArgument(f"deletion {index} is {delete!r}; a field cannot hold it: {wrong}") from wrong


def _portions(messages: Sequence[ledger_deletion_pb2.PendingDelete], bytes_max: int) -> Iterator[slice]:
    """Yield the slices that form one request each, within the limits of rows and bytes."""
    first, size_bytes = 0, 0
    for index, message in enumerate(messages):
        # Room for its tag and length
        message_bytes = message.ByteSize() + 10
        full = index - first == DELETES_MAX or size_bytes + message_bytes > bytes_max - columns.REQUEST_OVERHEAD_BYTES
        if full and index > first:
            yield slice(first, index)
            first, size_bytes = index, 0
        size_bytes += message_bytes
    if first < len(messages):
        yield slice(first, len(messages))


def _uuid_columns(uuid: deletions.UuidColumn | None, ledgers: int) -> dict[str, NDArray[np.uint64]]:
    """Return the halves of the UUIDs by field name, empty without a UUID. Raises InvalidArgument."""
    if uuid is None:
        return {}
    given = list(uuid) if isinstance(uuid, Sequence) else [uuid]
    if isinstance(uuid, Sequence) and len(given) != ledgers:
        raise errors.InvalidArgument(f"uuid has {len(given)} rows; it must have {ledgers}, as ledger_id")
    try:
        halves = np.array([deletions.uuid_halves(each) for each in given], np.uint64).reshape(-1, 2)
    except (AttributeError, TypeError) as wrong:
        raise errors.InvalidArgument(f"uuid must be one uuid.UUID, or one or None for each ledger: {wrong}") from wrong
    return {"uuid_msb": halves[:, 0], "uuid_lsb": halves[:, 1]}


def _filters(which: deletions.DeletionFilter | None, ids_max: int) -> list[ledger_deletion_pb2.DeletionFilter]:
    """Return filters with at most `ids_max` ids each; one filter if no ids are named. Raises InvalidArgument."""
    which = which or deletions.DeletionFilter()
    attempts.check_names(which.topic or "")
    columns.check_unsigned("ledger_id", which.ledger_id or 0, bits=64)
    others: dict[str, Any] = {
        "topic": which.topic or "",
        "component": which.component or 0,
        "ledger_type": which.ledger_type or 0,
        "ledger_id": which.ledger_id,
    }
    if which.deletion_ids is None:
        return [ledger_deletion_pb2.DeletionFilter(**others)]
    # A text is also a sequence of texts.
    if isinstance(which.deletion_ids, str) or not all(isinstance(each, str) for each in which.deletion_ids):
        raise errors.InvalidArgument(f"deletion_ids is {which.deletion_ids!r}; it must be a list of texts")
    ids = list(dict.fromkeys(which.deletion_ids))
    if not ids:
        raise errors.InvalidArgument("deletion_ids names no deletion; leave it out for all")
    return [
        ledger_deletion_pb2.DeletionFilter(deletion_id=ids[first : first + ids_max], **others)
        for first in range(0, len(ids), ids_max)
    ]
