"""Reads and writes the names of hand-outs as text, with the headers that carry them through another system."""

from __future__ import annotations

import dataclasses
import hashlib
import re

from tarry import columns, errors

DELIVERY_ID_HEADER = "tarry-delivery-id"
"""The header of a message that was passed on: the name of its hand-out."""
REDELIVERY_COUNT_HEADER = "tarry-redelivery-count"
"""The header of a message that was passed on: how often it was negatively acknowledged or timed out before."""

_FORM = re.compile(
    r"(0|[1-9]\d*)-(0|[1-9]\d*)(?:\.(0|[1-9]\d*))?-(0|[1-9]\d*)-(0|[1-9]\d*)(?:-([0-9a-f]{8}))?", re.ASCII
)
_BITS = (64, 64, 32, 64, 32)


@dataclasses.dataclass(frozen=True, slots=True)
class DeliveryId:
    """The name of a hand-out of one position of a subscription.

    Names are equal, and hash alike, by the hand-out alone, whatever `log` says.

    Example: `client.nack(topic, subscription, tarry.DeliveryId.parse(text).positions, forwarded=True)`
    """

    ledger_id: int
    entry_id: int
    batch_index: int | None
    """None: the entry as a whole."""
    deliver_at_ms: int
    redelivery_count: int
    log: str = dataclasses.field(default="", compare=False)
    """Eight hexadecimal digits that stand for topic and subscription (`log_of`); empty if the text does not say."""

    def __str__(self) -> str:
        part = "" if self.batch_index is None else f".{self.batch_index}"
        log = "" if not self.log else f"-{self.log}"
        return f"{self.ledger_id}-{self.entry_id}{part}-{self.deliver_at_ms}-{self.redelivery_count}{log}"

    @staticmethod
    def log_of(topic: str, subscription: str) -> str:
        """Return what stands for a topic and a subscription at the end of a name: eight hexadecimal digits."""
        return hashlib.sha256(f"{topic}\0{subscription}".encode()).hexdigest()[:8]

    @staticmethod
    def parse(text: str) -> DeliveryId:
        """Read what `str` gives. Raises InvalidArgument."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise errors.InvalidArgument(
                f"delivery id {text!r} is none; it has the form <ledger>-<entry>[.<batch index>]-<time>-<count>[-<log>]"
            )
        *digits, log = found.groups()
        numbers = [None if each is None else int(each) for each in digits]
        for number, bits in zip(numbers, _BITS, strict=True):
            if number is not None and number >> bits:
                raise errors.InvalidArgument(f"delivery id {text!r} holds {number}, which has more than {bits} bits")
        ledger_id, entry_id, batch_index, deliver_at_ms, redelivery_count = numbers
        return DeliveryId(
            ledger_id or 0, entry_id or 0, batch_index, deliver_at_ms or 0, redelivery_count or 0, log or ""
        )

    @staticmethod
    def of(positions: columns.Positions, row: int) -> DeliveryId:
        """Return the name of a row of what was handed out."""
        index = None if positions.batch_index is None else int(positions.batch_index[row])
        count = 0 if positions.redelivery_count is None else int(positions.redelivery_count[row])
        return DeliveryId(
            int(positions.ledger_id[row]),
            int(positions.entry_id[row]),
            None if index == columns.NO_BATCH_INDEX else index,
            int(positions.deliver_at_ms[row]),
            count,
        )

    @property
    def positions(self) -> columns.Positions:
        """What an acknowledgement, or a negative one, of this hand-out names."""
        index = columns.NO_BATCH_INDEX if self.batch_index is None else self.batch_index
        return columns.positions(self.ledger_id, self.entry_id, self.deliver_at_ms, index, self.redelivery_count)
