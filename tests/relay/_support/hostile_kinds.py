"""A table of the ways to be hostile to a relay, for each broker, with what must become of each.

Pure. Messages of these kinds: `hostile_messages`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping

from tests.relay._support.raw_messages import Fields, Position

BODY_FIELD = b"body"
"""The field of an entry of Redis that has the body."""
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "kafka": ("out[.].*", "_.*"),
    "nats": ("out[.].*", "[$_].*"),
    "redis": ("out[.].*", "out:.*"),
}
"""The patterns of targets that the relay must have. They fit names that the broker or the relay use themselves."""
TARGETS = ("due", "out.a", "out.b")
SMALL_TARGET = "out.small"
DEFAULT_TARGET = "due"
LOST_TARGETS = 5
"""How many targets of the pattern `out[.].*` messages name that no broker has."""
_FIRST_POSITION = {"kafka": "0-0", "nats": "1", "redis": "1-0"}
"""What a withdrawal of the first message of all names it by; in Redis an id that never was."""


class Fate(enum.Enum):
    """What must become of a message."""

    ARRIVES = "arrives"
    DEAD = "is a dead letter"
    SETTLED = "arrives, is a dead letter or has a result"
    """Neither the brokers nor the relay's rules say which."""
    RESULT = "has a result"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What must become of a message, and how it shows."""

    fate: Fate
    reason: str = ""
    """A regular expression that the reason of a dead letter contains."""
    when_read: bool = True
    """Whether it is known to be bad when it is read, so that its dead letter is the broker's and not Tarry's."""
    keeps_fields: bool = True
    """Whether everything arrives that the producer wrote. False where the broker's library loses it."""


GOOD = Verdict(Fate.ARRIVES)
SETTLED = Verdict(Fate.SETTLED)
RESULT = Verdict(Fate.RESULT)


def _dead(reason: str, *, when_read: bool = True) -> Verdict:
    return Verdict(Fate.DEAD, reason, when_read)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One way to be hostile."""

    name: str
    verdict: Verdict = GOOD
    fields: Fields = ()
    body: bytes | None = b"a body"
    block: bytes | None = None
    timestamp_ms: int | None = None
    target: str | None = None
    """The target that `fields` names; None if any good one may be named beside them."""
    may_have_time: bool = True
    """Whether any good time may be given beside `fields`."""
    not_before: tuple[int, int] = (0, 0)
    """When it may arrive at the earliest: a Unix time in ms, and ms after it was sent."""
    is_alone: bool = False
    """Whether no other headers may stand beside `fields`."""
    is_returned: bool = False
    """Whether it stands in the retry log, and not in the source."""
    named: Position | None = None
    """The position that its delivery id names, where nothing ever was: it may be a dead letter of Tarry there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """What a broker's messages can be."""

    broker: str
    large: int
    """Bytes of the largest value of a header that arrives beside others."""
    names_any_case: bool
    """Whether the relay reads its headers in any case of letters."""
    ledger: int
    """A ledger of its positions."""

    @property
    def is_kafka(self) -> bool:
        return self.broker == "kafka"

    @property
    def is_nats(self) -> bool:
        return self.broker == "nats"

    @property
    def is_redis(self) -> bool:
        return self.broker == "redis"


TRAITS: Mapping[str, Traits] = {
    "kafka": Traits("kafka", 65_536, True, 0),
    # JetStream takes 64 KiB of headers, the relay's among them.
    "nats": Traits("nats", 55_000, True, 1),
    "redis": Traits("redis", 65_536, False, 0),
}


def kinds_of(traits: Traits) -> list[Kind]:
    """Return every kind of a broker; their names differ."""
    return [
        *_headers(traits),
        *_own_headers(traits),
        *_bad_times(traits),
        *_good_times(),
        *_targets(traits),
        *_sizes(traits),
        *_withdrawals(traits),
        *_ids(traits),
        *(_blocks() if traits.is_nats else ()),
        *(_records() if traits.is_kafka else ()),
    ]


