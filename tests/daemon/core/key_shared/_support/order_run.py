"""A long run of the order oracle.

`python -m tests.daemon.core.key_shared._support.order_run --operations 1000 --seed 1`

Owns: which combinations of policies there are, and printing what a run did.
Does not own: the run (`order_driver`).
"""

from __future__ import annotations

import argparse
import itertools
import sys

from storage_backends.formats.manifest import HashSelector, KeyOrder, NackOrder
from tests.daemon.core.key_shared._support.order_driver import OrderDriver, Profile

COMBINATIONS = tuple(Profile(*policy) for policy in itertools.product(HashSelector, KeyOrder, NackOrder))
# Besides: neither of the orders, few READY or IN_FLIGHT rows, and consumers that only join.
SPECIAL = (
    Profile(out_of_order=True),
    Profile(nack_order=NackOrder.BLOCK_KEY, out_of_order=True),
    Profile(ready_rows_max=20),
    Profile(nack_order=NackOrder.BLOCK_KEY, ready_rows_max=20),
    Profile(order=KeyOrder.LAST_SENT_POSITION, ready_rows_max=20),
    Profile(in_flight_rows_max=12),
    Profile(nack_order=NackOrder.BLOCK_KEY, in_flight_rows_max=12),
    Profile(order=KeyOrder.LAST_SENT_POSITION, plain=True),
)
PROFILES = COMBINATIONS + SPECIAL


def told(driver: OrderDriver) -> str:
    counts = ", ".join(f"{what} {count:,}" for what, count in sorted(driver.pair.counted.items()))
    return f"{driver.profile}: {driver.operations:,} operations, {driver.oracle.deliveries:,} deliveries; {counts}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000, help="of each combination")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="combinations whose name contains this")
    chosen = parser.parse_args(arguments)
    for profile in PROFILES:
        if chosen.only in str(profile):
            driver = OrderDriver(profile, chosen.seed)
            try:
                driver.run(chosen.operations)
            except BaseException:
                sys.stderr.write(f"{profile}, seed {chosen.seed}: operation {driver.operations:,}\n")
                raise
            sys.stdout.write(told(driver) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
