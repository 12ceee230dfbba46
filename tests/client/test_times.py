"""Which numbers and texts are times."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry import times


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine is in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("number", [0, 978_307_200_000, 1_896_091_200_000, 2**64 - 1])
def test_a_number_is_a_time_in_ms(number: int) -> None:
    assert times.fault_of(number) is None
    assert times.parse(str(number)) == number


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (978_307_199_999, "can only be meant in seconds; it must be in ms"),
        (1_790_000_000, "can only be meant in seconds; it must be in ms: 1790000000000"),
        (10**9, "can only be meant in seconds; it must be in ms: 1000000000000"),
        (10**9 - 1, "is no time in ms; 0 means at once, and any other time is at least 978307200000"),
        (20_270_131, "is a date, no time in ms; 2027-01-31T00:00:00Z is 1801353600000"),
        (20_270_231, "is no time in ms; 0 means at once"),
        (3_600, "is no time in ms; 0 means at once"),
        (1, "is no time in ms; 0 means at once"),
        (2**64, "is above 18446744073709551615"),
    ],
)
def test_a_number_that_is_no_time_says_what_to_write(number: int, fault: str) -> None:
    assert (times.fault_of(number) or "").startswith(fault)
    with pytest.raises(times.NoTime) as refused:
        times.parse(str(number), local=True)
    assert str(refused.value) == times.fault_of(number)


@given(st.integers(0, 2**64 - 1))
def test_no_number_between_0_and_the_least_time_is_one(number: int) -> None:
    assert (times.fault_of(number) is None) == (number == 0 or number >= times.MS_MIN)


@pytest.mark.parametrize(
    "text", ["", "soon", "1.5", "-5", "+1", "9" * 21, "9" * 5_000, "2030-02-30", "\N{ARABIC-INDIC DIGIT NINE}"]
)
def test_a_text_of_another_form_is_no_time(text: str) -> None:
    for local in (False, True):
        with pytest.raises(ValueError, match=r"^(?!is |can )") as refused:
            times.parse(text, local=local)
        assert not isinstance(refused.value, times.NoTime)


@pytest.mark.usefixtures("zone")
def test_a_time_without_a_zone_is_this_machine_s_where_that_is_meant() -> None:
    assert times.parse("2027-01-31 08:00", local=True) == times.parse("2027-01-31T07:00:00Z")
    with pytest.raises(times.NoTime, match="has no time zone: end it with Z"):
        times.parse("2027-01-31 08:00")


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "2027-03-28 02:30",
            "here skip; write it with its zone: 2027-03-28T01:30:00+01:00 or 2027-03-28T03:30:00+02:00",
        ),
        ("2027-03-28 02:00", "here skip; "),
        (
            "2027-10-31 02:30",
            "show twice; write it with its zone: 2027-10-31T02:30:00+02:00 or 2027-10-31T02:30:00+01:00",
        ),
    ],
)
def test_a_local_time_that_is_not_there_once_is_refused_with_what_to_write(text: str, fault: str) -> None:
    with pytest.raises(times.NoTime) as refused:
        times.parse(text, local=True)
    assert fault in str(refused.value)
    for written in str(refused.value).rpartition(": ")[2].split(" or "):
        assert times.parse(written, local=True) > times.MS_MIN


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("text", ["2027-03-28 01:59:59", "2027-03-28 03:00", "2027-10-31 01:59", "2027-10-31 03:00"])
def test_the_times_around_a_change_of_the_clocks_are_there_once(text: str) -> None:
    offset = "+02:00" if text in ("2027-03-28 03:00", "2027-10-31 01:59") else "+01:00"
    assert times.parse(text, local=True) == times.parse(text + offset)


@given(st.datetimes(timezones=st.just(datetime.UTC)))
def test_a_time_is_rounded_up_to_the_next_ms(moment: datetime.datetime) -> None:
    at_ms = times.parse(moment.isoformat())
    early = datetime.timedelta(milliseconds=at_ms) - (moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC))
    assert datetime.timedelta(0) <= early < datetime.timedelta(milliseconds=1)
