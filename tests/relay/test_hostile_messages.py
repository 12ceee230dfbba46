"""The generator of hostile messages, and the judgement of what became of them."""

from __future__ import annotations

import collections
import dataclasses
import re

import pytest

from tests.relay._support import hostile_judgement, hostile_kinds, hostile_messages
from tests.relay._support.hostile_kinds import Fate
from tests.relay._support.hostile_messages import HostileMessage
from tests.relay._support.raw_messages import Arrived, Fields, Position, Raw, fields_of, fields_of_block

BROKERS = sorted(hostile_kinds.TRAITS)
NOW_MS = 1_800_000_000_000
SPAN_MS = 3_000
DEAD_BYTES_MAX = 100_000
NATS_ONCE = ((b"Nats-Msg-Id", b"once"),)


def generated(broker: str, seed: int = 0, rows: int = 600, share: float = 0.7) -> list[HostileMessage]:
    return hostile_messages.generate(broker, seed, rows, now_ms=NOW_MS, span_ms=SPAN_MS, share=share)


def never(first_ms: int, again_ms: int) -> bool:
    return False


class Perfect:
    """A relay without faults, and what is judged of it."""

    def __init__(self, broker: str) -> None:
        self.broker = broker
        self.judgement = hostile_judgement.Judgement(broker, DEAD_BYTES_MAX)
        self.position_of: dict[int, Position] = {}

    def send(self, messages: list[HostileMessage]) -> None:
        for each in messages:
            self.position_of[each.raw.number] = (1, each.raw.number)
            self.judgement.send([each], [(1, each.raw.number)], NOW_MS)

    def arrival(self, message: HostileMessage, count: int = 0, target: str | None = None) -> Arrived:
        ledger, entry = self.position_of[message.raw.number]
        own = (
            (b"tarry-delivery-id", b"%d-%d-1000-%d-0a1b2c3d" % (ledger, entry, count)),
            (b"tarry-redelivery-count", b"%d" % count),
        )
        at_ms = message.due_ms(NOW_MS)
        return Arrived(target or message.target, at_ms, self._published(message, own), message.raw.body)

    def dead_letter(self, message: HostileMessage, reason: str) -> Arrived:
        log = b"RETRY" if message.is_returned else b"SOURCE"
        ledger, entry = self.position_of[message.raw.number]
        own = ((b"tarry-reason", reason.encode()), (b"tarry-position", b"%s-%d-%d" % (log, ledger, entry)))
        if message.raw.size > DEAD_BYTES_MAX and self.broker != "redis":
            return Arrived("dead", NOW_MS, own + (NATS_ONCE if self.broker == "nats" else ()), b"")
        return Arrived("dead", NOW_MS, self._published(message, own), message.raw.body)

    def deliver(self, message: HostileMessage) -> None:
        """Let become of a message what must become of it."""
        judgement, verdict = self.judgement, message.verdict
        if verdict.fate is Fate.DEAD:
            judgement.take_dead([self.dead_letter(message, matching(verdict.reason))])
        elif verdict.fate is Fate.RESULT:
            letter = self.dead_letter(message, "")
            judgement.take_results([dataclasses.replace(letter, target="results")])
        elif message.fails:
            ((failed, _),) = judgement.take([self.arrival(message)])
            assert judgement.take([self.arrival(failed, 1)]) == []
        elif not message.is_returned:
            judgement.take([self.arrival(message)])

    def _published(self, message: HostileMessage, own: Fields) -> Fields:
        kept = tuple(each for each in fields_of(message.raw) if not each[0].lower().startswith((b"tarry-", b"nats-")))
        if self.broker != "nats":
            kept = tuple(each for each in fields_of(message.raw) if not each[0].lower().startswith(b"tarry-"))
        return kept + own + (NATS_ONCE if self.broker == "nats" else ())

    def faults(self) -> list[str]:
        return self.judgement.faults(never)