def _headers(traits: Traits) -> Iterator[Kind]:
    """Headers that are none of the relay's."""
    yield Kind("no header", may_have_time=False, target=DEFAULT_TARGET, is_alone=True)
    for name, value in {
        "empty value": b"",
        "blank value": b" ",
        "blanks around a value": b"  x  ",
        "tab in a value": b"a\tb",
        "value without UTF-8": b"\xff\xfe\x80",
        "surrogate in a value": b"\xed\xa0\x80",
        "NUL in a value": b"a\0b",
        "large value": b"v" * traits.large,
        "long Unicode value": "é€😀".encode() * 1_000,
    }.items():
        yield Kind(f"header: {name}", fields=((b"tag", value),))
    # Kafka's library gives no name that is no UTF-8, and one with a NUL only up to it.
    unreadable = dataclasses.replace(SETTLED, keeps_fields=False) if traits.is_kafka else GOOD
    for name, key, verdict in (
        ("other letters in a name", b"X-Tag", GOOD),
        ("name in Unicode", "tüg".encode(), GOOD),
        ("long name", b"n" * 1_000, GOOD),
        ("blank in a name", b"a b", GOOD),
        ("name without UTF-8", b"\xff\xfetag", unreadable),
        ("NUL in a name", b"a\0b", dataclasses.replace(GOOD, keeps_fields=not traits.is_kafka)),
        ("empty name", b"", SETTLED if traits.is_nats else GOOD),
    ):
        yield Kind(f"header: {name}", verdict, ((key, b"x"),))
    two_names = ((b"\xff\xfetag", b"x"), (b"\xff\xfeother", b"x"))
    yield Kind("header: two names without UTF-8", unreadable, two_names)
    yield Kind("header: name twice", fields=((b"tag", b"a"), (b"other", b"-"), (b"tag", b"b")))
    yield Kind("header: name and value twice", fields=((b"tag", b"a"), (b"tag", b"a")))
    yield Kind("header: one name in two cases", fields=((b"tag", b"a"), (b"TAG", b"b"), (b"Tag", b"c")))
    count = 4_500 if traits.is_nats else 6_000
    yield Kind("header: thousands", fields=tuple((b"%d" % each, b"v") for each in range(count)))
    yield Kind("header: a thousand times one name", fields=((b"tag", b"v"),) * 1_000)
    if not traits.is_nats:
        yield Kind("header: CR and LF", fields=((b"a\r\nb", b"c\r\n\r\nd"),))
    if traits.is_kafka:
        yield Kind("header: no value", fields=((b"tag", None),))
    if traits.is_redis:
        yield Kind("header: body twice", fields=((BODY_FIELD, b"another"),))


def _own_headers(traits: Traits) -> Iterator[Kind]:
    """Headers whose names have a meaning to a broker, its library or the relay."""
    for status in ("shipped", "200", "404", "408", "409", "503", "100"):
        fields = ((b"Status", status.encode()), (b"Description", b"No Messages"))
        yield Kind(f"broker's header: Status {status}", fields=fields)
    names = [b"Nats-Stream", b"Nats-Sequence", b"Nats-Subject", b"Nats-Time-Stamp", b"Nats-Last-Sequence"]
    names += [
        b"Nats-Pending-Messages",
        b"Nats-Num-Pending",
        b"Nats-Required-Api-Level",
        b"nats-rollup",
        b"KV-Operation",
    ]
    names += [
        b"Nats-Trace-Dest",
        b"traceparent",
        b"Content-Type",
        b"__key",
        b"key",
        b"offset",
        b"MAXLEN",
        b"*",
        b"NOMKSTREAM",
    ]
    for name in names:
        yield Kind(f"broker's header: {name.decode()}", fields=((name, b"99"),))
    yield Kind("broker's header: Nats-Msg-Id", fields=((b"Nats-Msg-Id", b"%(number)d"),))
    yield Kind("broker's header: Nats-Expected-Stream", fields=((b"Nats-Expected-Stream", b"orders"),))
    for text in (
        "tarry-delivery-id",
        "tarry-redelivery-count",
        "tarry-reason",
        "tarry-position",
        "tarry-result",
        "tarry-x",
    ):
        for cased in (text, text.title(), text.upper()):
            yield Kind(f"Tarry's header: {cased}", fields=((cased.encode(), b"0-1-2-3"),))
    yield Kind("Tarry's header: twice", SETTLED, ((b"tarry-delivery-id", b"1"), (b"tarry-delivery-id", b"2")))
    yield Kind("correlation", fields=((b"correlation-id", b"\xff" * 1_000),))
    yield Kind("correlation: twice", SETTLED, ((b"correlation-id", b"1"), (b"correlation-id", b"2")))
    if traits.is_redis:
        for name in (b"Delay", b"DELAY", b"Deliver-At", b"TARGET", b"Cancel-Of"):
            yield Kind(f"own field: {name.decode()}", fields=((name, b"never"),))
        yield Kind(
            "own field: Delay beside delay", fields=((b"Delay", b"never"), (b"delay", b"0s")), may_have_time=False
        )


