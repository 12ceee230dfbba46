"""Generates messages that no relay may fall over, among plain ones, and says what must become of each.

Pure: the same seed gives the same messages. The table of kinds: `hostile_kinds`. Judging: `hostile_judgement`.
"""

from __future__ import annotations

import dataclasses
import datetime
import random

from tests.relay._support.hostile_kinds import (
    BODY_FIELD,
    DEFAULT_TARGET,
    GOOD,
    TARGETS,
    TRAITS,
    Kind,
    Traits,
    Verdict,
    kinds_of,
)
from tests.relay._support.raw_messages import Fields, Position, Raw


@dataclasses.dataclass(frozen=True, slots=True)
class HostileMessage:
    """A message, and what must become of it. Plain ones among them are of the kind `plain`."""

    kind: str
    raw: Raw
    verdict: Verdict
    target: str
    not_before: tuple[int, int]
    is_returned: bool = False
    named: Position | None = None
    """See `Kind.named`."""
    fails: bool = False
    """Whether its consumer fails the first time, so that it must arrive again."""

    def due_ms(self, sent_at_ms: int) -> int:
        """Return when it may arrive at the earliest, Unix time in ms."""
        return max(self.not_before[0], sent_at_ms + self.not_before[1] if self.not_before[1] else 0)


def generate(
    broker: str, seed: int, rows: int, *, now_ms: int, span_ms: int, share: float = 0.05, first_number: int = 0
) -> list[HostileMessage]:
    """Return messages in the order in which they are published.

    `share`: how many are hostile, each kind as often as any other. `span_ms`: how far due times reach.
    The first message of all, number 0, is plain and has no time.
    """
    rng = random.Random(f"{broker} {seed}")
    traits = TRAITS[broker]
    table = kinds_of(traits)
    hostile: list[Kind | None] = []
    hostile_rows = min(rows - 1, int(rows * share))
    while len(hostile) < hostile_rows:
        hostile += rng.sample(table, len(table))
    del hostile[hostile_rows:]
    order = [*hostile, *[None] * (rows - 1 - len(hostile))]
    rng.shuffle(order)
    maker = _Maker(traits, rng, now_ms, span_ms)
    return [maker.make(number, kind) for number, kind in enumerate([None, *order], first_number)]


def retry_of(broker: str, message: HostileMessage, delivery_id: bytes) -> Raw:
    """Return what the consumer of a message that fails publishes to the retry log: the id among hostile headers."""
    rng = random.Random(f"{broker} {message.raw.number}")
    traits = TRAITS[broker]
    maker = _Maker(traits, rng, 0, 1)
    name = rng.choice((b"tarry-delivery-id", b"Tarry-Delivery-Id")) if traits.names_any_case else b"tarry-delivery-id"
    others = [*maker.harmless(), (b"Status", rng.choice((b"503", b"404", b"shipped")))]
    fields = [*others, (name, delivery_id)]
    rng.shuffle(fields)
    return maker.raw(message.raw.number, tuple(fields), b"")


class _Maker:
    """Makes messages of kinds, with times, targets and other headers by chance."""

    def __init__(self, traits: Traits, rng: random.Random, now_ms: int, span_ms: int) -> None:
        self._traits = traits
        self._rng = rng
        self._now_ms = now_ms
        self._span_ms = span_ms

    def make(self, number: int, kind: Kind | None) -> HostileMessage:
        """Return a message of a kind; a plain one if it is None."""
        if kind is None:
            return self._plain(number)
        if kind.is_returned:
            raw = self.raw(number, self._mixed(kind.fields), b"returned %d" % number)
            return HostileMessage(kind.name, raw, kind.verdict, "", (0, 0), is_returned=True, named=kind.named)
        fields = tuple((key, value and value.replace(b"%(number)d", b"%d" % number)) for key, value in kind.fields)
        target, not_before = kind.target, kind.not_before
        if kind.block is not None:
            raw = Raw(number, (), kind.body, kind.block)
            return HostileMessage(kind.name, raw, kind.verdict, DEFAULT_TARGET, not_before)
        if kind.may_have_time and not self._has_time(fields):
            timed, not_before = self._time()
            fields += timed
        if target is None:
            target = self._rng.choice((DEFAULT_TARGET, *TARGETS))
            fields += (
                ((self._cased(b"target"), target.encode()),)
                if self._rng.random() < 0.5 or target != DEFAULT_TARGET
                else ()
            )
        fields = fields if kind.is_alone else self._mixed(fields)
        raw = self.raw(number, fields, kind.body, kind.timestamp_ms)
        return HostileMessage(kind.name, raw, kind.verdict, target, not_before)

    def _plain(self, number: int) -> HostileMessage:
        """Most are due within the span, some go at once; some of those that are due fail."""
        fields, not_before = ((), (0, 0)) if number == 0 else self._time()
        fails = bool(fields) and self._rng.random() < 0.05
        raw = self.raw(number, fields, b"plain %d" % number)
        return HostileMessage("plain", raw, GOOD, DEFAULT_TARGET, not_before, fails=fails)

    def raw(self, number: int, fields: Fields, body: bytes | None, timestamp_ms: int | None = None) -> Raw:
        """Return a message; in Redis the body is a field."""
        if self._traits.is_redis:
            return Raw(number, (*fields, (BODY_FIELD, body or b"")))
        return Raw(number, fields, body, None, timestamp_ms)

    def harmless(self) -> list[tuple[bytes, bytes]]:
        """Return some headers of bytes by chance, which are none of the relay's."""
        rng, found = self._rng, []
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            length = rng.choice((0, 1, 10, 300))
            value = bytes(each for each in rng.randbytes(length) if each not in b"\r\n")
            found.append((b"h-" + rng.choice((b"", b"a", b"\xc3\xbc", b"B C")), value))
        return found

    def _mixed(self, fields: Fields) -> Fields:
        """Put other headers between, and keep the order of `fields`."""
        mixed: list[tuple[bytes, bytes | None]] = list(fields)
        for each in self.harmless():
            mixed.insert(self._rng.randrange(len(mixed) + 1), each)
        return tuple(mixed)

    def _cased(self, name: bytes) -> bytes:
        """Return a header of the relay in letters that it reads."""
        others = (name, name.title(), name.upper()) if self._traits.names_any_case else (name,)
        return self._rng.choice(others)

    @staticmethod
    def _has_time(fields: Fields) -> bool:
        return any(key.lower() in (b"deliver-at", b"delay", b"delay-level") for key, _ in fields)

    def _time(self) -> tuple[Fields, tuple[int, int]]:
        """Return a good time or none, and when the message may arrive at the earliest."""
        rng = self._rng
        due_ms = self._now_ms + rng.randrange(self._span_ms)
        match rng.randrange(10):
            case 0 | 1:
                return (), (0, 0)
            case 2:
                delay_ms = rng.randrange(min(self._span_ms, 2_000))
                return ((self._cased(b"delay"), b"%dms" % delay_ms),), (0, delay_ms)
            case 3:
                zone = datetime.timezone(datetime.timedelta(minutes=rng.randrange(-720, 720)))
                text = datetime.datetime.fromtimestamp(due_ms / 1_000, zone).isoformat(timespec="milliseconds")
                moment_ms = int(datetime.datetime.fromisoformat(text).timestamp() * 1_000)
                return ((self._cased(b"deliver-at"), text.encode()),), (moment_ms, 0)
            case _:
                return ((self._cased(b"deliver-at"), b"%d" % due_ms),), (due_ms, 0)
