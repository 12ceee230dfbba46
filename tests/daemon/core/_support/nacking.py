"""Negative acknowledgements and dead letters of a `JournaledTopic`, as the engine decides them.

Owns: staging them, and what the records say, by place.
Does not own: what is right (`redelivery_oracle`, the tests), and that nothing staged names the same positions (they
commit before).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from daemon.core.backlog.dead_letter_rows import DeadLetterRows
from daemon.core.decisions.claims import Ignored, IgnoredReason
from daemon.core.decisions.nack_decisions import NackBatch, RedeliveryTerms
from daemon.core.decisions.subscription_state import SubscriptionState
from storage_backends.formats.index_ids import is_of_batch_parts
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.slot_format import AcknowledgeRecord, DeadLetterRecord, NackRecord, Record, ReplayRecord
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, claims_of, ids_of
from tests.daemon.core._support.oracle import Claim, Place
from tests.daemon.core._support.redelivery_oracle import DeadLetter, Nack


@dataclasses.dataclass(frozen=True, slots=True)
class Decided:
    """`ids`: of the dead letters; `reasons`: of what was ignored, in the order of the request."""

    nacks: dict[Place, Nack]
    dead: dict[Place, DeadLetter]
    ids: dict[Place, int]
    reasons: tuple[IgnoredReason, ...] = ()

    @property
    def ignored(self) -> int:
        return len(self.reasons)


def column(values: Iterable[int]) -> U64:
    return np.array(list(values), np.uint64)


def terms(
    now_ms: int, *, delay_ms: int | Callable[[int], int] = 0, max_count: int | None = None, bits: int = 0
) -> RedeliveryTerms:
    """`delay_ms`: by the count, or always the same."""

    def delays(counts: U32) -> U64:
        each = [delay_ms if isinstance(delay_ms, int) else delay_ms(count) for count in counts.tolist()]
        return np.array(each, np.uint64)

    return RedeliveryTerms(now_ms, delays, max_count, bits)


def stage_nack(
    topic: JournaledTopic,
    state: SubscriptionState,
    claims: Sequence[Claim],
    on: RedeliveryTerms,
    *,
    delay_ms: Sequence[int] | None = None,
    key_hash: Sequence[int] | None = None,
    reject: bool = False,
    text: str = "",
    forwarded: bool = False,
    schedule_ids: Sequence[bytes] | None = None,
) -> Decided:
    redelivery = topic.core.redelivery
    batch = NackBatch(
        claims_of(claims),
        None if delay_ms is None else np.array(delay_ms, np.uint64),
        None if key_hash is None else np.array(key_hash, np.uint32),
        reject,
        text,
        forwarded,
        ids_of(schedule_ids),
    )
    assert not redelivery.is_staged(state, batch.positions, is_forwarded=bool(batch.may_get_rows.any()))
    records, left = redelivery.stage(state, batch, on)
    ignored = Ignored.nothing()
    if len(left.positions):
        found = topic.find_in_backlog(state, redelivery.positions_to_find(state, left), any_time=True)
        more, ignored = redelivery.stage_found(state, left, found, on)
        records = (*records, *more)
    return _staged(topic, records, ignored)


def nack(
    topic: JournaledTopic,
    state: SubscriptionState,
    claims: Iterable[tuple[Position, int] | Claim],
    delay_ms: int = 0,
    *,
    max_count: int | None = None,
    bits: int = 0,
    reject: bool = False,
    text: str = "",
    forwarded: bool = False,
) -> Decided:
    """Now, and applied."""
    on = terms(topic.now_ms, delay_ms=delay_ms, max_count=max_count, bits=bits)
    decided = stage_nack(
        topic, state, [Claim(*claim) for claim in claims], on, reject=reject, text=text, forwarded=forwarded
    )
    topic.commit()
    return decided


def stage_overdue(
    topic: JournaledTopic, state: SubscriptionState, before_ms: int, on: RedeliveryTerms, limit: int
) -> Decided:
    return _staged(topic, topic.core.redelivery.stage_overdue(state, before_ms, on, limit=limit))


def stage_replay(
    topic: JournaledTopic, state: SubscriptionState, dead: DeadLetterRows, deliver_at_ms: int
) -> tuple[dict[int, Place], int]:
    """(what is delivered again, by id; how many are not)."""
    records, skipped = topic.core.dead_lettering.stage_replay(state, dead, deliver_at_ms)
    replayed: dict[int, Place] = {}
    for record in records:
        assert isinstance(record, ReplayRecord)
        assert set(record.rows.deliver_at_ms.tolist()) == {deliver_at_ms}
        replayed |= dict(zip(record.dead_letter_id.tolist(), _places(record.index_id, record.rows), strict=True))
        topic.staged.append(record)
    return replayed, skipped


def stage_purge(topic: JournaledTopic, state: SubscriptionState, ids: Iterable[int]) -> None:
    record = topic.core.dead_lettering.stage_purge(state, column(ids))
    assert record is not None
    topic.staged.append(record)


def _staged(topic: JournaledTopic, records: Iterable[Record], ignored: Ignored | None = None) -> Decided:
    reasons = () if ignored is None else tuple(map(IgnoredReason, ignored.reason.tolist()))
    decided = Decided({}, {}, {}, reasons)
    for record in records:
        topic.staged.append(record)
        if isinstance(record, NackRecord):
            times, counts = record.redeliver_at_ms.tolist(), record.redelivery_count.tolist()
            for at, time_ms, count in zip(_places(record.index_id, record.rows), times, counts, strict=True):
                assert at not in decided.nacks
                decided.nacks[at] = Nack(time_ms, count, record.added)
        elif isinstance(record, AcknowledgeRecord):
            assert is_of_batch_parts(record.index_id), "only messages of an entry that dies leave with it"
        else:
            assert isinstance(record, DeadLetterRecord)
            dead = dead_letters_of(record)
            assert not dead.keys() & decided.dead.keys()
            decided.dead.update(dead)
            decided.ids.update(zip(dead, record.dead_letter_id.tolist(), strict=True))
    return decided


def dead_letters_of(record: DeadLetterRecord) -> dict[Place, DeadLetter]:
    rows = record.rows
    key_hash = [0] * len(rows) if rows.key_hash is None else rows.key_hash.tolist()
    return {
        at: DeadLetter(at, deliver_at_ms, hashed, count, dead_at_ms, int(record.reason), record.text)
        for at, deliver_at_ms, hashed, count, dead_at_ms in zip(
            _places(record.index_id, rows),
            rows.deliver_at_ms.tolist(),
            key_hash,
            record.redelivery_count.tolist(),
            record.dead_at_ms.tolist(),
            strict=True,
        )
    }


def _places(index_id: int, rows: Rows) -> list[Place]:
    return [(index_id, *at) for at in zip(rows.ledger_id.tolist(), rows.entry_id.tolist(), strict=True)]
