"""Rows of a request that were left alone, each with its reason.

Separate from `tarry.results` because `tarry.attempts` needs it without the other answers. Comments in `proto/tarry/v1`
define the reasons.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import wire
from tarry.v1 import delayed_delivery_pb2

Reason = TypeVar("Reason", bound=enum.IntEnum)


class RowsWithReasons(int, Generic[Reason]):
    """A number of rows that also has their indexes and reasons."""

    known: ClassVar[type[enum.IntEnum]]
    """The known reasons"""
    index: NDArray[np.int64]
    """Indexes of the rows in the request, ascending"""
    reason: NDArray[np.int64]
    """Reason of each row, or the number of one that this version does not know"""

    def items(self) -> Iterator[tuple[int, Reason | int]]:
        """Yield each row with its reason."""
        known = {int(each): each for each in self.known}
        for row, reason in zip(self.index.tolist(), self.reason.tolist(), strict=True):
            yield row, known.get(reason, reason)


def rows_and_reasons(
    index_field: Sequence[int], reason_field: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the columns of an answer that has a reason for each row, one for all, or none."""
    index, reason = wire.decode_indexes(index_field), wire.decode_indexes(reason_field)
    if len(reason) != len(index):
        reason = np.full(len(index), reason[0] if len(reason) else 0, np.int64)
    return index, reason


class OnInvalid(enum.IntEnum):
    """The treatment of a row that cannot be stored with its time.

    The delay is too long, the time is in seconds, or the delay level does not exist.
    """

    REFUSE = delayed_delivery_pb2.ON_INVALID_REFUSE
    """The whole batch is refused."""
    RETURN = delayed_delivery_pb2.ON_INVALID_RETURN
    """The row is not stored, and its index is returned with the reason. The others are stored."""


class RefusedReason(enum.IntEnum):
    """A reason why a row was not stored (OnInvalid.RETURN)."""

    DELAY_TOO_LONG = delayed_delivery_pb2.REFUSED_REASON_DELAY_TOO_LONG
    """The row is further ahead than the largest delay."""
    TIME_IN_SECONDS = delayed_delivery_pb2.REFUSED_REASON_TIME_IN_SECONDS
    """The time can only be meant in seconds."""
    DELAY_LEVEL = delayed_delivery_pb2.REFUSED_REASON_DELAY_LEVEL
    """The delay level does not exist."""


class Refused(RowsWithReasons[RefusedReason]):
    """A number of refused rows of a batch, with their indexes and reasons.

    Example: `for row, why in result.refused.items(): print(entry_id[row], why.name)`
    """

    known = RefusedReason

    def __new__(cls, index: NDArray[np.int64], reason: NDArray[np.int64]) -> Refused:
        made = super().__new__(cls, len(index))
        made.index, made.reason = index, reason
        return made

    @staticmethod
    def nothing() -> Refused:
        """Return a result without rows."""
        return Refused(np.empty(0, np.int64), np.empty(0, np.int64))

    @staticmethod
    def from_message(message: delayed_delivery_pb2.AddMessagesResponse) -> Refused:
        """Read the answer to an add."""
        return Refused(*rows_and_reasons(message.refused_index, message.refused_reason))

    @staticmethod
    def merge(parts: Sequence[tuple[int, Refused]]) -> Refused:
        """Combine the results of a batch's requests, each with the index of its first row."""
        return Refused(
            np.concatenate([part.index + first for first, part in parts]),
            np.concatenate([part.reason for _, part in parts]),
        )
