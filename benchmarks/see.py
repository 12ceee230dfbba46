"""What it takes to look at ten million pending rows: how many come due when, and which, in the next hour.

Owns: the load, what is asked, and that every answer is right. Does not own: how rows are sent (`tarry_load`).

Where rows were cancelled in every bucket, counts of segments do not tell how many are left: that is the harder case.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import grpc
import numpy as np
from google.protobuf import message

import tarry
from benchmarks import load, report, tarry_load, workbench
from examples import processes
from tarry import in_threads
from tarry.v1 import delayed_delivery_pb2, inspect_pb2

NAME = "see"
BUCKETS = 50
CANCELLED_ROWS = 1_000
PAGE_ROWS = 10_000
# Nothing comes due while it is looked at.
BEGINS_MS = 15 * 60_000
UNTOUCHED, CANCELLED = "untouched", "rows cancelled in every bucket"
ANSWER_S = 1.0
ALL, ALL_PAGES = "histogram of all", "all pages of the next hour"
MEMORY = ": growth of memory"

M = TypeVar("M", bound=message.Message)
Figures = dict[str, float]


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(10_000_000, 60_000)
    rounds = workbench.Rounds(bench, NAME)
    for name, order in (("in order", load.in_order), ("shuffled", functools.partial(load.shuffled, seed=bench.seed))):
        from_ms = load.now_ms() + BEGINS_MS
        due = load.random_due(count, from_ms=from_ms, until_ms=from_ms + load.DAY_MS, seed=bench.seed)
        rounds.turn(name, functools.partial(_look, bench, rounds, order(due), name, from_ms))
    figures = [
        rounds.figure(name, "MB") if name.endswith(MEMORY) else rounds.figure(name, "s", _goal(name))
        for name in rounds.names
    ]
    parameters = {"rows": count, "buckets": BUCKETS, "page_rows": PAGE_ROWS} | bench.parameters
    return report.Result(NAME, parameters, figures, rounds.problems)


def _goal(figure: str) -> report.Goal | None:
    """For one answer about the next hour."""
    return None if figure.endswith((ALL, ALL_PAGES)) else report.Goal(most=ANSWER_S)


def _look(
    bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows, name: str, from_ms: int
) -> Mapping[str, float]:
    rows_max = len(rows) // BUCKETS
    settings = {
        "bucket.min_index_count_per_bucket": rows_max,
        "bucket.rows_max": rows_max,
        "bucket.max_num_buckets": -1,
    }
    found: Figures = {}
    with bench.daemon(settings=settings) as daemon:
        with tarry.Client(daemon.address) as client:
            added = tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
            rounds.check_count(name, added.accepted, len(rows))
            client.seal(NAME)
            tarry_load.wait_for(client, NAME, "sealed all of it", lambda stats: not stats.mutable_rows)
        time.sleep(bench.rest_s)
        with in_threads.open_channel(daemon.address) as channel:
            asking = _Asking(daemon, channel, rounds, from_ms)
            asking.look(rows.deliver_at_ms, f"{name}, {UNTOUCHED}", found)
            left = np.ones(len(rows), np.bool_)
            chosen = np.random.default_rng(bench.seed).choice(len(rows), CANCELLED_ROWS, replace=False)
            left[chosen] = False
            asking.cancel(rows.ledger_id[chosen], rows.entry_id[chosen])
            asking.look(rows.deliver_at_ms[left], f"{name}, {CANCELLED}", found)
    return found


class _Asking:
    """Asks one daemon, and checks the answers against the due times of the rows that are left."""

    def __init__(
        self, daemon: processes.DaemonProcess, channel: grpc.Channel, rounds: workbench.Rounds, from_ms: int
    ) -> None:
        self._daemon = daemon
        self._channel = channel
        self._rounds = rounds
        self._from_ms = from_ms
        self._until_ms = from_ms + load.HOUR_MS

    def cancel(self, ledger_id: load.U64, entry_id: load.U64) -> None:
        request = delayed_delivery_pb2.CancelMessagesRequest(
            topic=NAME, ledger_id=ledger_id.tolist(), entry_id=entry_id.tolist()
        )
        answer = self._ask("DelayedDelivery/CancelMessages", request, delayed_delivery_pb2.CancelMessagesResponse)
        self._rounds.check_count("cancelled", answer.cancelled, len(entry_id))

    def look(self, due: load.U64, name: str, found: Figures) -> None:
        wanted = np.sort(due[due < np.uint64(self._until_ms)])
        minutes = np.bincount((wanted - np.uint64(self._from_ms)) // np.uint64(60_000), minlength=60)
        for what, ask in (
            ("histogram of the next hour", functools.partial(self._histogram, minutes, len(due))),
            (ALL, functools.partial(self._whole, len(due))),
            ("first page of the next hour", functools.partial(self._page, wanted)),
            (ALL_PAGES, functools.partial(self._pages, wanted)),
        ):
            self._timed(f"{name}: {what}", ask, found)

    def _timed(self, figure: str, ask: Callable[[], str | None], found: Figures) -> None:
        before = self._daemon.usage().resident_bytes
        began_s = time.perf_counter()
        problem = ask()
        found[figure] = time.perf_counter() - began_s
        found[figure + MEMORY] = (self._daemon.usage().resident_bytes - before) / 1e6
        self._rounds.check(figure, problem)

    def _histogram(self, minutes: np.ndarray[Any, Any], pending: int) -> str | None:
        request = inspect_pb2.GetHistogramRequest(
            topic=NAME, from_ms=self._from_ms, until_ms=self._until_ms, width_ms=60_000
        )
        answer = self._ask("Inspect/GetHistogram", request, inspect_pb2.GetHistogramResponse)
        wrong = answer.rows != minutes.tolist() or answer.rows_after != pending - minutes.sum() or answer.rows_before
        return f"wrong counts: {answer}" if wrong else None

    def _whole(self, pending: int) -> str | None:
        request = inspect_pb2.GetHistogramRequest(topic=NAME)
        answer = self._ask("Inspect/GetHistogram", request, inspect_pb2.GetHistogramResponse)
        return None if sum(answer.rows) == pending else f"{sum(answer.rows):,} rows of {pending:,}"

    def _page(self, wanted: load.U64) -> str | None:
        answer = self._scheduled("")
        same = np.array_equal(np.array(answer.deliver_at_ms, np.uint64), wanted[: len(answer.deliver_at_ms)])
        return None if same else "other rows than the first"

    def _pages(self, wanted: load.U64) -> str | None:
        times = []
        token = ""
        while True:
            answer = self._scheduled(token)
            times.append(np.array(answer.deliver_at_ms, np.uint64))
            token = answer.next_page_token
            if not token:
                break
        came = np.concatenate(times)
        return None if np.array_equal(came, wanted) else f"{len(came):,} rows, or others than the {len(wanted):,}"

    def _scheduled(self, token: str) -> inspect_pb2.ListScheduledResponse:
        request = inspect_pb2.ListScheduledRequest(
            topic=NAME, from_ms=self._from_ms, until_ms=self._until_ms, page_size=PAGE_ROWS, page_token=token
        )
        return self._ask("Inspect/ListScheduled", request, inspect_pb2.ListScheduledResponse)

    def _ask(self, method: str, request: message.Message, answer_type: type[M]) -> M:
        call: Any = self._channel.unary_unary(
            f"/tarry.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer_type.FromString,
        )
        answer: M = call(request, timeout=60)
        return answer