def matching(reason: str) -> str:
    """Return a text that a pattern of a verdict finds."""
    text = "deliver-at delay delay-level cancel-of reschedule-of target zone seconds header beyond size id out.lost-"
    texts = [text + str(number) for number in range(hostile_kinds.LOST_TARGETS)]
    return next(each for each in texts if re.search(reason, each))


@pytest.mark.parametrize("broker", BROKERS)
def test_the_names_of_kinds_differ(broker: str) -> None:
    names = [each.name for each in hostile_kinds.kinds_of(hostile_kinds.TRAITS[broker])]
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("broker", BROKERS)
def test_every_kind_appears(broker: str) -> None:
    names = {each.name for each in hostile_kinds.kinds_of(hostile_kinds.TRAITS[broker])}
    assert {each.kind for each in generated(broker)} == names | {"plain"}


@pytest.mark.parametrize("broker", BROKERS)
def test_a_seed_gives_the_same_messages_and_another_one_others(broker: str) -> None:
    assert generated(broker, 7) == generated(broker, 7)
    assert generated(broker, 7) != generated(broker, 8)


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_so_many_are_hostile_and_the_first_is_not(broker: str, share: float) -> None:
    messages = generated(broker, rows=400, share=share)
    assert [each.raw.number for each in messages] == list(range(400))
    assert sum(each.kind != "plain" for each in messages) == min(399, int(400 * share))
    assert (messages[0].kind, messages[0].raw.fields[:-1] if broker == "redis" else messages[0].raw.fields) == (
        "plain",
        (),
    )


@pytest.mark.parametrize("broker", BROKERS)
def test_a_broker_can_take_what_is_generated(broker: str) -> None:
    raws = [each.raw for each in generated(broker)]
    assert max(each.size for each in raws) < (5_000_000 if broker == "redis" else 1_100_000)
    assert {each.number for each in raws if each.block is not None} == set() or broker == "nats"
    values = {value for each in raws for _, value in each.fields}
    assert (None in values) == (broker == "kafka")
    if broker == "nats":
        written = b"".join(name + (value or b"") for each in raws for name, value in each.fields)
        assert not {*b"\r\n"} & {*written}
        assert b":" not in b"".join(name for each in raws for name, _ in each.fields)
        assert max(each.size - len(each.body or b"") for each in raws) < 65_536
    if broker == "redis":
        assert {each.fields[-1][0] for each in raws} == {hostile_kinds.BODY_FIELD}
        assert {each.body for each in raws} == {b""}


@pytest.mark.parametrize("broker", BROKERS)
def test_what_a_consumer_returns_has_the_id_among_other_headers(broker: str) -> None:
    message = generated(broker)[0]
    raw = hostile_messages.retry_of(broker, message, b"1-2-3-4")
    assert raw == hostile_messages.retry_of(broker, message, b"1-2-3-4")
    assert [value for name, value in raw.fields if name.lower() == b"tarry-delivery-id"] == [b"1-2-3-4"]
    assert b"Status" in dict(raw.fields)


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_relay_without_faults_is_judged_to_have_none(broker: str, seed: int) -> None:
    perfect = Perfect(broker)
    messages = generated(broker, seed)
    # What a library loses, or a broker adds, is nothing that this relay does.
    perfect.send(messages)
    assert len(perfect.judgement.unsettled) == len(messages)
    for each in messages:
        perfect.deliver(each)
    returned = [each for each in messages if each.is_returned and each.verdict.fate is Fate.SETTLED]
    assert returned == []
    assert perfect.faults() == []
    assert perfect.judgement.unsettled == []


