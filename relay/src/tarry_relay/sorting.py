"""Decides what happens to a message that was read: when it is due, and where it goes.

Pure: the same message gives the same time, whenever it is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tarry import times
from tarry_relay import port, relay_settings
from tarry_relay.delivery_steps import Step
from tarry_relay.relay_settings import Headers, Settings, SettingsError, Source, Target

TIME_MAX_MS = 2**53
"""Latest time that a header may give, Unix time (ms)"""


class Bad(ValueError):
    """A header that cannot be used; the message names it, its value, and what is allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Withdrawal:
    """The request of a message that names another one."""

    ledger_id: int
    entry_id: int
    deliver_at_ms: int | None
    """The other time; None for a cancel"""

    @property
    def position(self) -> tuple[int, int]:
        return self.ledger_id, self.entry_id


class Sorted(NamedTuple):
    """The request of a message. `step` is READ (it waits), DIRECT, WITHDRAWAL or BAD."""

    step: Step
    target: str
    deliver_at_ms: int = 0
    reason: str = ""
    withdrawal: Withdrawal | None = None


class Sorting:
    """A sorter of messages from one source."""

    def __init__(self, source: Source, targets: tuple[Target, ...], names: port.Names) -> None:
        """Sort by these settings and the names of the broker."""
        self._source = source
        self._targets = targets
        self._names = names
        told = msgspec.structs.asdict(source.headers)
        self._headers = Headers(**{field: names.header_key(name) for field, name in told.items()})
        self._levels_ms = relay_settings.levels_ms(source)
        self._delay_max_ms = relay_settings.delay_max_ms(source)

    @property
    def correlation_header(self) -> str:
        """The name of the header that is returned with a result, as in `port.Message.headers`."""
        return self._headers.correlation

    def sort(self, read: port.Read) -> Sorted:
        """Return the request of a message of the source."""
        message = read.message
        if message is None:
            return Sorted(Step.BAD, self._source.dead_letters, reason="the source had lost it when it was read")
        try:
            for name in message.repeated:
                if name in msgspec.structs.astuple(self._headers):
                    # The choice would be arbitrary.
                    raise Bad(f"header {name} occurs twice")
            withdrawal = self._withdrawal_of(message, read)
            if withdrawal is not None:
                return Sorted(Step.WITHDRAWAL, "", withdrawal=withdrawal)
            target = self.target_of(message)
        except Bad as error:
            return Sorted(Step.BAD, self._source.dead_letters, reason=str(error))
        try:
            due_ms = self.due_at_ms(message)
        except Bad as error:
            if self._source.on_bad == "now":
                return Sorted(Step.DIRECT, target, reason=str(error))
            return Sorted(Step.BAD, self._source.dead_letters, reason=str(error))
        return Sorted(Step.DIRECT, target) if due_ms is None else Sorted(Step.READ, target, due_ms)

    def due_at_ms(self, message: port.Message) -> int | None:
        """Return when a message is due, Unix time (ms), or None if it has no time. Raises Bad."""
        sent_at_ms = max(0, message.sent_at_ms)
        due_ms = due_at_ms(message, sent_at_ms, self._headers, self._levels_ms)
        if due_ms is not None and self._delay_max_ms is not None and due_ms - sent_at_ms > self._delay_max_ms:
            raise Bad(
                f"it is to be delivered {due_ms - sent_at_ms} ms after it was sent, and source.delay_max is "
                f"{self._source.delay_max}"
            )
        return due_ms

    def target_of(self, message: port.Message) -> str:
        """Return the target of a message. Raises Bad if it has none, or cannot be published at all."""
        name = self._headers.target
        if name in message.repeated:
            raise Bad(f"header {name} occurs twice")
        target = message.headers.get(name, self._source.target)
        if target is None:
            raise Bad(f"header {name} is missing, and source.target is not set")
        if fault := self._names.target_fault(target):
            raise Bad(f"header {name} is {_shown(target)}: {fault}")
        if self._names.comes_back(target):
            raise Bad(f"header {name} is {target!r}, which this relay reads itself: the message would circulate")
        if self.setting_of(target) is None:
            raise Bad(f"header {name} is {_shown(target)}, which is none of the targets of this relay")
        if fault := self._names.message_fault(message):
            raise Bad(fault)
        return target

    def setting_of(self, target: str) -> Target | None:
        """Return the first setting that allows a target."""
        for each in self._targets:
            if each.allows(target):
                return each
        return None

    def _withdrawal_of(self, message: port.Message, read: port.Read) -> Withdrawal | None:
        """Return the withdrawal of a message that names another one, or None. Raises Bad."""
        names = self._headers
        name = _only_one(message, (names.cancel_of, names.reschedule_of))
        if name is None:
            return None
        text = message.headers[name].strip()
        try:
            ledger_id, entry_id = self._names.position_of(text)
        except port.BadPosition as error:
            raise Bad(f"header {name}: {error}") from None
        if ledger_id == read.ledger_id and entry_id >= read.entry_id:
            raise Bad(f"header {name} is {text!r}, where nothing was yet when this message was sent")
        due_ms = self.due_at_ms(message)
        times = f"{names.deliver_at}, {names.delay} or {names.level}"
        if name == names.cancel_of and due_ms is not None:
            raise Bad(f"header {name} is given with {times}; to give another time say {names.reschedule_of}")
        if name == names.reschedule_of and due_ms is None:
            raise Bad(f"header {name} is given without the new time: {times}")
        return Withdrawal(ledger_id, entry_id, due_ms)