def _bad_times(traits: Traits) -> Iterator[Kind]:
    def bad(name: str, *fields: tuple[bytes, bytes | None], reason: str) -> Kind:
        return Kind(f"bad time: {name}", _dead(reason), fields, may_have_time=False)

    at = "deliver-at"
    for text, reason in (
        ("2031-01-01T00:00:00", "zone"),
        ("2031-01-01 00:00:00", "zone"),
        ("2031-02-30T00:00:00Z", at),
        ("99999-01-01T00:00:00Z", at),
        ("1900000000", "seconds"),
        ("978307199999", at),
        ("20270131", at),
        ("3600", at),
        ("1", at),
        ("-5", at),
        ("-0", at),
        ("+1900000000000", at),
        ("1_900_000_000_000", at),
        ("1.9e12", at),
        ("0x1ba", at),
        ("1900000000000.5", at),
        ("9" * 19, at),
        (f"1{'0' * 30}", at),
        ("9" * 5_000, at),
        ("\N{ARABIC-INDIC DIGIT NINE}" * 13, at),
        ("tomorrow", at),
        ("", at),
        (" ", at),
        ("nan", at),
        ("9999-12-31T23:59:59.999999-23:59", "DELAY_TOO_LONG|delay_max|beyond|long"),
    ):
        yield bad(f"deliver-at {text[:40]!r}", (b"deliver-at", text.encode()), reason=reason)
    for text in (
        "10",
        "1.5s",
        "-1s",
        "1 s",
        "1S",
        "s",
        "",
        " ",
        "\N{ARABIC-INDIC DIGIT ONE}s",
        "1s1s",
        "999999999999999d",
        "9" * 30 + "d",
        "1w",
    ):
        yield bad(f"delay {text[:40]!r}", (b"delay", text.encode()), reason="delay")
    yield bad("delay of years", (b"delay", b"99999d"), reason="DELAY_TOO_LONG|delay_max|beyond|long")
    for text in ("0", "19", "-1", "1.0", "", "x", "01x", "9" * 300):
        yield bad(f"delay-level {text[:40]!r}", (b"delay-level", text.encode()), reason="delay-level")
    for name, value in {
        "40,000 letters": b"x" * 40_000,
        "40,000 times 4 bytes": "😀".encode() * 10_000,
        "NUL": b"1s\0",
        "no UTF-8": b"1s\xff",
        "only no UTF-8": b"\xff\xfe",
        "quotes": b"'\"\\" * 100,
        "control letters": bytes(each for each in range(1, 32) if each not in (10, 13)),
    }.items():
        yield bad(f"delay of {name}", (b"delay", value), reason="delay")
        yield bad(f"deliver-at of {name}", (b"deliver-at", value), reason=at)
    if not traits.is_nats:
        yield bad("delay of 300,000 NULs", (b"delay", bytes(300_000)), reason="delay")
        yield bad("delay of lines", (b"delay", b"1s\r\ntarget: due\r\n"), reason="delay")
    if traits.is_kafka:
        yield Kind("bad time: delay without a value", SETTLED, ((b"delay", None),), may_have_time=False)
    late, soon, level = (b"deliver-at", b"0"), (b"delay", b"0s"), (b"delay-level", b"1")
    for two in ((late, soon), (soon, level), (level, late)):
        names = [name.decode() for name, _ in two]
        yield bad(f"{' and '.join(names)}", *two, reason=rf"(?s)(?=.*{names[0]})(?=.*{names[1]})")
    yield bad("all three", late, soon, level, reason="delay")
    for each in (late, soon, level):
        yield bad(f"{each[0].decode()} twice", each, each, reason=each[0].decode())
        if traits.names_any_case:
            other = (each[0].title(), each[1])
            yield bad(f"{each[0].decode()} in two cases", each, other, reason=f"(?i){each[0].decode()}")
            yield bad(f"{each[0].decode()} in other letters", (each[0].upper(), b"x"), reason=f"(?i){each[0].decode()}")


