"""Sent positions as PIP-282 (Change definition of the recently joined consumers position) has them, one by one.

Owns: the list of positions that were offered, in that order, with what was sent and acknowledged of it, and which
consumers joined behind which of them.
Does not own: anything else (`order_oracle`).
"""

from __future__ import annotations

import dataclasses

Position = tuple[int, int]


@dataclasses.dataclass(eq=False, slots=True)
class _Offered:
    at: Position
    number: int
    sent: bool = False
    acknowledged: bool = False


class SentPositions:
    """What nobody needs any more is forgotten: the positions before the first one that is not acknowledged."""

    def __init__(self) -> None:
        self._offered: dict[Position, _Offered] = {}
        self._numbers = 0
        self._last: Position | None = None
        self._highest: Position = (0, 0)
        self._joined: dict[int, tuple[int, Position]] = {}

    def offer(self, at: Position) -> None:
        """It is planned; one that was offered before keeps its place."""
        if at not in self._offered:
            self._numbers += 1
            self._offered[at] = _Offered(at, self._numbers)
        self._offered[at].acknowledged = False

    def send(self, at: Position) -> None:
        if at in self._offered:
            self._offered[at].sent = True
            self._highest = max(self._highest, at)
            self._prune()

    def was_sent(self, at: Position) -> bool:
        return at in self._offered and self._offered[at].sent

    def acknowledge(self, at: Position) -> None:
        if at in self._offered:
            self._offered[at].acknowledged = self._offered[at].sent = True
            self._highest = max(self._highest, at)
            self._prune()

    def forget(self, at: Position) -> None:
        """It is not planned any more; it keeps its place when it was sent."""
        if at in self._offered and not self._offered[at].sent:
            del self._offered[at]
            self._prune()

    def _prune(self) -> None:
        for each in [*self._offered.values()]:
            if not each.acknowledged:
                break
            self._last = each.at
            del self._offered[each.at]
        first = next(iter(self._offered.values()), None)
        before = self._numbers + 1 if first is None else first.number
        self._joined = {each: joined for each, joined in self._joined.items() if joined[0] >= before}

    def last_sent(self) -> tuple[int, Position] | None:
        """(its number, the position) up to which everything was sent; None when nothing was."""
        found = None if self._last is None else (0, self._last)
        for each in self._offered.values():
            if not each.sent:
                break
            found = (each.number, each.at)
        return found

    def joined(self, consumer: int) -> None:
        last = self.last_sent()
        if last is not None and last[0]:
            self._joined[consumer] = last

    def left(self, consumer: int) -> None:
        self._joined.pop(consumer, None)

    @property
    def recent(self) -> dict[int, Position]:
        """Of consumers that joined recently the position behind which they joined."""
        return {consumer: at for consumer, (_, at) in self._joined.items()}

    def may_receive(self, at: Position, consumer: int) -> bool:
        """Whether a consumer may be sent a position. Where the list is not in the order of ledgers and entries, since
        streams closed and others planned again, one that was sent already may be when it is before anything that was:
        it must not hold up another one of its key.
        """
        if self.must_receive(at, consumer):
            return True
        offered = self._offered.get(at)
        return (offered is None or offered.sent) and at <= self._highest

    def must_receive(self, at: Position, consumer: int) -> bool:
        """Whether nothing keeps it back."""
        if consumer not in self._joined:
            return True
        number, joined_at = self._joined[consumer]
        offered = self._offered.get(at)
        return at <= joined_at if offered is None else offered.number <= number

    def acknowledged_up_to(self, at: Position) -> list[Position]:
        """What was offered up to a position and is not acknowledged."""
        positions = []
        for each in self._offered.values():
            if not each.acknowledged:
                positions.append(each.at)
            if each.at == at:
                return positions
        return []

    def offered(self) -> list[Position]:
        return [*self._offered]
