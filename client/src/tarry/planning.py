"""What the plans of all calls share.

Owns: the settings of one client that a plan needs, its deadline and attempts, and arguments that several calls check.
Does not own: the plans (`tarry.calls`, `tarry.redelivery_calls`, `tarry.deletion_calls`).
"""

from __future__ import annotations

from tarry import attempts, channels, columns, reasons, retry, wire
from tarry.v1 import inspect_pb2


class Planning:
    """The base of what makes plans."""

    def __init__(
        self, target: str, policy: retry.RetryPolicy, *, timeout_s: float, rows_max: int, bytes_max: int
    ) -> None:
        """Raises InvalidArgument: a port that there is not."""
        channels.check_target(target)
        self.owners = attempts.Owners(target)
        self.policy = policy
        self.timeout_s = timeout_s
        self.rows_max = rows_max
        self.bytes_max = bytes_max

    def deadline(self, timeout_s: float | None, *, longer_by_s: float = 0.0) -> retry.Deadline:
        return retry.Deadline.after((self.timeout_s if timeout_s is None else timeout_s) + longer_by_s)

    def asking(self, timeout_s: float | None, *, longer_by_s: float = 0.0) -> attempts.Asking:
        return attempts.Asking(self.owners, self.policy, self.deadline(timeout_s, longer_by_s=longer_by_s))


def needs_of(on_invalid: reasons.OnInvalid) -> attempts.Need | None:
    """What an add needs of a daemon."""
    return attempts.INVALID_RETURNED if on_invalid is reasons.OnInvalid.RETURN else None


def check_names(topic: str, subscription: str = "") -> None:
    """Refuses names that have no UTF-8 form: raises InvalidArgument."""
    wire.utf8("topic", topic)
    wire.utf8("subscription", subscription)


def time_range(first_name: str, first: int | None, last_name: str, last: int | None) -> dict[str, int]:
    """Both ends of a range of times; 0 where one is open. Raises InvalidArgument."""
    for name, value in ((first_name, first), (last_name, last)):
        columns.check_unsigned(name, value or 0, bits=64)
    return {first_name: first or 0, last_name: last or 0}


def ledger_range(ledgers: tuple[int, int] | None) -> inspect_pb2.LedgerRange | None:
    """A range of ledgers, both ends included; None: all. Raises InvalidArgument."""
    if ledgers is None:
        return None
    first, last = ledgers
    columns.check_unsigned("first_ledger_id", first, bits=64)
    columns.check_unsigned("last_ledger_id", last, bits=64)
    return inspect_pb2.LedgerRange(first_ledger_id=first, last_ledger_id=last)