def _good_times() -> Iterator[Kind]:
    past = (
        b"0",
        b" 0 ",
        b"978307200000",
        b"2020-01-01T00:00:00Z",
        b"1970-01-01T00:00:00Z",
        b"0001-01-01T00:00:00+14:00",
    )
    for text in past:
        yield Kind(f"good time: deliver-at {text!r}", fields=((b"deliver-at", text),), may_have_time=False)
    for text, ms in ((b"0ms", 0), (b"00000000001ms", 1), (b" 1s ", 1_000), (b"700ms", 700)):
        yield Kind(f"good time: delay {text!r}", fields=((b"delay", text),), may_have_time=False, not_before=(0, ms))
    yield Kind("good time: level", fields=((b"delay-level", b"1"),), may_have_time=False, not_before=(0, 1_000))
    yield Kind(
        "good time: a zero before a level",
        fields=((b"delay-level", b"01"),),
        may_have_time=False,
        not_before=(0, 1_000),
    )


def _targets(traits: Traits) -> Iterator[Kind]:
    def to(name: str, target: bytes, verdict: Verdict, *more: tuple[bytes, bytes | None]) -> Kind:
        fields = ((b"target", target), *more)
        return Kind(f"target: {name}", verdict, fields, target=target.decode(errors="replace"))

    bad = _dead("(?i)target")
    for name, target in {
        "none of a pattern": b"elsewhere",
        "the pattern itself": b"out[.].*",
        "empty": b"",
        "a blank": b" ",
        "the source": b"orders",
        "the retry log": b"failed",
        "other letters": b"DUE",
        "NUL behind a good one": b"due\0",
        "no UTF-8 behind a good one": b"due\xff",
        "no UTF-8 in a pattern": b"out.\xff\xfe",
        "100,000 letters" if not traits.is_nats else "50,000 letters": b"out."
        + b"x" * (50_000 if traits.is_nats else 99_996),
    }.items():
        yield to(name, target, bad)
    yield Kind("target: twice", bad, ((b"target", b"due"), (b"target", b"out.a")), target="")
    if traits.names_any_case:
        yield Kind("target: in two cases", bad, ((b"target", b"due"), (b"Target", b"due")), target="")
        yield Kind("target: in other letters", fields=((b"TARGET", b"out.a"),), target="out.a")
    yield to("blanks around a good one", b"  due  ", SETTLED)
    if not traits.is_nats:
        yield to("a line behind a good one", b"out.a\n", SETTLED if traits.is_redis else bad)
    fits_or_not = {
        "NUL in a pattern": b"out.a\0b",
        "blank": b"out.a b",
        "tab": b"out.a\tb",
        "nothing behind the dot": b"out.",
        "empty word": b"out..x",
        "1,500 letters with a blank": b"out." + b"x" * 1_500 + b" y",
        "6,000 letters": b"out." + b"x" * 6_000,
        "slash": b"out.a/b",
        "control letter": b"out.\x01",
        "Unicode": "out.ü".encode(),
        "right to left": "out.\u202e\u200b".encode(),
        "star": b"out.*",
        "greater than": b"out.>",
        "star in a word": b"out.a*b",
        "quote": b"out.'\"\\",
    }
    # Names that nothing says to be none: then no target of a pattern has them.
    names_of = {
        "kafka": {"nothing behind the dot", "empty word"},
        "nats": {"slash", "control letter", "Unicode", "right to left", "star in a word", "quote"},
        "redis": set(fits_or_not),
    }[traits.broker]
    for name, target in fits_or_not.items():
        verdict = bad if name not in names_of else SETTLED if traits.is_redis else _dead(".", when_read=False)
        yield to(name, target, verdict)
    yield from (to(name, target, bad) for name, target in _OWN_NAMES[traits.broker].items())
    if traits.is_kafka:
        yield to("249 letters", b"out." + b"x" * 245, _dead(".", when_read=False))
        yield to("250 letters", b"out." + b"x" * 246, bad)
        yield to("out_a, which collides", b"out_a", bad)
    if not traits.is_redis:
        for number in range(LOST_TARGETS):
            lost = b"out.lost-%d" % number
            verdict = _dead(rf"out\.lost-{number}", when_read=False)
            yield to(f"lost {number}", lost, verdict)
            yield to(f"lost {number}, due at once", lost, verdict, (b"deliver-at", b"0"))


