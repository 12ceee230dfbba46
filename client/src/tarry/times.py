"""Decides which numbers and texts are times, for everything that reads what people and programs write.

The command, its files and the relay share this rule: a time is Unix time in ms, or ISO 8601. A number that is too small
for ms is a date such as 20270131, or a time or a delay in seconds. The daemon would take it for a time long past, and
deliver at once.
"""

from __future__ import annotations

import datetime
import re

SECONDS_MIN = 10**9
"""Lowest number that can only be meant in seconds, in 2001"""
MS_MIN = 978_307_200_000
"""Lowest number that is a time in ms, in 2001; besides it only 0, which means at once"""
MS_MAX = 2**64 - 1

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class NoTime(ValueError):
    """A time that cannot be meant as it is written. The message is a predicate: `20270131` `is a date; ...`."""


def fault_of(number: int) -> str | None:
    """Return why a number is no Unix time in ms, and what to write, as a predicate; None if it is one."""
    if number == 0 or MS_MIN <= number <= MS_MAX:
        return None
    if number > MS_MAX:
        return f"is above {MS_MAX}"
    if number >= SECONDS_MIN:
        in_ms = f": {number}000" if number < MS_MIN // 10 else ""
        return f"can only be meant in seconds; it must be in ms{in_ms}"
    try:
        date = datetime.datetime.strptime(f"{number:08}", "%Y%m%d").replace(tzinfo=datetime.UTC)
    except ValueError:
        date = _EPOCH
    if (at_ms := _ms_of(date)) >= MS_MIN:
        return f"is a date, no time in ms; {date:%Y-%m-%d}T00:00:00Z is {at_ms}"
    return f"is no time in ms; 0 means at once, and any other time is at least {MS_MIN}"


def parse(text: str, *, local: bool = False) -> int:
    """Return the Unix time (ms) of a number or of ISO 8601; it is negative before 1970.

    With `local`, a time without a zone is this machine's. Rounds up, because early delivery is not allowed. Raises
    NoTime, or ValueError for a text of another form.
    """
    if re.fullmatch("[0-9]{1,20}", text):
        if (fault := fault_of(int(text))) is not None:
            raise NoTime(fault)
        return int(text)
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        if not local:
            raise NoTime("has no time zone: end it with Z or an offset such as +02:00")
        moment = _of_this_machine(moment)
    return _ms_of(moment)


def _of_this_machine(moment: datetime.datetime) -> datetime.datetime:
    """Give a time without a zone that of this machine. Raises NoTime if its clocks skip it, or show it twice."""
    try:
        first, second = sorted(moment.replace(fold=fold).astimezone() for fold in (0, 1))
    except (OverflowError, OSError) as error:
        raise ValueError(f"{moment} is beyond the calendar") from error
    if first == second:
        return first
    which = "show twice" if first.replace(tzinfo=None, fold=0) == moment else "skip"
    raise NoTime(
        f"is a time that the clocks here {which}; write it with its zone: {first.isoformat()} or {second.isoformat()}"
    )


def _ms_of(moment: datetime.datetime) -> int:
    return -(-(moment - _EPOCH) // datetime.timedelta(milliseconds=1))
