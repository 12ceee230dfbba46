"""What is to be done with a message that was read: when it is due, and where it goes.

Owns: the headers of producers, and what is wrong with them.
Does not own: their names (`tarry_relay.relay_settings`).
Pure: the same message gives the same time, whenever it is read.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tarry_relay import port, relay_settings
from tarry_relay.passage import Step
from tarry_relay.relay_settings import Headers, Settings, SettingsError, Source, Target

_TIME_MAX_MS = 2**53
_SECONDS_MAX = 978_307_200_000
"""Below it, and from 10^9 on, a number can only be meant in seconds."""


class Bad(ValueError):
    """A header cannot be used; the message names it, its value, and what is allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Withdrawal:
    """What a message asks for that names another one."""

    ledger_id: int
    entry_id: int
    deliver_at_ms: int | None
    """The other time; None: it is to be cancelled."""

    @property
    def position(self) -> tuple[int, int]:
        return self.ledger_id, self.entry_id


class Sorted(NamedTuple):
    """What a message asks for. `step`: READ (it waits), DIRECT, WITHDRAWAL or BAD."""

    step: Step
    target: str
    deliver_at_ms: int = 0
    reason: str = ""
    withdrawal: Withdrawal | None = None


class Sorting:
    """Sorts what is read from one source."""

    def __init__(self, source: Source, targets: tuple[Target, ...], names: port.Names) -> None:
        """`names`: of the broker."""
        self._source = source
        self._targets = targets
        self._names = names
        self._levels_ms = relay_settings.levels_ms(source)
        self._delay_max_ms = relay_settings.delay_max_ms(source)

    def sort(self, read: port.Read) -> Sorted:
        """What a message of the source asks for."""
        message = read.message
        if message is None:
            return Sorted(Step.BAD, self._source.dead_letters, reason="the source had lost it when it was read")
        try:
            withdrawal = self._withdrawal_of(message.headers, read)
            if withdrawal is not None:
                return Sorted(Step.WITHDRAWAL, "", withdrawal=withdrawal)
            target = self.target_of(message.headers)
        except Bad as error:
            return Sorted(Step.BAD, self._source.dead_letters, reason=str(error))
        try:
            due_ms = self._due_at_ms(message.headers, read)
        except Bad as error:
            if self._source.on_bad == "now":
                return Sorted(Step.DIRECT, target, reason=str(error))
            return Sorted(Step.BAD, self._source.dead_letters, reason=str(error))
        return Sorted(Step.DIRECT, target) if due_ms is None else Sorted(Step.READ, target, due_ms)

    def _withdrawal_of(self, headers: Mapping[str, str], read: port.Read) -> Withdrawal | None:
        """None: it names no other message. Raises Bad."""
        names = self._source.headers
        name = _only_one(headers, (names.cancel_of, names.reschedule_of))
        if name is None:
            return None
        text = headers[name].strip()
        try:
            ledger_id, entry_id = self._names.position_of(text)
        except port.BadPosition as error:
            raise Bad(f"header {name}: {error}") from None
        if ledger_id == read.ledger_id and entry_id >= read.entry_id:
            raise Bad(f"header {name} is {text!r}, where nothing was yet when this message was sent")
        due_ms = self._due_at_ms(headers, read)
        times = f"{names.deliver_at}, {names.delay} or {names.level}"
        if name == names.cancel_of and due_ms is not None:
            raise Bad(f"header {name} is given with {times}; to give another time say {names.reschedule_of}")
        if name == names.reschedule_of and due_ms is None:
            raise Bad(f"header {name} is given without the new time: {times}")
        return Withdrawal(ledger_id, entry_id, due_ms)

    def _due_at_ms(self, headers: Mapping[str, str], read: port.Read) -> int | None:
        """When it is due; None: it has no time. Raises Bad."""
        due_ms = due_at_ms(headers, read.sent_at_ms, self._source.headers, self._levels_ms)
        if due_ms is not None and self._delay_max_ms is not None and due_ms - read.sent_at_ms > self._delay_max_ms:
            raise Bad(
                f"it is to be delivered {due_ms - read.sent_at_ms} ms after it was sent, and source.delay_max is "
                f"{self._source.delay_max}"
            )
        return due_ms

    def target_of(self, headers: Mapping[str, str]) -> str:
        """Where it goes. Raises Bad."""
        name = self._source.headers.target
        target = headers.get(name, self._source.target)
        if target is None:
            raise Bad(f"header {name} is missing, and source.target is not set")
        if self._names.comes_back(target):
            raise Bad(f"header {name} is {target!r}, which this relay reads itself: the message would go round")
        if self.setting_of(target) is None:
            raise Bad(f"header {name} is {target!r}, which is none of the targets of this relay")
        return target

    def setting_of(self, target: str) -> Target | None:
        """The first setting that allows it."""
        for each in self._targets:
            if each.allows(target):
                return each
        return None


def refuse_rounds(settings: Settings, names: port.Names) -> None:
    """Raises SettingsError: a target is one that this relay reads itself, so that messages would go round for ever."""
    for field, name in settings.targets_by_field().items():
        if names.comes_back(name):
            raise SettingsError(
                f"{field} is {name!r}, which is read by this relay itself, as source or retry log: what is published "
                "there would go round. Take another target, or let the source be read by another name"
            )
    for index, target in enumerate(settings.targets):
        for own in names.own_targets():
            if target.pattern is not None and re.fullmatch(target.pattern, own):
                raise SettingsError(
                    f"targets[{index}].pattern is {target.pattern!r}, which fits {own!r}: that is read by this relay "
                    "itself, as source or retry log, and what is published there would go round. Narrow the pattern"
                )


def _only_one(headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Which of the headers is given; None: none of them. Raises Bad where more than one is."""
    given = [name for name in names if name in headers]
    if len(given) > 1:
        raise Bad(f"headers {' and '.join(given)} are given, and only one of them may be")
    return given[0] if given else None


def due_at_ms(headers: Mapping[str, str], sent_at_ms: int, names: Headers, levels_ms: list[int]) -> int | None:
    """When it is due; None: it has no time. Raises Bad."""
    name = _only_one(headers, (names.deliver_at, names.delay, names.level))
    if name is None:
        return None
    text = headers[name].strip()
    if name == names.deliver_at:
        due_ms = time_ms(name, text)
    elif name == names.delay:
        due_ms = sent_at_ms + _delay_ms(name, text)
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


def _delay_ms(name: str, text: str) -> int:
    """A delay in ms. Raises Bad."""
    delay = relay_settings.delay_ms(text)
    if delay is None:
        raise Bad(f"{name} is {text!r}, which is no delay: {relay_settings.DELAY_FORM}")
    return delay


def _of_level(name: str, text: str, levels_ms: list[int]) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not 1 <= int(text) <= len(levels_ms):
        raise Bad(f"header {name} is {text!r}; it must be from 1 to {len(levels_ms)}")
    return levels_ms[int(text) - 1]