_OWN_NAMES: Mapping[str, Mapping[str, bytes]] = {
    "kafka": {
        "offsets": b"__consumer_offsets",
        "transactions": b"__transaction_state",
        "metadata": b"__cluster_metadata",
        "any with two": b"__x",
    },
    "nats": {
        "purge": b"$JS.API.STREAM.PURGE.orders",
        "delete": b"$JS.API.STREAM.DELETE.due",
        "delete of a consumer": b"$JS.API.CONSUMER.DELETE.orders.relay",
        "acknowledgement": b"$JS.ACK.orders.relay.1.1.1.1.1",
        "system": b"$SYS.REQ.SERVER.PING",
        "bucket": b"$KV.bucket.key",
        "inbox": b"_INBOX.x",
        "reply": b"_R_.x",
        "any": b"$",
    },
    "redis": {
        "key of what was published": b"out:tarry-once:x",
        "former key of what was published": b"out:orders@0a1b2c3d:relay:0-1795773600000-1795773660000-0",
    },
}


def _sizes(traits: Traits) -> Iterator[Kind]:
    yield Kind("size: empty body", body=b"")
    yield Kind("size: every byte", body=bytes(range(256)))
    yield Kind("size: 900,000 bytes", body=b"L" * 900_000, target=DEFAULT_TARGET)
    to_small = ((b"target", SMALL_TARGET.encode()),)
    fits = Kind("size: fits a small target", fields=to_small, body=b"s" * 90_000, target=SMALL_TARGET)
    yield fits
    if traits.is_redis:
        yield Kind("size: 4 MB", body=b"L" * 4_000_000, target=DEFAULT_TARGET)
        return
    refused = _dead("(?i)large|size|limit|max|exceed|bytes", when_read=False)
    yield dataclasses.replace(fits, name="size: beyond a small target", verdict=refused, body=b"s" * 150_000)
    yield dataclasses.replace(
        fits,
        name="size: beyond a small target, due",
        verdict=refused,
        body=b"s" * 150_000,
        fields=(*to_small, (b"delay", b"0s")),
        may_have_time=False,
    )
    just_below = 1_048_576 - (31 if traits.is_nats else 200)
    # With the relay's headers it fits no target. Kafka's library may have a limit of its own.
    verdict = refused if traits.is_nats else SETTLED
    yield Kind(
        "size: just below the source's limit",
        verdict,
        ((b"at", b"most"),),
        b"M" * just_below,
        target=DEFAULT_TARGET,
        may_have_time=False,
        is_alone=True,
    )
    if traits.is_nats:
        block = b"NATS/1.0\r\na: " + b"h" * (65_500 - 17) + b"\r\n\r\n"
        verdict = _dead("(?i)header")
        yield Kind("size: headers just below the limit", verdict, block=block, target=DEFAULT_TARGET)


