"""What is to be done with a message that was read: when it is due, and where it goes.

Owns: the headers of producers and of consumers that fail, and what is wrong with them.
Does not own: their names (`tarry_relay.relay_settings`).
Pure: the same message gives the same time, whenever it is read.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import NamedTuple

from tarry_relay import port
from tarry_relay.passage import Step
from tarry_relay.relay_settings import Headers, SettingsError, Source, Target

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DELAY = re.compile(r"(\d{1,15})(ms|s|m|h|d)", re.ASCII)
_TIME_MAX_MS = 2**53
_SECONDS_MAX = 978_307_200_000
"""Below it, and from 10^9 on, a number can only be meant in seconds."""


class Bad(ValueError):
    """A header cannot be used; the message names it, its value, and what is allowed."""


class Sorted(NamedTuple):
    """What a message asks for. `step`: READ (it waits), DIRECT or BAD."""

    step: Step
    target: str
    deliver_at_ms: int = 0
    reason: str = ""


class Sorting:
    """Sorts what is read from one source."""

    def __init__(self, source: Source, targets: tuple[Target, ...]) -> None:
        """Raises SettingsError: a level that is no delay."""
        self._source = source
        self._targets = targets
        try:
            self._levels_ms = [delay_ms("source.levels", each) for each in source.levels.split()]
        except Bad as error:
            raise SettingsError(str(error)) from error

    def sort(self, read: port.Read) -> Sorted:
        """What a message of the source asks for."""
        message = read.message
        if message is None:
            return Sorted(Step.BAD, self._source.dead_letters, reason="the source had lost it when it was read")
        try:
            target = self.target_of(message.headers)
        except Bad as error:
            return Sorted(Step.BAD, self._source.dead_letters, reason=str(error))
        try:
            due_ms = due_at_ms(message.headers, read.sent_at_ms, self._source.headers, self._levels_ms)
        except Bad as error:
            if self._source.on_bad == "now":
                return Sorted(Step.DIRECT, target, reason=str(error))
            return Sorted(Step.BAD, self._source.dead_letters, reason=str(error))
        return Sorted(Step.DIRECT, target) if due_ms is None else Sorted(Step.READ, target, due_ms)

    def target_of(self, headers: Mapping[str, str]) -> str:
        """Where it goes. Raises Bad."""
        name = self._source.headers.target
        target = headers.get(name, self._source.target)
        if target is None:
            raise Bad(f"header {name} is missing, and source.target is not set")
        if self.setting_of(target) is None:
            raise Bad(f"header {name} is {target!r}, which is none of the targets of this relay")
        return target

    def setting_of(self, target: str) -> Target | None:
        """The first setting that allows it; none allows the source itself, in which messages would go round."""
        if target == self._source.name:
            return None
        for each in self._targets:
            if target == each.name or (each.pattern is not None and re.fullmatch(each.pattern, target)):
                return each
        return None


def due_at_ms(headers: Mapping[str, str], sent_at_ms: int, names: Headers, levels_ms: list[int]) -> int | None:
    """When it is due; None: it has no time. Raises Bad."""
    given = [name for name in (names.deliver_at, names.delay, names.level) if name in headers]
    if not given:
        return None
    if len(given) > 1:
        raise Bad(f"headers {' and '.join(given)} are given, and only one of them may be")
    (name,) = given
    text = headers[name].strip()
    if name == names.deliver_at:
        due_ms = time_ms(name, text)
    elif name == names.delay:
        due_ms = sent_at_ms + delay_ms(name, text)
    else:
        due_ms = sent_at_ms + _of_level(name, text, levels_ms)
    if due_ms > _TIME_MAX_MS:
        raise Bad(f"header {name} is {text!r}, which is beyond {_TIME_MAX_MS} ms of Unix time")
    return due_ms


def time_ms(name: str, text: str) -> int:
    """A moment as Unix time in ms. Raises Bad."""
    if re.fullmatch(r"\d{1,19}", text, re.ASCII):
        number = int(text)
        if 10**9 <= number < _SECONDS_MAX:
            raise Bad(f"header {name} is {text}, which can only be meant in seconds; it must be in ms")
        return number
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise Bad(f"header {name} is {text!r}, which is neither Unix time in ms nor RFC 3339") from None
    if moment.tzinfo is None:
        raise Bad(f"header {name} is {text!r}, which has no time zone: end it with Z or an offset such as +02:00")
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    # Up, never early.
    return max(0, -(-since // datetime.timedelta(milliseconds=1)))


def delay_ms(name: str, text: str) -> int:
    """A delay in ms. Raises Bad."""
    found = _DELAY.fullmatch(text)
    if found is None:
        raise Bad(f"{name} is {text!r}, which is no delay: a whole number with {', '.join(_UNITS_MS)}, such as 10s")
    return int(found[1]) * _UNITS_MS[found[2]]


def _of_level(name: str, text: str, levels_ms: list[int]) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not 1 <= int(text) <= len(levels_ms):
        raise Bad(f"header {name} is {text!r}; it must be from 1 to {len(levels_ms)}")
    return levels_ms[int(text) - 1]
