"""Runs the main job on real input: 336,776 flights through a daemon that is killed twice.

    python -m examples.flights [--store local|s3] [--seconds 60] [--seed N] [--json]

Every flight of 2013 is added to a `tarryd` that this program starts, due at its scheduled departure, the year
compressed onto a minute. Due rows are received through one subscription and acknowledged durably. The daemon is killed
with SIGKILL once while adds are in flight and once while deliveries are, each time with rows pending in sealed buckets
and in the mutable one, and started again on the same root. At the end each flight is accounted for by identity. The
exit status is the verdict.

`examples.flights_log` has the data, `examples.relay` receives, `examples.verdict` judges, and `examples.summary` draws.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tarry
from examples import flights_log, processes, relay, summary, verdict

TOPIC = "flights"
SUBSCRIPTION = "departures"
ROWS_PER_BATCH = 1_000
BATCHES_IN_FLIGHT = 16
# Smaller than the default, so that a third of a million rows make many buckets
SETTINGS: dict[str, object] = {"bucket.min_index_count_per_bucket": 20_000}
# Time from the first add until the first flight is due (ms): for the adds, one kill and the recovery
LEAD_MS = {"local": 6_000, "s3": 15_000}
# The hold of a relay that passes a batch on and waits for its receiver (seconds)
HOLD_S = 0.1
PATIENCE_S = 60.0
EXIT_INTERRUPTED = 128 + signal.SIGINT


class DemoFailed(Exception):
    """The error of a run that did not reach the point it has to show."""


@dataclasses.dataclass(frozen=True)
class Options:
    store: str
    seconds: int
    seed: int
    directory: Path


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """The figures when all rows were added."""

    rows_per_s: float
    bucket_bytes_per_row: float
    stored_bytes: int
    resident_bytes: int


class Demo:
    """One run against a daemon that serves."""

    def __init__(
        self,
        options: Options,
        log: flights_log.FlightsLog,
        daemon: processes.DaemonProcess,
        client: tarry.Client,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._log = log
        self._daemon = daemon
        self._client = client
        self._say = say
        self._first_ms = _now_ms() + LEAD_MS[options.store]
        self._due_ms = log.deliver_at_ms(self._first_ms, options.seconds * 1_000)
        self.account = verdict.Account(log.ledger_id, log.entry_id, self._due_ms, log.key_hash)
        self._kills: list[summary.Kill] = []
        self._highest_bytes = 0

    def run(self, stored_bytes: Callable[[], int]) -> summary.Figures:
        """Add, kill, receive and account. Raises `DemoFailed`."""
        began_s = time.monotonic()
        idle_bytes = self._daemon.usage().resident_bytes
        self._client.create_subscription(TOPIC, SUBSCRIPTION)
        with (
            self._client.subscribe(TOPIC, SUBSCRIPTION) as subscription,
            relay.Relay(subscription, self.account, hold_s=HOLD_S) as receiving,
        ):
            loaded = self._add_all(stored_bytes)
            self._kill_while_handing_out(receiving)
            receiving.wait_until(
                lambda: self.account.durable == len(self.account),
                self._options.seconds + LEAD_MS[self._options.store] / 1000 + PATIENCE_S,
            )
        return self._figures(began_s, idle_bytes, loaded)

    def _add_all(self, stored_bytes: Callable[[], int]) -> _Loaded:
        rows = len(self._log)
        batches = -(-rows // ROWS_PER_BATCH)
        burst = int(batches * self._random.uniform(0.4, 0.7))
        after_burst = burst + BATCHES_IN_FLIGHT
        with self._client.add_stream(TOPIC, in_flight=BATCHES_IN_FLIGHT, timeout_s=PATIENCE_S) as stream:
            began_s = time.monotonic()
            for number in range(burst):
                self._send(stream, number)
            stream.flush(PATIENCE_S)
            adding_s = time.monotonic() - began_s
            self._kill_while_adding(stream, range(burst, after_burst))
            began_s = time.monotonic()
            for number in range(after_burst, batches):
                self._send(stream, number)
            stream.flush(PATIENCE_S)
            adding_s += time.monotonic() - began_s
        stats = self._client.stats(TOPIC)
        return _Loaded(
            rows_per_s=(rows - BATCHES_IN_FLIGHT * ROWS_PER_BATCH) / adding_s,
            bucket_bytes_per_row=stats.bucket_bytes / max(1, rows - stats.mutable_rows),
            stored_bytes=stored_bytes(),
            resident_bytes=self._daemon.usage().resident_bytes,
        )

    def _send(self, stream: tarry.AddStream, number: int) -> Future[tarry.AddResult]:
        first = number * ROWS_PER_BATCH
        rows = slice(first, min(first + ROWS_PER_BATCH, len(self._log)))
        answer = stream.add(
            self._log.ledger_id[rows],
            self._log.entry_id[rows],
            deliver_at_ms=self._due_ms[rows],
            key_hash=self._log.key_hash[rows],
        )
        answer.add_done_callback(lambda done: self._note_answer(done, rows))
        return answer

    def _note_answer(self, done: Future[tarry.AddResult], rows: slice) -> None:
        if done.exception() is None:
            self.account.note_answered(rows, _now_ms())

    def _kill_while_adding(self, stream: tarry.AddStream, numbers: range) -> None:
        stats = self._wait_for_stats(lambda stats: stats.buckets > 0 and stats.mutable_rows > 0)
        self._note_memory()
        answered = threading.Event()
        sent = [(number, self._send(stream, number)) for number in numbers]
        unanswered = [(number, answer) for number, answer in sent if not answer.done()]
        at_ms = self._kill(f"{len(unanswered)} requests in flight")
        for number, answer in unanswered:
            first = number * ROWS_PER_BATCH
            self.account.note_sent_again(slice(first, first + ROWS_PER_BATCH))
            answer.add_done_callback(lambda _: answered.set())
        serving_ms = self._start_again()
        if not answered.wait(PATIENCE_S):
            raise DemoFailed(f"no add was answered within {PATIENCE_S:g} s of the restart")
        working_ms = _now_ms()
        stream.flush(PATIENCE_S)
        self._note_kill("adds in flight", at_ms, stats, serving_ms, working_ms, len(unanswered))

    def _kill_while_handing_out(self, receiving: relay.Relay) -> None:
        part = self._random.uniform(0.35, 0.55)
        wanted = int(part * len(self.account))
        if not receiving.wait_until(lambda: self.account.received >= wanted, self._options.seconds + PATIENCE_S):
            raise DemoFailed(f"only {self.account.received} rows came, and {wanted} should have")
        stats = self._wait_for_stats(
            lambda stats: stats.buckets > 0 and stats.mutable_rows > 0 and stats.subscriptions[0].in_flight > 0
        )
        self._note_memory()
        at_ms = self._kill(f"{stats.subscriptions[0].in_flight:,} rows handed out and not acknowledged")
        serving_ms = self._start_again()
        if not receiving.wait_until(lambda: receiving.first_received_above_ms(stats.epoch) is not None, PATIENCE_S):
            raise DemoFailed(f"nothing was handed out within {PATIENCE_S:g} s of the restart")
        working_ms = receiving.first_received_above_ms(stats.epoch) or _now_ms()
        self._note_kill("hand-outs in flight", at_ms, stats, serving_ms, working_ms, 0)

    def _wait_for_stats(self, wanted: Callable[[tarry.TopicStats], bool]) -> tarry.TopicStats:
        """Read stats until they meet the condition for the kill. Raises `DemoFailed`."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            stats = self._client.stats(TOPIC)
            if wanted(stats):
                return stats
            if time.monotonic() >= deadline_s:
                raise DemoFailed(f"the kill never met what it has to: {stats}")
            time.sleep(0.01)

    def _kill(self, while_there_are: str) -> int:
        """Kill the daemon; return when (Unix ms)."""
        at_ms = _now_ms()
        self._daemon.kill()
        self._say(f"kill -9 tarryd, with {while_there_are}; it is started again")
        return at_ms

    def _start_again(self) -> int:
        self._daemon.start_serving(PATIENCE_S)
        return _now_ms()

    def _note_memory(self) -> None:
        """Note the peak memory, which is lost with the process."""
        self._highest_bytes = max(self._highest_bytes, self._daemon.usage().resident_bytes_max)

    def _note_kill(
        self, name: str, at_ms: int, stats: tarry.TopicStats, serving_ms: int, working_ms: int, requests_in_flight: int
    ) -> None:
        self._kills.append(
            summary.Kill(
                name=name,
                at_ms=at_ms,
                buckets=stats.buckets,
                sealed_rows=stats.pending - stats.mutable_rows,
                mutable_rows=stats.mutable_rows,
                backlog=sum(each.backlog for each in stats.subscriptions),
                requests_in_flight=requests_in_flight,
                rows_in_flight=sum(each.in_flight for each in stats.subscriptions)
                + requests_in_flight * ROWS_PER_BATCH,
                serving_after_s=(serving_ms - at_ms) / 1000,
                working_after_s=(working_ms - at_ms) / 1000,
            )
        )

    def _figures(self, began_s: float, idle_bytes: int, loaded: _Loaded) -> summary.Figures:
        left = self._client.stats(TOPIC)
        self._note_memory()
        status = self._daemon.terminate()
        came = self.account.first_received_at_ms != np.iinfo(np.int64).max
        due, first = self.account.deliver_at_ms[came], self.account.first_received_at_ms[came]
        on_arrival = due <= self.account.answered_at_ms[came]
        delayed = np.zeros(len(due), dtype=np.bool_)
        for kill in self._kills:
            back_ms = kill.at_ms + round(kill.working_after_s * 1000)
            delayed |= (due <= back_ms) & (first >= kill.at_ms)
        delayed &= ~on_arrival
        a_second = np.bincount((first - first.min()) // 1000) if len(first) else np.zeros(1, dtype=np.int64)
        found = self.account.verdict()
        pending = left.pending + sum(each.backlog for each in left.subscriptions)
        rules = (
            *found.rules,
            verdict.Rule("the daemon holds nothing any more", pending),
            verdict.Rule("the kills met requests and rows in flight", sum(k.rows_in_flight == 0 for k in self._kills)),
            verdict.Rule("the daemon ends in order when told to", int(status != 0)),
        )
        return summary.Figures(
            store=self._options.store,
            settings=SETTINGS,
            rows=len(self.account),
            span_s=self._options.seconds,
            run_s=time.monotonic() - began_s,
            add_rows_per_s=loaded.rows_per_s,
            receive_rows_per_s=float(np.median(a_second[a_second > 0])) if a_second.any() else 0.0,
            ordinary=summary.Lateness.of((first - due)[~on_arrival & ~delayed]),
            late_on_arrival=summary.Lateness.of((first - due)[on_arrival]),
            delayed_by_kills=summary.Lateness.of((first - due)[delayed]),
            kills=tuple(self._kills),
            bucket_bytes_per_row=loaded.bucket_bytes_per_row,
            stored_bytes_per_row=loaded.stored_bytes / len(self.account),
            resident_idle_bytes=idle_bytes,
            resident_loaded_bytes=loaded.resident_bytes,
            resident_bytes_max=self._highest_bytes,
            due_histogram=summary.due_histogram(self.account.deliver_at_ms),
            verdict=dataclasses.replace(found, rules=rules),
        )


def run(options: Options, console: Console) -> summary.Figures:
    """Start the processes, run, and end them.

    Raises `DemoFailed`, `processes.ProcessFailed`, `tarry.TarryError`.
    """
    with contextlib.ExitStack() as stack:
        with console.status("reading the flights"):
            log = flights_log.read()
        settings, stored_bytes = _store(options, stack)
        daemon = stack.enter_context(processes.DaemonProcess("tarryd", options.directory, settings | SETTINGS))
        with console.status("starting tarryd"):
            daemon.start_serving(PATIENCE_S)
        client = stack.enter_context(tarry.Client(daemon.address, timeout_s=PATIENCE_S))
        try:
            demo = Demo(options, log, daemon, client, lambda text: console.print(text, markup=False, highlight=False))
            with _progress(console, demo.account):
                figures = demo.run(stored_bytes)
        except (DemoFailed, tarry.TarryError) as error:
            raise daemon.failed(f"did not do its part: {error}") from error
        if not figures.verdict.kept:
            console.print(daemon.failed("broke a promise"), style="dim", markup=False, highlight=False)
        return figures


def _store(options: Options, stack: contextlib.ExitStack) -> tuple[dict[str, object], Callable[[], int]]:
    """Return the settings of the store, and a function that counts the bytes on it."""
    if options.store == "local":
        root = options.directory / "root"
        return processes.local_store(root), lambda: sum(
            path.stat().st_size for path in root.rglob("*") if path.is_file()
        )
    server = stack.enter_context(processes.S3ServerProcess("s3", options.directory))
    server.start()
    return server.settings(), server.stored_bytes


@contextlib.contextmanager
def _progress(console: Console, account: verdict.Account) -> Iterator[None]:
    """Show bars that follow the account until the context is left."""
    columns = (TextColumn("{task.description:<13}"), BarColumn(60), MofNCompleteColumn(), TimeElapsedColumn())
    ended = threading.Event()
    with Progress(*columns, console=console) as progress:
        bars = {name: progress.add_task(name, total=len(account)) for name in ("answered", "received", "durable")}

        def follow() -> None:
            while not ended.wait(0.1):
                show()

        def show() -> None:
            for name, bar in bars.items():
                progress.update(bar, completed=getattr(account, name))

        thread = threading.Thread(target=follow, name="progress")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            show()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="336,776 real flights through a daemon that is killed twice.")
    parser.add_argument("--store", choices=sorted(LEAD_MS), default="local", help="default: %(default)s")
    parser.add_argument("--seconds", type=int, default=60, help="span of the due times; default: %(default)s")
    parser.add_argument("--seed", type=int, default=2013, help="of the moments of the kills; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--directory", type=Path, help="for the store and the logs; default: a temporary one")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        directory = arguments.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tarry-demo-")))
        directory.mkdir(parents=True, exist_ok=True)
        options = Options(arguments.store, arguments.seconds, arguments.seed, directory)
        try:
            figures = run(options, console)
        except processes.ProcessFailed as error:
            console.print(f"failed: {error}", style="red", markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted; tarryd is ended")
            return EXIT_INTERRUPTED
    if arguments.json:
        print(json.dumps(figures.as_json(), indent=2))
    else:
        summary.draw(Console(), figures)
    return 0 if figures.verdict.kept else 1


if __name__ == "__main__":
    sys.exit(main())