def _withdrawals(traits: Traits) -> Iterator[Kind]:
    first = _FIRST_POSITION[traits.broker].encode()
    for name in (b"cancel-of", b"reschedule-of"):
        time = () if name == b"cancel-of" else ((b"delay", b"1s"),)
        for text in (
            b"",
            b" ",
            b"x",
            b"-1",
            b"1.5",
            b"\xff",
            b"1\0",
            b"9" * 30_000,
            b"1-2-3-4",
            b"99-",
            b"18446744073709551616-18446744073709551616",
        ):
            yield _withdrawal(f"{name.decode()} {text[:30]!r}", _dead(name.decode()), (name, text), *time)
        yield _withdrawal(f"{name.decode()} twice", _dead(name.decode()), (name, first), (name, first), *time)
    both = ((b"cancel-of", first), (b"reschedule-of", first))
    yield _withdrawal("both", _dead("cancel-of"), *both)
    yield _withdrawal("cancel with a time", _dead("cancel-of"), both[0], (b"delay", b"1s"))
    yield _withdrawal("reschedule without a time", _dead("reschedule-of"), both[1])
    yield _withdrawal("reschedule to a bad time", _dead("delay"), both[1], (b"delay", b"soon"))
    long = (b"correlation-id", b"c" * (50_000 if traits.is_nats else 60_000))
    yield _withdrawal("of what has arrived", RESULT, both[0], (b"correlation-id", b"c"))
    yield _withdrawal("with a long correlation", RESULT, both[0], long)
    if traits.is_kafka:
        yield _withdrawal("of a partition that there is not", SETTLED, (b"cancel-of", b"77-5"))


def _withdrawal(name: str, verdict: Verdict, *fields: tuple[bytes, bytes | None]) -> Kind:
    return Kind(f"withdrawal: {name}", verdict, fields, may_have_time=False, target="")


def _ids(traits: Traits) -> Iterator[Kind]:
    """What stands in the retry log and names no delivery of this relay."""
    name, ledger = b"tarry-delivery-id", traits.ledger

    def returned(what: str, *fields: tuple[bytes, bytes | None]) -> Kind:
        return Kind(f"id: {what}", _dead("(?i)id|deliver"), fields, target="", may_have_time=False, is_returned=True)

    yield returned("none")
    yield returned("none, and a time", (b"delay", b"1s"), (b"target", b"due"))
    for text in (
        "none",
        "",
        " ",
        "1-2",
        f"{ledger}-1-1000",
        f"0{ledger}-1-1000-0",
        f"-{ledger}-1-1000-0",
        f"{ledger}-1-1000-0-",
        f"{ledger}-1-1000-0-zzzz",
        f"{ledger}-1-1000-0-deadbeef",
        f"{ledger}-1-1000-0-0-0-0",
        f"{ledger}.0-1-1000-0",
        f"{ledger}-1.0-1000-0",
        f"{ledger}-1.4294967296-1000-0",
        f"{ledger}-{2**64}-1000-0",
        f"{ledger}-1-{2**64}-0",
        f"{ledger}-1-1000-{2**32}",
        f"{ledger}-5-1000-{2**32 - 1}",
        *((f"{2**64}-1-1000-0", f"{2**32}-1-1000-0", "2-1-1000-0") if not traits.is_redis else ()),
        "\N{ARABIC-INDIC DIGIT ZERO}-1-1000-0",
        f"{ledger}-1-1000-0\0",
        "9" * 30_000,
    ):
        yield returned(repr(text[:50]), (name, text.encode()))
    if not traits.is_redis:
        # The first message of all, which had no time. In Redis its position is known to nobody before.
        first = "0-0" if traits.is_kafka else "1-1"
        for text in (f"{first}-1000-0", f"{first}-1900000000000-0", f"{first}.0-1000-0", f"{first}-1000-0-deadbeef"):
            yield returned(f"of the first message, {text}", (name, text.encode()))
    for place in _nothing_at(traits):
        text = b"%d-%d-1900000000000-0" % place
        kind = returned(f"where nothing ever was, {text!r}", (name, text))
        yield dataclasses.replace(kind, verdict=_dead(".", when_read=False), named=place)
    yield returned("no UTF-8", (name, b"\xff\xfe"))
    yield returned("twice", (name, b"x"), (name, b"y"))
    yield returned("beside a status", (b"Status", b"503"), (name, b"x"))
    yield returned("beside a time and a target", (name, b"x"), (b"delay", b"1s"), (b"target", b"out.a"))
    if traits.names_any_case:
        yield returned("other letters", (b"Tarry-Delivery-ID", b"x"))
        yield returned("two cases", (name, b"x"), (b"TARRY-DELIVERY-ID", b"x"))
    if traits.is_kafka:
        yield returned("no value", (name, None))


