"""When a message is due, and where it goes."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry_relay import port, sorting
from tarry_relay.delivery_steps import Step
from tarry_relay.relay_settings import Headers, Redis, Relay, Settings, SettingsError, Source, Target

SENT_MS = 1_900_000_000_000
HEADERS = ("deliver-at", "delay", "delay-level", "target", "cancel-of", "reschedule-of")
TARGETS = (Target(name="due"), Target(pattern=r"mail\.\w+|orders", rate_limit=5))


class Named:
    """A broker whose messages are called by their entries, in ledger 1, and which reads two logs."""

    def position_of(self, text: str) -> tuple[int, int]:
        if not text.isdecimal():
            raise port.BadPosition(f"{text!r} is no number")
        return 1, int(text)

    def header_key(self, name: str) -> str:
        return name.lower()

    def position_fault(self, ledger_id: int, entry_id: int) -> str:
        return ""

    def target_fault(self, target: str) -> str:
        return "it has a NUL" if "\0" in target else ""

    def message_fault(self, message: port.Message) -> str:
        return "its headers are too large" if "huge" in message.headers else ""

    def comes_back(self, target: str) -> bool:
        return target in self.own_targets()

    def own_targets(self) -> Sequence[str]:
        return ["orders", "failed"]


def sorter(on_bad: str = "dead_letter", **more: Any) -> sorting.Sorting:
    source = Source(name="orders", dead_letters="dead", on_bad=on_bad, target="due", **more)  # type: ignore[arg-type]
    return sorting.Sorting(source, TARGETS, Named())


def read(**headers: str) -> port.Read:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return port.Read(1, 2, port.Message(named, b"", sent_at_ms=SENT_MS), "lane")


@pytest.mark.parametrize(
    ("headers", "due_ms"),
    [
        ({"deliver_at": "1900000000123"}, 1_900_000_000_123),
        ({"deliver_at": " 0 "}, 0),
        ({"deliver_at": "2030-03-17T17:46:40Z"}, 1_900_000_000_000),
        ({"deliver_at": "2030-03-17T18:46:40.5+01:00"}, 1_900_000_000_500),
        ({"deliver_at": "2030-03-17T17:46:40.000001Z"}, 1_900_000_000_001),
        ({"delay": "10s"}, SENT_MS + 10_000),
        ({"delay": "0ms"}, SENT_MS),
        ({"delay": "2d"}, SENT_MS + 172_800_000),
        ({"delay_level": "1"}, SENT_MS + 1_000),
        ({"delay_level": "18"}, SENT_MS + 7_200_000),
    ],
)
def test_a_message_with_a_time_waits(headers: dict[str, str], due_ms: int) -> None:
    assert sorter().sort(read(**headers)) == sorting.Sorted(Step.READ, "due", due_ms)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"deliver_at": "1900000000"}, "header deliver-at is 1900000000, which can only be meant in seconds"),
        ({"deliver_at": "20270131"}, "header deliver-at is 20270131, which is a date, no time in ms"),
        ({"deliver_at": "3600"}, "no time in ms"),
        ({"delay": "0" * 300_000}, "... (300000 letters), which is no delay"),
        ({"target": "due\0"}, "header target is 'due\\x00': it has a NUL"),
        ({"huge": ""}, "its headers are too large"),
        ({"deliver_at": "tomorrow"}, "header deliver-at is 'tomorrow', which is neither Unix time in ms nor RFC 3339"),
        ({"deliver_at": "2030-03-17T17:46:40"}, "has no time zone"),
        ({"deliver_at": "9" * 19}, "is beyond"),
        ({"delay": "-1s"}, "header delay is '-1s', which is no delay"),
        ({"delay": "1.5s"}, "no delay"),
        ({"delay": "1s", "delay_level": "1"}, "headers delay and delay-level are given"),
        ({"delay_level": "0"}, "header delay-level is '0'; it must be from 1 to 18"),
        ({"target": "orders"}, "header target is 'orders', which this relay reads itself"),
        ({"target": "x"}, "header target is 'x', which is none of the targets"),
        ({"target": "mail.a.b"}, "none of the targets"),
    ],
)
def test_what_cannot_be_used_goes_to_the_dead_letters_with_the_reason(headers: dict[str, str], reason: str) -> None:
    asked = sorter().sort(read(**headers))
    assert (asked.step, asked.target) == (Step.BAD, "dead")
    assert reason in asked.reason


def test_a_message_without_a_time_goes_straight_on() -> None:
    assert sorter().sort(read()) == sorting.Sorted(Step.DIRECT, "due")
    assert sorter().sort(read(target="mail.news")) == sorting.Sorted(Step.DIRECT, "mail.news")


@pytest.mark.parametrize("headers", [{"delay": "2s"}, {"deliver_at": str(SENT_MS + 1_001)}])
def test_no_message_is_delayed_for_longer_than_the_file_allows(headers: dict[str, str]) -> None:
    allowed = {"delay_max": "1s", "levels": "1s"}
    assert sorter(**allowed).sort(read(delay="1s")).step is Step.READ
    asked = sorter(**allowed).sort(read(**headers))
    assert asked.step is Step.BAD
    assert "source.delay_max is 1s" in asked.reason
    assert sorter(**allowed).sort(read(reschedule_of="1", **headers)).step is Step.BAD


def test_a_bad_time_passes_at_once_where_that_is_wanted_and_a_bad_target_does_not() -> None:
    asked = sorter("now").sort(read(delay="soon", target="mail.news"))
    assert (asked.step, asked.target) == (Step.DIRECT, "mail.news")
    assert "no delay" in asked.reason
    assert sorter("now").sort(read(delay="soon", target="x")).step is Step.BAD


def test_what_was_lost_before_it_was_read_is_told() -> None:
    asked = sorter().sort(port.Read(1, 2, None, "lane"))
    assert (asked.step, asked.target) == (Step.BAD, "dead")


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ((Target(name="failed"),), "targets[0].name is 'failed', which is read by this relay itself"),
        ((Target(name="a"), Target(pattern="order.*")), "targets[1].pattern is 'order.*', which fits 'orders'"),
    ],
)
def test_a_target_that_comes_back_is_refused(targets: tuple[Target, ...], told: str) -> None:
    source = Source(name="orders", dead_letters="dead")
    settings = Settings(relay=Relay(topic="orders"), source=source, broker=Redis(), targets=targets)
    with pytest.raises(SettingsError, match=f"^{re.escape(told)}.*circulate"):
        sorting.refuse_rounds(settings, Named())
    sorting.refuse_rounds(msgspec.structs.replace(settings, targets=TARGETS[:1]), Named())


def test_the_first_target_that_fits_has_the_limit() -> None:
    named = sorter().setting_of("mail.news")
    assert named is not None
    assert named.rate_limit == 5


@pytest.mark.parametrize(
    ("headers", "due_ms"),
    [
        ({"cancel_of": "1"}, None),
        ({"cancel_of": " 1 ", "target": "nowhere"}, None),
        ({"reschedule_of": "1", "delay": "10s"}, SENT_MS + 10_000),
        ({"reschedule_of": "1", "deliver_at": "1900000000123"}, 1_900_000_000_123),
        ({"reschedule_of": "1", "delay_level": "1"}, SENT_MS + 1_000),
    ],
)
@pytest.mark.parametrize("on_bad", ["dead_letter", "now"])
def test_a_message_may_withdraw_another(headers: dict[str, str], due_ms: int | None, on_bad: str) -> None:
    asked = sorter(on_bad).sort(read(**headers))
    assert asked == sorting.Sorted(Step.WITHDRAWAL, "", withdrawal=sorting.Withdrawal(1, 1, due_ms))


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"cancel_of": "x"}, "header cancel-of: 'x' is no number"),
        ({"cancel_of": "2"}, "header cancel-of is '2', where nothing was yet when this message was sent"),
        ({"reschedule_of": "99", "delay": "1s"}, "header reschedule-of is '99', where nothing was yet"),
        ({"cancel_of": "1", "reschedule_of": "1"}, "headers cancel-of and reschedule-of are given"),
        ({"cancel_of": "1", "delay": "1s"}, "header cancel-of is given with deliver-at, delay or delay-level"),
        ({"reschedule_of": "1"}, "header reschedule-of is given without the new time: deliver-at, delay or"),
        ({"reschedule_of": "1", "delay": "soon"}, "delay is 'soon', which is no delay"),
    ],
)
@pytest.mark.parametrize("on_bad", ["dead_letter", "now"])
def test_a_withdrawal_that_cannot_be_used_is_never_passed_on(headers: dict[str, str], reason: str, on_bad: str) -> None:
    asked = sorter(on_bad).sort(read(**headers))
    assert (asked.step, asked.target) == (Step.BAD, "dead")
    assert reason in asked.reason


@given(st.datetimes(timezones=st.just(datetime.UTC)).filter(lambda moment: 1971 <= moment.year < 2200))
def test_a_moment_is_never_early(moment: datetime.datetime) -> None:
    due_ms = sorting.time_ms("deliver-at", moment.isoformat())
    early = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(milliseconds=due_ms) - moment
    assert datetime.timedelta(0) <= early < datetime.timedelta(milliseconds=1)


@given(st.dictionaries(st.sampled_from(HEADERS), st.text()))
def test_no_header_is_a_crash(headers: dict[str, str]) -> None:
    first = sorter().sort(port.Read(1, 2, port.Message(headers, b"", sent_at_ms=SENT_MS), "lane"))
    assert first == sorter().sort(port.Read(1, 2, port.Message(headers, b"", sent_at_ms=SENT_MS), "lane"))
    assert sorting.due_at_ms(port.Message({}, b""), SENT_MS, Headers(), []) is None


def test_a_header_of_the_relay_that_stands_twice_makes_a_bad_message() -> None:
    for name in HEADERS:
        message = port.Message({"delay": "1s", name: "1s"}, b"", frozenset({name}), SENT_MS)
        asked = sorter().sort(port.Read(1, 2, message, "lane"))
        assert (asked.step, asked.reason) == (Step.BAD, f"header {name} occurs twice")
    own = port.Message({"delay": "1s", "tag": "a"}, b"", frozenset({"tag"}))
    assert sorter().sort(port.Read(1, 2, own, "lane")).step is Step.READ


def test_headers_are_read_by_the_key_that_the_broker_gives_them() -> None:
    names = Headers(delay="X-Delay")
    asked = sorter(headers=names).sort(read(x_delay="1s"))
    assert (asked.step, asked.deliver_at_ms) == (Step.READ, SENT_MS + 1_000)


@pytest.mark.parametrize(("sent_at_ms", "due_ms"), [(SENT_MS, SENT_MS), (-1, 1), (SENT_MS // 1_000, 1), (2**62, 1)])
def test_a_message_was_sent_at_a_time_that_tarry_takes(sent_at_ms: int, due_ms: int) -> None:
    assert sorting.sent_ms(port.Message({}, b"", sent_at_ms=sent_at_ms)) == due_ms
