"""The deletions of a shard, told plainly: a list of records that is searched from end to end at every question.

Owns: the rules, written a second time, from what is said of them and without the product's code.
"""

from __future__ import annotations

import dataclasses

from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    DeletionOutcome,
    DeletionRecord,
    InUseChange,
    InUseLedgers,
    LedgerType,
    PendingDelete,
    PurgeDeletes,
    RecordDeletes,
    RetryDeletes,
)

Uuid = tuple[int, int]
NO_UUID: Uuid = (0, 0)
WAITING, BEGUN, DEAD, HELD, ENDED = "WAITING", "BEGUN", "DEAD", "HELD", "ENDED"
ENDS = {
    DeletionOutcome.DELETED,
    DeletionOutcome.ALREADY_GONE,
    DeletionOutcome.IN_USE,
    DeletionOutcome.METADATA_MISMATCH,
    DeletionOutcome.MALFORMED,
}


@dataclasses.dataclass
class Told:
    """One deletion."""

    number: int
    topic: str
    delete: PendingDelete
    recorded_at_ms: int
    by_sweeper: bool
    due_ms: int
    state: str = WAITING
    outcome: DeletionOutcome = DeletionOutcome.PENDING
    failures: int = 0
    maybe_deleted: bool = False
    ended_at_ms: int = 0
    text: str = ""

    @property
    def uuid(self) -> Uuid | None:
        context = self.delete.offload_context
        return None if context is None else (context.uuid_msb, context.uuid_lsb)

    def is_of(self, topic: str, ledger_type: LedgerType, ledger_id: int, uuid: Uuid) -> bool:
        """Whether it is a deletion of that ledger, as an owner names it."""
        return (self.topic, self.delete.ledger_type, self.delete.ledger_id) == (topic, ledger_type, ledger_id) and (
            uuid == NO_UUID or self.uuid is None or self.uuid == uuid
        )

    def end(self, outcome: DeletionOutcome, at_ms: int, text: str) -> None:
        self.state, self.outcome, self.ended_at_ms, self.text = ENDED, outcome, at_ms, text