def refuse_rounds(settings: Settings, names: port.Names) -> None:
    """Raise SettingsError if a target is impossible, or if this relay reads it: messages would circulate for ever."""
    for field, name in settings.targets_by_field().items():
        if fault := names.target_fault(name):
            raise SettingsError(f"{field} is {_shown(name)}: {fault}")
        if names.comes_back(name):
            raise SettingsError(
                f"{field} is {name!r}, which is read by this relay itself, as source or retry log: what is published "
                "there would circulate. Take another target, or let the source be read by another name"
            )
    for index, target in enumerate(settings.targets):
        for own in names.own_targets():
            if target.pattern is not None and re.fullmatch(target.pattern, own):
                raise SettingsError(
                    f"targets[{index}].pattern is {target.pattern!r}, which fits {own!r}: that is read by this relay "
                    "itself, as source or retry log, and what is published there would circulate. Narrow the pattern"
                )


def sent_ms(message: port.Message | None) -> int:
    """Return when a message was sent, as a time that Tarry takes: Unix time (ms).

    Returns 1 if it is unknown, or if its producer gave no time, or one in seconds.
    """
    return message.sent_at_ms if message is not None and times.MS_MIN <= message.sent_at_ms <= TIME_MAX_MS else 1


def due_at_ms(message: port.Message, sent_at_ms: int, names: Headers, levels_ms: list[int]) -> int | None:
    """Return when a message is due, or None if it has no time. Raises Bad."""
    name = _only_one(message, (names.deliver_at, names.delay, names.level))
    if name is None:
        return None
    text = message.headers[name].strip()
    if name == names.deliver_at:
        due_ms = time_ms(name, text)
    elif name == names.delay:
        delay_ms = relay_settings.delay_ms(text)
        if delay_ms is None:
            raise Bad(f"header {name} is {_shown(text)}, which is no delay: {relay_settings.DELAY_FORM}")
        due_ms = sent_at_ms + delay_ms
    elif re.fullmatch(r"\d{1,9}", text, re.ASCII) and 1 <= int(text) <= len(levels_ms):
        due_ms = sent_at_ms + levels_ms[int(text) - 1]
    else:
        raise Bad(f"header {name} is {_shown(text)}; it must be from 1 to {len(levels_ms)}")
    if due_ms > TIME_MAX_MS:
        raise Bad(f"header {name} is {text!r}, which is beyond {TIME_MAX_MS} ms of Unix time")
    return due_ms


def time_ms(name: str, text: str) -> int:
    """Return a moment as Unix time (ms). Raises Bad."""
    try:
        return max(0, times.parse(text))
    except times.NoTime as error:
        raise Bad(f"header {name} is {text if text.isdecimal() else repr(text)}, which {error}") from None
    except ValueError:
        raise Bad(f"header {name} is {_shown(text)}, which is neither Unix time in ms nor RFC 3339") from None


def _only_one(message: port.Message, names: Sequence[str]) -> str | None:
    """Return the one of the headers that is given, or None. Raises Bad if more than one is."""
    given = [name for name in names if name in message.headers]
    if len(given) > 1:
        raise Bad(f"headers {' and '.join(given)} are given, and only one of them may be")
    return given[0] if given else None


def _shown(text: str) -> str:
    """Quote a text, cut if it is long, so that its fault still fits behind it."""
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}... ({len(text)} letters)"
