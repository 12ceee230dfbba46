"""Rows of a request that nothing was done with, each with its reason.

Owns: a count that tells which rows it counts and why, and what of an add is refused.
Does not own: the answers that have it (`tarry.results`); the meaning of a reason, which is the comment on it in
`proto/tarry/v1`.
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
    """A number of rows, with which and why."""

    known: ClassVar[type[enum.IntEnum]]
    """The reasons that there are."""
    index: NDArray[np.int64]
    """The rows in what was given, ascending."""
    reason: NDArray[np.int64]
    """Of each row a reason, or the number of one that this version does not know."""

    def items(self) -> Iterator[tuple[int, Reason | int]]:
        """Each row with its reason."""
        known = {int(each): each for each in self.known}
        for row, reason in zip(self.index.tolist(), self.reason.tolist(), strict=True):
            yield row, known.get(reason, reason)


def rows_and_reasons(
    index_field: Sequence[int], reason_field: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The columns of an answer that has a reason for each row, or one for all, or none that is told."""
    index, reason = wire.decode_indexes(index_field), wire.decode_indexes(reason_field)
    if len(reason) != len(index):
        reason = np.full(len(index), reason[0] if len(reason) else 0, np.int64)
    return index, reason


class OnInvalid(enum.IntEnum):
    """What happens to a row that cannot be stored with the time that is asked for: the delay is too long, the time is
    in seconds, or there is no such delay level.
    """

    REFUSE = delayed_delivery_pb2.ON_INVALID_REFUSE
    """The whole batch is refused."""
    RETURN = delayed_delivery_pb2.ON_INVALID_RETURN
    """It is not stored; its index is returned, and why. The others are stored."""


class RefusedReason(enum.IntEnum):
    """Why a row was not stored (OnInvalid.RETURN)."""

    DELAY_TOO_LONG = delayed_delivery_pb2.REFUSED_REASON_DELAY_TOO_LONG
    """It is further ahead than the largest delay."""
    TIME_IN_SECONDS = delayed_delivery_pb2.REFUSED_REASON_TIME_IN_SECONDS
    """The time can only be meant in seconds."""
    DELAY_LEVEL = delayed_delivery_pb2.REFUSED_REASON_DELAY_LEVEL
    """There is no such delay level."""


class Refused(RowsWithReasons[RefusedReason]):
    """How many rows of a batch were refused: a number, with which and why.

    Example: `for row, why in result.refused.items(): print(entry_id[row], why.name)`
    """

    known = RefusedReason

    def __new__(cls, index: NDArray[np.int64], reason: NDArray[np.int64]) -> Refused:
        made = super().__new__(cls, len(index))
        made.index, made.reason = index, reason
        return made

    @staticmethod
    def nothing() -> Refused:
        """No row."""
        return Refused(np.empty(0, np.int64), np.empty(0, np.int64))

    @staticmethod
    def from_message(message: delayed_delivery_pb2.AddMessagesResponse) -> Refused:
        """What an add was answered with."""
        return Refused(*rows_and_reasons(message.refused_index, message.refused_reason))

    @staticmethod
    def merge(parts: Sequence[tuple[int, Refused]]) -> Refused:
        """The result of a batch from those of its requests, each with the index of its first row."""
        return Refused(
            np.concatenate([part.index + first for first, part in parts]),
            np.concatenate([part.reason for _, part in parts]),
        )