class Oracle:
    def __init__(self, ended_kept: int) -> None:
        self.ended_kept = ended_kept
        self.given = 0
        self.told: list[Told] = []
        # Topics of which anything was said, in the order in which they came.
        self.in_use: dict[str, set[tuple[LedgerType, int, Uuid]]] = {}
        # Topics and types of which all was said.
        self.complete: set[tuple[str, LedgerType]] = set()

    def apply(self, record: DeletionRecord) -> object:
        """What the product's result says, as plain values."""
        match record:
            case RecordDeletes():
                return [self.record(record, delete) for delete in record.deletes]
            case BeginDeletes():
                return {number: self.begin(number, record.at_ms) for number in sorted(set(record.deletion_id))}
            case AnswerDeletes():
                return [
                    (answer.deletion_id, self.answer(answer.deletion_id, answer.outcome, answer))
                    for answer in record.answers
                ]
            case RetryDeletes():
                return sum(self.retry(number, record.at_ms) for number in set(record.deletion_id))
            case PurgeDeletes():
                return sum(self.purge(number) for number in set(record.deletion_id))
            case ChangeInUse():
                return self.say(record.topic, record.change, record.ledgers)

    def find(self, number: int, *states: str) -> Told | None:
        return next((told for told in self.told if told.number == number and told.state in states), None)

    def record(self, record: RecordDeletes, delete: PendingDelete) -> int | None:
        """Its number; None when it is there."""
        for told in self.told:
            if told.topic == record.topic and told.delete == delete and told.state != ENDED:
                return None
        self.given += 1
        at_ms = record.recorded_at_ms
        self.told.append(Told(self.given, record.topic, delete, at_ms, record.by_sweeper, at_ms))
        return self.given

    def begin(self, number: int, at_ms: int) -> str | None:
        told = self.find(number, WAITING, BEGUN)
        if told is None:
            return None
        if told.state == WAITING and not told.maybe_deleted and self.is_in_use(told.topic, told.delete):
            told.end(DeletionOutcome.IN_USE, at_ms, "recorded as in use")
            told.state = HELD
            return "in use"
        told.maybe_deleted = told.maybe_deleted or told.state == BEGUN
        told.state = BEGUN
        return "attempt"

    def answer(self, number: int, outcome: DeletionOutcome, answer: object) -> str | None:
        told = self.find(number, BEGUN)
        if told is None or outcome is DeletionOutcome.PENDING:
            return None
        at_ms, text = answer.at_ms, answer.text  # type: ignore[attr-defined]
        if outcome in ENDS:
            told.end(outcome, at_ms, text)
            self.forget_the_first_ended()
            return "ended"
        told.failures += 1
        told.maybe_deleted = told.maybe_deleted or answer.maybe_deleted  # type: ignore[attr-defined]
        told.text = text
        if outcome is DeletionOutcome.FAILED:
            told.state, told.due_ms = WAITING, answer.retry_at_ms  # type: ignore[attr-defined]
            return "failed"
        told.state, told.outcome, told.ended_at_ms = DEAD, DeletionOutcome.GIVEN_UP, at_ms
        return "given up"

    def retry(self, number: int, at_ms: int) -> int:
        told = self.find(number, DEAD)
        if told is None:
            return 0
        told.state, told.outcome, told.failures = WAITING, DeletionOutcome.PENDING, 0
        told.recorded_at_ms = told.due_ms = at_ms
        told.ended_at_ms = 0
        return 1

    def purge(self, number: int) -> int:
        told = self.find(number, DEAD)
        if told is None:
            return 0
        self.told.remove(told)
        return 1

    def forget_the_first_ended(self) -> None:
        ended = sorted((told.ended_at_ms, told.number) for told in self.told if told.state == ENDED)
        for _, number in ended[: max(0, len(ended) - self.ended_kept)]:
            self.told = [told for told in self.told if told.number != number]

    # ---- in use

    def say(self, topic: str, change: InUseChange, ledgers: InUseLedgers) -> tuple[int, list[int], int]:
        """How many ledgers that changes, places of those that are too late, and how many deletions come back."""
        if change is InUseChange.FORGET and topic not in self.in_use:
            return 0, [], 0
        before = self.in_use.setdefault(topic, set())
        kind = ledgers.ledger_type
        named = [
            (int(ledger_id), (int(msb), int(lsb)))
            for ledger_id, msb, lsb in zip(ledgers.ledger_id, ledgers.uuid_msb, ledgers.uuid_lsb, strict=True)
        ]
        late: list[int] = []
        after = set(before)
        if change is InUseChange.FORGET:
            after -= {(kind, *row) for row in named}
        elif change is not InUseChange.COMPLETE:
            late = [place for place, row in enumerate(named) if self.is_late(topic, kind, *row)]
            if change is InUseChange.REPLACE:
                after = {row for row in before if row[0] is not kind}
            after |= {(kind, *row) for place, row in enumerate(named) if place not in late}
        if change in (InUseChange.REPLACE, InUseChange.COMPLETE):
            self.complete.add((topic, kind))
        self.in_use[topic] = after
        return len(after ^ before), late, self.let_come_back()

    def let_come_back(self) -> int:
        free = [told for told in self.told if told.state == HELD and not self.is_in_use(told.topic, told.delete)]
        for told in free:
            told.state, told.outcome, told.due_ms, told.ended_at_ms = WAITING, DeletionOutcome.PENDING, 0, 0
        return len(free)

    def is_late(self, topic: str, kind: LedgerType, ledger_id: int, uuid: Uuid) -> bool:
        return any(
            told.is_of(topic, kind, ledger_id, uuid)
            and (told.state == BEGUN or (told.state in (WAITING, DEAD) and told.maybe_deleted))
            for told in self.told
        )

    def is_in_use(self, topic: str, delete: PendingDelete) -> bool:
        asked = Told(0, topic, delete, 0, False, 0)
        return any(asked.is_of(topic, *row) for row in self.in_use.get(topic, ()))
