"""Judges what became of messages whose fate is known: see `hostile_messages`.

Pure. Arrivals are told apart by the position in their delivery id, dead letters by the position that they name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tests.relay._support.hostile_kinds import Fate
from tests.relay._support.hostile_messages import HostileMessage
from tests.relay._support.raw_messages import Arrived, Fields, Position, fields_of

DELIVERY_ID, COUNT, REASON, POSITION = (
    b"tarry-delivery-id",
    b"tarry-redelivery-count",
    b"tarry-reason",
    b"tarry-position",
)
REASON_BYTES_MAX = 512
_ID = re.compile(rb"(\d+)-(\d+)(?:\.\d+)?-\d+-(\d+)(?:-.*)?")
_POSITION = re.compile(rb"(.*)-(\d+)-(\d+)")
_ROOM = 4_096
"""What a dead letter may need beside the original (bytes)."""
_BLOCK_MAX = 65_535
"""All headers of a message of NATS (bytes)."""
_SHOWN = 300
MayRepeat = Callable[[int, int], bool]
"""Whether what came at the first time may come again at the second, both in Unix ms."""


@dataclasses.dataclass
class Record:
    """A message, and what came of it."""

    message: HostileMessage
    sent_at_ms: int
    arrivals: list[Arrived] = dataclasses.field(default_factory=list)
    dead: list[Arrived] = dataclasses.field(default_factory=list)
    dead_in_tarry: list[str] = dataclasses.field(default_factory=list)
    results: list[Arrived] = dataclasses.field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        """Whether what must become of it has done so, or something else has."""
        is_dead = bool(self.dead or self.dead_in_tarry)
        if self.message.fails:
            return is_dead or any(count_of(each) != 0 for each in self.arrivals)
        return is_dead or bool(self.arrivals or self.results)

    def __str__(self) -> str:
        raw = self.message.raw
        return f"{raw.number} ({self.message.kind}; {_shown(raw.fields)}; {len(raw.body or b'')} bytes)"


class Judgement:
    """What was sent, and what came of it."""

    def __init__(self, broker: str, dead_bytes_max: int) -> None:
        """Judge by a broker's rules. `dead_bytes_max`: the limit of the stream of dead letters."""
        self._broker = broker
        self._dead_bytes_max = dead_bytes_max
        self._sent: dict[Position, Record] = {}
        self._returned: dict[Position, Record] = {}
        self._strange: list[str] = []

    @property
    def records(self) -> Iterator[Record]:
        yield from self._sent.values()
        yield from self._returned.values()

    @property
    def settled(self) -> int:
        """How many messages are settled."""
        return sum(each.is_settled for each in self.records)

    @property
    def unsettled(self) -> list[str]:
        return [str(each) for each in self.records if not each.is_settled]

    def send(self, messages: Sequence[HostileMessage], positions: Sequence[Position], sent_at_ms: int) -> None:
        """Take note of messages that were published, all to the source or all to the retry log."""
        for message, position in zip(messages, positions, strict=True):
            into = self._returned if message.is_returned else self._sent
            into[position] = Record(message, sent_at_ms)

    def take(self, found: Iterable[Arrived]) -> list[tuple[HostileMessage, bytes]]:
        """Take what came to targets; return what its consumer fails with, by delivery id."""
        failed = []
        for each in found:
            ids = [value for name, value in each.fields if name == DELIVERY_ID]
            position = _position_in(_ID, ids[-1] if ids else None, 1)
            record = None if position is None else self._sent.get(position)
            if record is None:
                self._add_strange(f"arrived at {each.target} and was never sent: {_shown(each.fields)}")
                continue
            record.arrivals.append(each)
            if record.message.fails and count_of(each) == 0:
                failed.append((record.message, ids[-1] or b""))
        return failed

    def take_dead(self, found: Iterable[Arrived]) -> None:
        """Take dead letters of the broker."""
        for each, record in self._by_position(found, "dead letter"):
            record.dead.append(each)

    def take_results(self, found: Iterable[Arrived]) -> None:
        """Take results of withdrawals."""
        for each, record in self._by_position(found, "result"):
            record.results.append(each)

    def take_dead_in_tarry(self, found: Iterable[tuple[Position, str]]) -> None:
        """Take all dead letters of Tarry that there are, by position and reason."""
        for record in self.records:
            record.dead_in_tarry.clear()
        named = [each for each in self._returned.values() if each.message.named is not None]
        for position, reason in found:
            if position in self._sent:
                self._sent[position].dead_in_tarry.append(reason)
            elif by_id := [each for each in named if each.message.named == position]:
                for each in by_id:
                    each.dead_in_tarry.append(reason)
            else:
                self._add_strange(f"dead letter of Tarry that was never sent: {position}, {reason[:_SHOWN]}")

    def _by_position(self, found: Iterable[Arrived], what: str) -> Iterator[tuple[Arrived, Record]]:
        for each in found:
            named = [value for name, value in each.fields if name == POSITION]
            position = _position_in(_POSITION, named[-1] if named else None, 2)
            # By the name of the log that stands before.
            is_source = named and (named[-1] or b"").lower().startswith((b"source", b"orders"))
            sent = self._sent if is_source else self._returned
            record = None if position is None else sent.get(position)
            if record is None:
                self._add_strange(f"{what} that was never sent: {_shown(each.fields)}")
            else:
                yield each, record

    def _add_strange(self, text: str) -> None:
        if text not in self._strange:
            self._strange.append(text)

    # Faults.

    def faults(self, may_repeat: MayRepeat) -> list[str]:
        """Return what is not as it must be, a line each."""
        found = list(self._strange)
        for record in self.records:
            found += [f"{record}: {fault}" for fault in self._faults_of(record, may_repeat)]
        return found

    def _faults_of(self, record: Record, may_repeat: MayRepeat) -> Iterator[str]:
        fate = record.message.verdict.fate
        dead = [*(_text(each, REASON) for each in record.dead), *record.dead_in_tarry]
        if not record.is_settled:
            yield "nothing has become of it, or not the second delivery"
        if fate is not Fate.SETTLED:
            allowed = {Fate.ARRIVES: record.arrivals, Fate.DEAD: dead, Fate.RESULT: record.results}[fate]
            for what, some in (("arrived", record.arrivals), ("is dead", dead), ("has a result", record.results)):
                if some and some is not allowed:
                    yield f"must be one that {fate.value}, and {what}: {str(some)[:_SHOWN]}"
        elif (bool(record.arrivals) + bool(dead) + bool(record.results)) > 1:
            yield f"has become several things: {len(record.arrivals)} arrivals, dead by {dead}"
        if fate is Fate.ARRIVES:
            yield from self._faults_of_arrivals(record)
        for each in record.dead:
            yield from self._faults_of_dead(record, each)
        if fate is Fate.DEAD:
            yield from self._faults_of_reasons(record, dead)
        yield from _repeats(record, may_repeat)

    def _faults_of_arrivals(self, record: Record) -> Iterator[str]:
        message = record.message
        for each in record.arrivals:
            if each.target != message.target:
                yield f"arrived at {each.target!r}, not at {message.target!r}"
            if each.at_ms < (due_ms := message.due_ms(record.sent_at_ms)):
                yield f"arrived {due_ms - each.at_ms} ms early"
            yield from self._faults_of_content(record, each, (DELIVERY_ID, COUNT))
        counts = {count_of(each) for each in record.arrivals}
        if record.arrivals and counts != ({0, 1} if message.fails else {0}):
            yield f"arrived with the redelivery counts {counts}"

    def _faults_of_content(self, record: Record, each: Arrived, relays: Sequence[bytes]) -> Iterator[str]:
        """What is not the original's, and which of the relay's own headers do not stand there once."""
        message = record.message
        if message.verdict.keeps_fields and (found := self._kept(each.fields)) != self._kept(fields_of(message.raw)):
            yield f"has other headers: {_shown(found)}"
        if each.body != message.raw.body:
            yield f"has another body, {len(each.body or b'')} bytes: {(each.body or b'')[:50]!r}"
        own = sorted(name for name, _ in each.fields if self._is_tarrys(name))
        if own != sorted(relays):
            yield f"has these headers of Tarry: {own}"
        if self._broker == "nats" and [name for name, _ in each.fields].count(b"Nats-Msg-Id") != 1:
            yield "has not one Nats-Msg-Id"

    def _faults_of_dead(self, record: Record, each: Arrived) -> Iterator[str]:
        if len(_text(each, REASON).encode()) > REASON_BYTES_MAX:
            yield f"its reason has more than {REASON_BYTES_MAX} bytes"
        is_bare = not each.body and not self._kept(each.fields)
        if not (is_bare and self._may_be_bare(record.message)):
            yield from self._faults_of_content(record, each, (REASON, POSITION))

    def _may_be_bare(self, message: HostileMessage) -> bool:
        raw = message.raw
        headers = raw.size - len(raw.body or b"")
        if self._broker == "nats" and headers > _BLOCK_MAX - _ROOM:
            return True
        return self._broker != "redis" and raw.size > self._dead_bytes_max - _ROOM

    def _faults_of_reasons(self, record: Record, dead: Sequence[str]) -> Iterator[str]:
        verdict = record.message.verdict
        for reason in dead:
            if re.search(verdict.reason, reason) is None:
                yield f"its reason is without {verdict.reason!r}: {reason[:_SHOWN]!r}"
        if verdict.when_read and record.dead_in_tarry:
            yield "is a dead letter of Tarry, though it was bad when it was read"

    def _kept(self, fields: Fields) -> Fields:
        """Return the headers that are the message's own."""
        return tuple((name, value) for name, value in fields if not self._is_anothers(name))

    def _is_anothers(self, name: bytes) -> bool:
        # In Redis names are read by letter, and with other letters they may be anybody's.
        own = (b"tarry-", b"nats-") if self._broker == "nats" else (b"tarry-",)
        return name.lower().startswith(own)

    def _is_tarrys(self, name: bytes) -> bool:
        return (name if self._broker == "redis" else name.lower()).startswith(b"tarry-")


