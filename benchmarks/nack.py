"""Rows a second negatively acknowledged, durably, and handed out again, every row acknowledged then.

All rows come due again at one moment, so that what is measured after it is the hand-out. `handed out`: rows that the
dispatcher received from Tarry; `ordinary`: messages that Tarry has never seen.

Owns: the contenders and the account: each row came again, once, not before its time, and with its count.
Does not own: receiving and acknowledging (`tarry_load`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping

import numpy as np

import tarry
from benchmarks import load, report, tarry_load, workbench

NAME = "nack"
SUBSCRIPTION = "dispatcher"
HANDED_OUT, ORDINARY = "handed out", "ordinary"
# Until the rows are due again, in a full run and in a quick one: what the negative acknowledgements may take.
LEAD_MS, QUICK_LEAD_MS = 10_000, 4_000
Columns = tuple[load.U64, load.U64, load.U64]
GOAL = report.Goal(least=3e5)


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(1_000_000, 20_000)
    rounds = workbench.Rounds(bench, NAME)
    rounds.run({name: functools.partial(_turn, bench, rounds, count, name) for name in (HANDED_OUT, ORDINARY)})
    figures = [
        rounds.figure(figure, "rows/s", GOAL)
        for name in (HANDED_OUT, ORDINARY)
        for figure in (_nacked(name), _again(name))
    ]
    figures += [rounds.figure(f"{name}, resident while nacked", "B/row") for name in (HANDED_OUT, ORDINARY)]
    return report.Result(NAME, {"rows": count} | bench.parameters, figures, rounds.problems)


def _nacked(name: str) -> str:
    return f"{name}, negatively acknowledged"


def _again(name: str) -> str:
    return f"{name}, handed out again and acknowledged"


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, count: int, name: str) -> Mapping[str, float]:
    rows = load.in_order(load.random_due(count, from_ms=load.now_ms() - 1_000, until_ms=load.now_ms(), seed=bench.seed))
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        client.create_subscription(NAME, SUBSCRIPTION)
        if name == ORDINARY:
            rows = load.Rows(rows.ledger_id, rows.entry_id, np.zeros(count, np.uint64))
        else:
            tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
        with client.subscribe(NAME, SUBSCRIPTION, permits=count) as subscription:
            parts: list[tarry.Batch] | list[Columns]
            if name == HANDED_OUT:
                batches = _received(subscription, count)
                rows = tarry_load.rows_of(batches)
                parts = [
                    batch.take(slice(first, first + bench.batch_rows))
                    for batch in batches
                    for first in range(0, len(batch), bench.batch_rows)
                ]
            else:
                parts = [(part.ledger_id, part.entry_id, part.deliver_at_ms) for part in rows.batches(bench.batch_rows)]
            before = daemon.usage()
            lead_ms = bench.size(LEAD_MS, QUICK_LEAD_MS)
            due_ms = load.now_ms() + lead_ms
            began_s = time.perf_counter()
            answers = [subscription.nack(part, delay_ms=due_ms - load.now_ms()) for part in parts]
            subscription.flush(tarry_load.PATIENCE_S)
            seconds = time.perf_counter() - began_s
            resident_bytes = daemon.usage().resident_bytes - before.resident_bytes
            rounds.check_count(f"{name}, ignored", sum(answer.result().ignored for answer in answers), 0)
            if load.now_ms() >= due_ms:
                raise TimeoutError(f"{count:,} rows were not nacked within {lead_ms / 1000:g} s")
            drain = tarry_load.Drain(count)
            drain.run(subscription)
        rounds.check(name, drain.problem(rows) or _early(drain, due_ms))
        rounds.check_count(f"{name}, backlog left", client.stats(NAME).subscriptions[0].backlog, 0)
    return {
        _nacked(name): count / seconds,
        _again(name): count / (drain.durable_s - drain.first_received_s),
        f"{name}, resident while nacked": resident_bytes / count,
    }


def _received(subscription: tarry.Subscription, count: int) -> list[tarry.Batch]:
    """So many rows, as they were handed out."""
    batches: list[tarry.Batch] = []
    while sum(map(len, batches)) < count:
        batch = subscription.receive(timeout_s=tarry_load.PATIENCE_S)
        if batch is None:
            raise TimeoutError(f"{sum(map(len, batches)):,} of {count:,} rows came")
        batches.append(batch)
    return batches


def _early(drain: tarry_load.Drain, due_ms: int) -> str | None:
    """What is wrong with the times and the counts of what came again; None when nothing is."""
    early = sum(int(np.count_nonzero(batch.received_at_ms_by_row < due_ms)) for batch in drain.batches)
    uncounted = sum(int(np.count_nonzero(batch.redelivery_count != 1)) for batch in drain.batches)
    if early or uncounted:
        return f"{early:,} rows came before their time, {uncounted:,} with another count than 1"
    return None
