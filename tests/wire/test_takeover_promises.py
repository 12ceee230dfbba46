"""What is promised across restarts and takeovers, with real processes and the client library: the order of a key, that
CANCELLED and RESCHEDULED are true, and that a key is at one consumer.

Runs of the same story beyond the first are long: a break shows in some of them only.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import grpc
import pytest

import tarry
from examples import processes
from tarry.v1 import delayed_delivery_pb2
from tests._support.processes import Daemons
from tests._support.stubs import Stub
from tests.client.cli._support.shell import Shell
from tests.wire._support import traffic
from tests.wire._support.listening import PATIENCE_S, Listener, Position, by_key, shared

RUNS = [0, *(pytest.param(run, marks=pytest.mark.long) for run in range(1, 20))]
KEY = 0x5EED
BY_KEY = tarry.SubscriptionPolicy(key_shared=tarry.KeySharedPolicy())


def add(client: tarry.Client, topic: str, ledger: int, rows: int, due_ms: int) -> None:
    """Rows of one key that are due together."""
    client.add(topic, ledger, range(rows), deliver_at_ms=[due_ms] * rows, key_hash=[KEY] * rows)


# ---- the order of a key

ROWS = 3_000
SETTINGS: dict[str, Mapping[str, object]] = {
    "as it is": {},
    "nothing is read ahead": {"delivery.lookahead_ms": 0},
    "segments of ten rows": {
        "delivery.lookahead_ms": 0,
        "bucket.max_indexes_per_bucket_snapshot_segment": 10,
        "bucket.min_indexes_per_bucket_snapshot_segment": 0,
    },
}


def first_of_a_key(address: str, topic: str, rows: int) -> list[Position]:
    """The rows that come to one consumer, each when it comes first. It opens as soon as anybody answers."""
    first: dict[Position, None] = {}
    consumer = tarry.Consumer("one", permits=2 * rows)
    with (
        tarry.Client(address, timeout_s=PATIENCE_S) as client,
        client.subscribe_key_shared(topic, "by key", consumers=[consumer]) as subscription,
    ):
        while len(first) < rows:
            event = subscription.receive(timeout_s=PATIENCE_S)
            assert isinstance(event, tarry.ConsumerBatch), f"{len(first)} of {rows} rows came, then {event}"
            first |= dict.fromkeys(zip(event.ledger_id.tolist(), event.entry_id.tolist(), strict=True))
    return list(first)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("successor", ["the same one", "a standby"])
def test_a_key_keeps_its_order_when_its_owner_is_killed_and_a_consumer_comes_at_once(
    successor: str, settings: str, run: int, daemons: Daemons, tmp_path: Path
) -> None:
    configured = {**processes.local_store(tmp_path / "root"), "daemon.shards": 2, **SETTINGS[settings]}
    owner = daemons.make("owner", configured)
    owner.start_serving()
    with tarry.Client(owner.address, timeout_s=PATIENCE_S) as client:
        client.create_subscription("topic", "by key", BY_KEY)
        due_ms = traffic.now_ms()
        add(client, "topic", 1, ROWS, due_ms)
        assert client.seal("topic").rows == ROWS
        add(client, "topic", 2, ROWS, due_ms + 1)
    next_owner = owner
    if successor == "a standby":
        next_owner = daemons.make("standby", configured)
        next_owner.start()
        next_owner.wait_for_log("waiting for daemon owner")
    owner.kill()
    if next_owner is owner:
        owner.start()
    came = first_of_a_key(next_owner.address, "topic", 2 * ROWS)
    assert came == [(ledger, entry) for ledger in (1, 2) for entry in range(ROWS)]


# ---- an owner that was paused

# A daemon that is silent is suspected after a few of these; one that has not confirmed its ownership for as long as
# that hands nothing out.
HEARTBEAT_S = 0.5
UNCONFIRMED_S = 15.0
# The owner is paused for so long at least, and rows come due a moment before its end: it hands them out when it wakes.
PAUSE_S, DUE_AFTER_S = 7.5, 7.0
# On a busy machine it may take longer until another one serves, or the paused one goes on: then nothing is shown.
TRIES = 10
ROWS_A_TOPIC = 200
LATER_MS = 3_600_000


class Late(Exception):
    """The machine was too busy for this try to show anything."""


class Withdrawals:
    """Half of the rows are cancelled and the others rescheduled, all at once: by plain calls, which wait for the
    answer, by the library, which is told to wait, and by the command. A context manager: its end waits for all answers.

    `answered`: entries of which it was said what became of them, `left`: those that were said to have left. `told`:
    what the command told a person meanwhile.
    """

    def __init__(self, client: tarry.Client, address: str) -> None:
        self.answered: set[int] = set()
        self.left: set[int] = set()
        self.told = ""
        self._client = client
        self._channel = grpc.insecure_channel(address, options=traffic.CHANNEL_OPTIONS)
        self._shell = Shell(address)
        ways = (self._cancel, self._reschedule, self._cancel_by_command, self._reschedule_by_library)
        quarter = ROWS_A_TOPIC // len(ways)
        self._threads = [
            threading.Thread(target=way, args=(range(number * quarter, (number + 1) * quarter),))
            for number, way in enumerate(ways)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._channel.close()

    def _note(self, entries: range, *stay: Iterable[int]) -> None:
        """`stay`: the rows of the request that are as they were."""
        self.left |= {*entries} - {entries[row] for rows in stay for row in rows}
        self.answered |= {*entries}

    def _cancel(self, entries: range) -> None:
        request = delayed_delivery_pb2.CancelMessagesRequest(topic="withdrawn", ledger_id=[1], entry_id=entries)
        answer = self._stub.CancelMessages(request, timeout=PATIENCE_S)
        self._note(entries, answer.not_found_index, answer.already_due_index, answer.in_flight_index)

    def _reschedule(self, entries: range) -> None:
        request = delayed_delivery_pb2.RescheduleMessagesRequest(
            topic="withdrawn", ledger_id=[1], entry_id=entries, delay_ms=[LATER_MS]
        )
        answer = self._stub.RescheduleMessages(request, timeout=PATIENCE_S)
        self._note(entries, answer.not_found_index, answer.already_due_index, answer.in_flight_index)

    @property
    def _stub(self) -> Stub:
        return Stub(delayed_delivery_pb2, self._channel)

    def _reschedule_by_library(self, entries: range) -> None:
        answer = self._client.reschedule("withdrawn", 1, entries, delay_ms=LATER_MS)
        self._note(entries, answer.not_found_index, answer.already_due_index, answer.in_flight_index)

    def _cancel_by_command(self, entries: range) -> None:
        result = self._shell.result(f"cancel withdrawn --ledger 1 --entries {entries[0]}-{entries[-1]} --json")
        said = json.loads(result.stdout)
        stay = [each for why in ("not_found", "already_due", "in_flight") for each in said[why]]
        self._note(entries, *(range(first - entries[0], last - entries[0] + 1) for _, first, last in stay))
        self.told = result.stderr


@contextlib.contextmanager
def paused(owner: processes.DaemonProcess) -> Iterator[float]:
    """The owner is paused; when, monotonic. It goes on at the end, if it has not been resumed, whatever happens."""
    at_s = time.monotonic()
    owner.stop()
    try:
        yield at_s
    finally:
        owner.resume()


def resume_in_time(owner: processes.DaemonProcess, paused_at_s: float) -> None:
    """Resumes the owner when its rows have come due. Raises Late when it may hand out nothing any more."""
    threading.Event().wait(max(0.0, paused_at_s + PAUSE_S - time.monotonic()))
    owner.resume()
    if time.monotonic() > paused_at_s + UNCONFIRMED_S - 2:
        raise Late


@pytest.mark.parametrize("run", RUNS)
def test_what_is_said_after_a_takeover_from_a_paused_owner_stays_true_when_that_wakes(
    run: int, daemons: Daemons, tmp_path: Path
) -> None:
    for number in range(TRIES):
        with contextlib.suppress(Late):
            overtaken_while_paused(daemons, tmp_path / f"root-{number}", f"{number}")
            return
    raise AssertionError(f"the machine was too busy {TRIES} times: the test shows nothing")


def overtaken_while_paused(daemons: Daemons, root: Path, name: str) -> None:
    """Rows of one topic are cancelled and rescheduled at the new owner, those of another one go to consumers by key;
    then the former one wakes, and hands out both.
    """
    settings = {
        **processes.local_store(root),
        # Files are not taken over while the process lives.
        "store.log_form": "objects",
        "daemon.shards": 2,
        "ownership.heartbeat_interval_s": HEARTBEAT_S,
    }
    owner, successor = (daemons.make(f"{each}-{name}", settings) for each in ("owner", "successor"))
    owner.start_serving()
    successor.start()
    successor.wait_for_log(f"waiting for daemon owner-{name}")
    with (
        tarry.Client(owner.address, timeout_s=PATIENCE_S) as at_owner,
        tarry.Client(successor.address, timeout_s=PATIENCE_S) as at_successor,
    ):
        at_owner.create_subscription("withdrawn", "all")
        at_owner.create_subscription("keyed", "by key", BY_KEY)
        with (
            Listener(owner.address, shared("withdrawn", "all")) as woken,
            Listener(owner.address, by_key("keyed", "by key", "one")) as first,
        ):
            due_ms = traffic.now_ms() + int(1000 * DUE_AFTER_S)
            for topic in ("withdrawn", "keyed"):
                add(at_owner, topic, 1, ROWS_A_TOPIC, due_ms)
            with paused(owner) as paused_at_s:
                successor.wait_for_health(serving=True)
                if time.monotonic() > paused_at_s + DUE_AFTER_S - 1:
                    raise Late
                with (
                    Withdrawals(at_successor, successor.address) as said,
                    Listener(successor.address, by_key("keyed", "by key", "two")) as second,
                ):
                    resume_in_time(owner, paused_at_s)
                    second.wait_for({(1, entry) for entry in range(ROWS_A_TOPIC)})
    if not (woken.positions and first.positions):
        # It had other things to do first.
        raise Late
    untrue = {entry for _, entry in woken.positions} & said.left
    assert not untrue, f"{len(untrue)} rows that were said to have left were handed out"
    assert len(said.answered) == ROWS_A_TOPIC
    by_key_s = second.came[0].at_s - paused_at_s
    assert by_key_s > UNCONFIRMED_S, f"handed out by key {by_key_s:.1f} s after the former owner was paused"
    assert first.came[-1].at_s < second.came[0].at_s, "a key was at two consumers"
    assert re.search(r"tarry: waiting: topic withdrawn was taken over .* for \d+ s at most", said.told)