def count_of(each: Arrived) -> int:
    """Return the redelivery count of an arrival; -1 if it has none."""
    text = _text(each, COUNT)
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else -1


def _repeats(record: Record, may_repeat: MayRepeat) -> Iterator[str]:
    by_name: dict[bytes | None, list[Arrived]] = {}
    for each in record.arrivals:
        by_name.setdefault(dict(each.fields).get(DELIVERY_ID), []).append(each)
    for first, *again in (*by_name.values(), *([record.dead] if record.dead else [])):
        for each in again:
            if not may_repeat(first.at_ms, each.at_ms):
                yield f"came again to {each.target} after {each.at_ms - first.at_ms} ms: {_shown(each.fields)}"


def _text(each: Arrived, name: bytes) -> str:
    found = [value for key, value in each.fields if key == name]
    return (found[-1] or b"").decode(errors="replace") if found else ""


def _position_in(form: re.Pattern[bytes], text: bytes | None, first: int) -> Position | None:
    found = form.fullmatch(text or b"")
    return None if found is None else (int(found[first]), int(found[first + 1]))


def _shown(fields: Fields) -> str:
    """Show headers, each of their values and all of them cut."""
    text = ", ".join(f"{name[:40]!r}: {value[:80] if value is not None else None!r}" for name, value in fields[:10])
    return text[:_SHOWN]
