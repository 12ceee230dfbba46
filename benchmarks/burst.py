"""A million rows due in one second behind ten million that are not: how long until the last of them is received.

The rows are spread over the second; the clock starts with the first of it. The dispatcher listens from the start and
acknowledges everything.

Owns: the load and the clock. Does not own: receiving (`tarry_load`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import tarry
from benchmarks import load, report, tarry_load, workbench

NAME = "burst"
SUBSCRIPTION = "dispatcher"
RECEIVED, DURABLE = "last row received", "last acknowledgement durable"
SECOND_MS = 1_000
# From the first request until the second begins: so long, and so many times as long as adding should take.
LEAD_MS, LEAD_PER_ADDING = 3_000, 5


def run(bench: workbench.Workbench) -> report.Result:
    pending = bench.size(10_000_000, 60_000)
    count = bench.size(1_000_000, 20_000)
    rounds = workbench.Rounds(bench, NAME)
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        client.create_subscription(NAME, SUBSCRIPTION)
        bench.say(f"{NAME}: adding {pending:,} rows that stay pending")
        behind = load.in_order(load.over_a_day(pending, seed=bench.seed))
        added = tarry_load.add(client, NAME, behind, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
        rounds.check_count("pending rows, accepted", added.accepted, pending)
        lead_ms = LEAD_MS + int(1000 * LEAD_PER_ADDING * count * added.seconds / pending)
        with client.subscribe(NAME, SUBSCRIPTION, permits=tarry_load.PERMITS) as subscription:
            for number in range(1, bench.rounds + 1):
                # Each burst in ledgers of its own.
                first_ledger = (pending + number * count) // load.ROWS_PER_LEDGER + number
                turn = functools.partial(_burst, bench, rounds, client, subscription, count, first_ledger, lead_ms)
                rounds.turn(f"round {number} of {bench.rounds}", turn)
        rounds.check_count("pending rows, left", client.stats(NAME).pending, pending)
    return report.Result(
        NAME,
        {"rows": count, "pending": pending, "permits": tarry_load.PERMITS} | bench.parameters,
        [rounds.figure(RECEIVED, "s", report.Goal(most=2)), rounds.figure(DURABLE, "s")],
        rounds.problems,
    )


def _burst(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    client: tarry.Client,
    subscription: tarry.Subscription,
    count: int,
    first_ledger: int,
    lead_ms: int,
) -> Mapping[str, float]:
    second_ms = load.now_ms() + lead_ms
    due = load.random_due(count, from_ms=second_ms, until_ms=second_ms + SECOND_MS, seed=bench.seed)
    rows = load.in_order(due, first_ledger=first_ledger)
    added = tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
    rounds.check_in_time("burst", "adding ended after rows were due", load.now_ms() - second_ms)
    rounds.check_count("burst, accepted", added.accepted, count)
    drain = tarry_load.Drain(count)
    drain.run(subscription)
    rounds.check("burst", drain.problem(rows))
    return {
        RECEIVED: (drain.last_received_at_ms - second_ms) / 1000,
        DURABLE: (drain.durable_at_ms - second_ms) / 1000,
    }