def plain(broker: str, *, fails: bool = False) -> tuple[Perfect, HostileMessage]:
    """Return a relay, and a plain message that was sent."""
    perfect = Perfect(broker)
    message = next(each for each in generated(broker, share=0.0) if each.fails is fails and each.not_before[0])
    perfect.send([message])
    return perfect, message


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("nothing", "nothing has become of it"),
        ("twice", "came again to due"),
        ("elsewhere", "arrived at 'dead'"),
        ("early", "arrived 1 ms early"),
        ("body", "another body"),
        ("header", "other headers"),
        ("order", "other headers"),
        ("count", "redelivery counts {1}"),
        ("own", "headers of Tarry"),
        ("dead", "must be one that arrives, and is dead"),
        ("dead in Tarry", "must be one that arrives, and is dead"),
        ("strange", "was never sent"),
    ],
)
def test_each_fault_is_found(broker: str, fault: str, told: str) -> None:
    perfect, message = plain(broker)
    judgement, good = perfect.judgement, perfect.arrival(message)
    match fault:
        case "twice":
            judgement.take([good, good])
        case "elsewhere":
            judgement.take([perfect.arrival(message, target="dead")])
        case "early":
            judgement.take([dataclasses.replace(good, at_ms=good.at_ms - 1)])
        case "body":
            judgement.take([dataclasses.replace(good, body=b"another")])
        case "header":
            judgement.take([dataclasses.replace(good, fields=(*good.fields, (b"x", b"")))])
        case "order":
            judgement.take([dataclasses.replace(good, fields=((b"x", b""), *good.fields))])
        case "count":
            judgement.take([perfect.arrival(message, 1)])
        case "own":
            judgement.take([dataclasses.replace(good, fields=(*good.fields, (b"tarry-reason", b"x")))])
        case "dead":
            judgement.take_dead([perfect.dead_letter(message, "x")])
        case "dead in Tarry":
            judgement.take_dead_in_tarry([((1, message.raw.number), "x")])
        case "strange":
            judgement.take([good])
            judgement.take_dead_in_tarry([((1, 10**6), "x")])
    assert any(told in each for each in perfect.faults()), perfect.faults()


@pytest.mark.parametrize("broker", BROKERS)
def test_what_fails_must_come_again_and_may_not_be_the_same_delivery(broker: str) -> None:
    perfect, message = plain(broker, fails=True)
    ((_, delivery_id),) = perfect.judgement.take([perfect.arrival(message)])
    assert delivery_id.startswith(b"1-")
    assert len(perfect.judgement.unsettled) == 1
    perfect.judgement.take([perfect.arrival(message, 1)])
    assert perfect.faults() == []


@pytest.mark.parametrize("broker", BROKERS)
def test_repeats_are_none_where_they_may_be(broker: str) -> None:
    perfect, message = plain(broker)
    perfect.judgement.take([perfect.arrival(message)] * 2)
    assert perfect.judgement.faults(lambda first_ms, again_ms: True) == []
    assert len(perfect.faults()) == 1


@pytest.mark.parametrize("broker", BROKERS)
def test_a_dead_letter_has_a_reason_of_its_kind_and_its_size_and_the_original(broker: str) -> None:
    messages = {each.kind: each for each in generated(broker, share=1.0)}
    message = messages["bad time: deliver-at '3600'"]
    for reason, told in (
        ("deliver-at", ""),
        ("bad", "without 'deliver-at'"),
        ("deliver-at" * 60, "more than 512 bytes"),
    ):
        perfect = Perfect(broker)
        perfect.send([message])
        perfect.judgement.take_dead([perfect.dead_letter(message, reason)])
        assert [told in each for each in perfect.faults()] == ([True] if told else [])
    perfect = Perfect(broker)
    perfect.send([message])
    letter = perfect.dead_letter(message, "deliver-at")
    bare = tuple(each for each in letter.fields if each[0].startswith((b"tarry-", b"Nats-")))
    perfect.judgement.take_dead([dataclasses.replace(letter, fields=bare, body=b"")])
    assert any("other headers" in each for each in perfect.faults())


def test_a_block_is_read_as_it_is_written() -> None:
    block = b"NATS/1.0\r\na: b\r\nc:d\r\ne:  f \r\nno colon\r\n\r\n"
    assert list(fields_of_block(block)) == [(b"a", b"b"), (b"c", b"d"), (b"e", b" f "), (b"no colon", b"")]
    assert fields_of(Raw(0, (), block=block)) == tuple(fields_of_block(block))
