"""What is true of deletions of ledgers: what the slots of each shard came to, one decision after the other, in dicts.

Owns: the naive reading of decisions on deletions, and the rules that hold between them: nothing is recorded that nobody
asked for, no attempt begins before its time, and one that fails is tried again as the settings say.
Does not own: which slots there are (`oracle`), and the objects that are deleted (`offloaded`).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from daemon.settings import DeletionSettings as Settings
from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    DeletionAnswer,
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

# A ledger: its number, and the halves of its UUID, both 0 when there is none.
Ledger = tuple[int, int, int]


class Standing(enum.Enum):
    """The progress of a deletion."""

    WAITING = "waiting"
    BEGUN = "begun"
    # Its ledger is in use: it ended, and waits again when that is taken back.
    HELD = "held"
    DEAD = "dead"
    ENDED = "ended"
    PURGED = "purged"


OVER = (Standing.ENDED, Standing.PURGED)


@dataclasses.dataclass(slots=True, eq=False)
class Recorded:
    """A deletion. `begun_at_ms`: when its attempts began. `failed`: what came of those that failed."""

    number: int
    topic: str
    delete: PendingDelete
    standing: Standing = Standing.WAITING
    outcome: DeletionOutcome = DeletionOutcome.PENDING
    failures: int = 0
    maybe_deleted: bool = False
    next_attempt_at_ms: int = 0
    begun_at_ms: list[int] = dataclasses.field(default_factory=list)
    failed: list[DeletionAnswer] = dataclasses.field(default_factory=list)

    def is_of(self, topic: str, ledger_type: LedgerType, ledger: Ledger) -> bool:
        """A ledger without a UUID is the one of whatever UUID."""
        if (self.topic, self.delete.ledger_type) != (topic, ledger_type) or self.delete.ledger_id != ledger[0]:
            return False
        own = ledger_of(self.delete)
        return not any(own[1:]) or not any(ledger[1:]) or own == ledger

    @property
    def may_delete(self) -> bool:
        """Something of it is deleted, may have been, or may be yet."""
        return self.standing is Standing.BEGUN or (self.maybe_deleted and self.standing not in OVER)


def ledger_of(delete: PendingDelete) -> Ledger:
    context = delete.offload_context
    return (delete.ledger_id, 0, 0) if context is None else (delete.ledger_id, context.uuid_msb, context.uuid_lsb)


def ledgers_of(columns: InUseLedgers) -> list[Ledger]:
    return list(zip(columns.ledger_id.tolist(), columns.uuid_msb.tolist(), columns.uuid_lsb.tolist(), strict=True))


class ShardDeletions:
    """What the slots of one shard came to. `breach`: is told of a rule that was broken."""

    def __init__(self, settings: Settings, breach: Callable[[str], None]) -> None:
        self.recorded: dict[int, Recorded] = {}
        self.in_use: defaultdict[tuple[str, LedgerType], set[Ledger]] = defaultdict(set)
        self.asked: set[tuple[str, PendingDelete]] = set()
        """What somebody asked to be recorded."""
        self._settings = settings
        self._breach = breach

    def of(self, topic: str, delete: PendingDelete) -> Recorded | None:
        """The last one that was recorded of it."""
        same = [each for each in self.recorded.values() if (each.topic, each.delete) == (topic, delete)]
        return same[-1] if same else None

    def of_ledger(self, ledger: Ledger) -> Iterator[Recorded]:
        """Of an offloaded ledger, whoever recorded it."""
        return (each for each in self.recorded.values() if ledger_of(each.delete) == ledger)

    def landed(self, record: DeletionRecord) -> None:
        """A decision of a slot, in their order."""
        match record:
            case RecordDeletes():
                self._record(record)
            case BeginDeletes():
                for one in self._named(record.deletion_id):
                    self._begin(one, record.at_ms)
            case AnswerDeletes():
                for answer in record.answers:
                    for one in self._named((answer.deletion_id,)):
                        self._answer(one, answer)
            case RetryDeletes():
                for one in self._named(record.deletion_id):
                    if one.standing is Standing.DEAD:
                        self._wait(one, record.at_ms)
                        one.failures = 0
            case PurgeDeletes():
                for one in self._named(record.deletion_id):
                    if one.standing is Standing.DEAD:
                        one.standing = Standing.PURGED
            case ChangeInUse():
                self._change_in_use(record)

    def _named(self, numbers: Iterable[int]) -> Iterator[Recorded]:
        for number in numbers:
            if number in self.recorded:
                yield self.recorded[number]
            else:
                self._breach(f"a slot names deletion {number}, and there are {len(self.recorded)}")

    def _record(self, record: RecordDeletes) -> None:
        for delete in record.deletes:
            if (record.topic, delete) not in self.asked:
                self._breach(f"{delete} of {record.topic} is recorded and nobody asked for it")
            known = self.of(record.topic, delete)
            if known is None or known.standing in OVER:
                number = len(self.recorded) + 1
                due_ms = record.recorded_at_ms
                self.recorded[number] = Recorded(number, record.topic, delete, next_attempt_at_ms=due_ms)

    def _begin(self, one: Recorded, at_ms: int) -> None:
        if one.standing not in (Standing.WAITING, Standing.BEGUN):
            return
        if one.standing is Standing.WAITING and self.is_in_use(one) and not one.maybe_deleted:
            one.standing, one.outcome = Standing.HELD, DeletionOutcome.IN_USE
            return
        if one.standing is Standing.WAITING and at_ms < one.next_attempt_at_ms:
            self._breach(f"{_name(one)} is attempted at {at_ms}, which was to be at {one.next_attempt_at_ms}")
        # What became of a former attempt, nobody knows.
        one.maybe_deleted |= one.standing is Standing.BEGUN
        one.standing = Standing.BEGUN
        one.begun_at_ms.append(at_ms)

    def is_in_use(self, one: Recorded) -> bool:
        stated = self.in_use.get((one.topic, one.delete.ledger_type), set())
        return any(one.is_of(one.topic, one.delete.ledger_type, ledger) for ledger in stated)

    def _answer(self, one: Recorded, answer: DeletionAnswer) -> None:
        if one.standing is not Standing.BEGUN:
            self._breach(f"{_name(one)} is answered {answer.outcome.name}, and no attempt has begun")
            return
        if answer.outcome in (DeletionOutcome.FAILED, DeletionOutcome.GIVEN_UP):
            self._failed(one, answer)
            return
        held = answer.outcome is DeletionOutcome.IN_USE and self.is_in_use(one)
        one.standing, one.outcome = Standing.HELD if held else Standing.ENDED, answer.outcome

    def _failed(self, one: Recorded, answer: DeletionAnswer) -> None:
        one.failures += 1
        one.failed.append(answer)
        one.maybe_deleted |= answer.maybe_deleted
        last = one.failures > self._settings.max_retry_delete_count
        if last is not (answer.outcome is DeletionOutcome.GIVEN_UP):
            self._breach(f"{_name(one)} has failed {one.failures} times and is answered {answer.outcome.name}")
        if answer.outcome is DeletionOutcome.GIVEN_UP:
            one.standing, one.outcome = Standing.DEAD, answer.outcome
            return
        mean_ms = 1000 * self._settings.reconsume_later_seconds
        low, high = (mean_ms * (1 + sign * self._settings.jitter) for sign in (-1, 1))
        if not math.floor(low) <= answer.retry_at_ms - answer.at_ms <= math.ceil(high):
            self._breach(
                f"{_name(one)} failed at {answer.at_ms} and is to be tried again at {answer.retry_at_ms}, which is not "
                f"within {low:.0f} to {high:.0f} ms"
            )
        self._wait(one, answer.retry_at_ms)

    @staticmethod
    def _wait(one: Recorded, until_ms: int) -> None:
        one.standing, one.outcome, one.next_attempt_at_ms = Standing.WAITING, DeletionOutcome.PENDING, until_ms

    def _change_in_use(self, record: ChangeInUse) -> None:
        key = record.topic, record.ledgers.ledger_type
        named = set(ledgers_of(record.ledgers))
        if record.change is InUseChange.FORGET:
            self.in_use[key] -= named
        elif record.change is not InUseChange.COMPLETE:
            counted = {ledger for ledger in named if not self._is_too_late(*key, ledger)}
            self.in_use[key] = counted | (self.in_use[key] if record.change is InUseChange.RECORD else set())
        for one in self.recorded.values():
            if one.standing is Standing.HELD and not self.is_in_use(one):
                self._wait(one, 0)

    def _is_too_late(self, topic: str, ledger_type: LedgerType, ledger: Ledger) -> bool:
        return any(one.may_delete and one.is_of(topic, ledger_type, ledger) for one in self.recorded.values())


def _name(one: Recorded) -> str:
    return f"deletion {one.number} of ledger {one.delete.ledger_id} of {one.topic}"