def _nothing_at(traits: Traits) -> Iterator[Position]:
    """Yield positions that a message of the source could have, and none has."""
    yield from ((traits.ledger, entry) for entry in (10**15, 2**62))
    if traits.is_kafka:
        yield 77, 1
    else:
        yield from ((traits.ledger, entry) for entry in (2**63, 2**64 - 1))
    if traits.is_redis:
        yield from ((77, 1), (2**32, 1), (2**64 - 1, 2**64 - 1))


def _blocks() -> Iterator[Kind]:
    """Blocks of headers that NATS stores and no library would write."""
    for name, block in {
        "status 404 in the first line": b"NATS/1.0 404 No Messages\r\n\r\n",
        "status 408 in the first line": b"NATS/1.0 408 Request Timeout\r\n\r\n",
        "status 409 in the first line": b"NATS/1.0 409 Consumer Deleted\r\n\r\n",
        "status 503 in the first line": b"NATS/1.0 503\r\n\r\n",
        "status 100 in the first line": b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 9\r\n\r\n",
        "status and a delay": b"NATS/1.0 503\r\ndelay: 1s\r\n\r\n",
        "no colon": b"NATS/1.0\r\nno colon here\r\n\r\n",
        "no name": b"NATS/1.0\r\n: no name\r\n\r\n",
        "no header": b"NATS/1.0\r\n\r\n",
        "only the first line": b"NATS/1.0\r\n",
        "only the end": b"\r\n\r\n",
        "no first line": b"garbage",
        "one byte": b"x",
        "no end": b"NATS/1.0\r\na: b",
        "another version": b"NATS/9.9\r\na: b\r\n\r\n",
        "LF alone": b"NATS/1.0\r\na: b\ntarget: elsewhere\r\n\r\n",
        "CR alone": b"NATS/1.0\r\na: b\rc\r\n\r\n",
        "folded line": b"NATS/1.0\r\na: b\r\n folded\r\n\r\n",
        "blank before the colon": b"NATS/1.0\r\ndelay : 1s\r\n\r\n",
        "an empty line between": b"NATS/1.0\r\na: b\r\n\r\nc: d\r\n\r\n",
        "NULs": bytes(100),
    }.items():
        yield Kind(f"block: {name}", SETTLED, block=block, body=b"" if "status" in name else b"a body", target="")
    yield Kind("block: no blank behind the colon", block=b"NATS/1.0\r\ntag:x\r\ndelay:0s\r\n\r\n")


def _records() -> Iterator[Kind]:
    """Records of Kafka whose producer gives another time, or no value."""
    for name, at_ms in {"none": -1, "0": 0, "1": 1, "in seconds": 1_900_000_000}.items():
        yield Kind(f"record: time of its producer, {name}", timestamp_ms=at_ms, may_have_time=False)
        delayed = ((b"delay", b"0s"),)
        yield Kind(f"record: delay from {name}", SETTLED, delayed, timestamp_ms=at_ms, may_have_time=False)
    yield Kind("record: no value", body=None)
