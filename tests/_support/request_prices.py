"""What requests to S3 cost by Amazon's list prices.

Owns: prices, and the sum of a month. Does not own: how requests are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DOLLARS_A_MILLION: Final[Mapping[str, float]] = {"GET": 0.4, "HEAD": 0.4, "LIST": 5.0, "PUT": 5.0, "DELETE": 0.0}
"""S3 Standard in us-east-1, by kind of request."""

HOURS_A_MONTH: Final = 730


def dollars_a_month(requests_an_hour: Mapping[str, float]) -> float:
    """The price of so many requests an hour, by kind, for a month."""
    dollars = sum(count * DOLLARS_A_MILLION[kind] for kind, count in requests_an_hour.items())
    return dollars * HOURS_A_MONTH / 1_000_000
