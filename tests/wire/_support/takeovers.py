"""Takeovers on a root under load, and an account of every answer: `python -m tests.wire._support.takeovers --help`.

Owns: the rounds, what befalls the daemons in each, the look at what is left, and draining it. Does not own: the callers
and the accounts (`answer_traffic` with `answers`, `traffic` with `delivery_history`).

Each round has all callers at both daemons, one takeover or two, and ends with a look at every row that may be there,
after which the rest is received and acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tarry
from examples import processes
from tests._support import patience
from tests._support.delivery_history import DeliveryHistory
from tests._support.processes import Daemons
from tests.wire._support import answer_traffic, key_traffic, traffic
from tests.wire._support.answer_traffic import FAR_MS, NAMES, SUBSCRIPTION, SUBSCRIPTIONS, TOPICS
from tests.wire._support.answers import Answers, Identity
from tests.wire._support.key_history import KeyHistory
from tests.wire._support.pair import SETTINGS, Pair

LOAD = "load"
# A silent daemon is suspected after some of these.
HEARTBEAT_S = 0.5
# Callers go on for so long before and after what befalls the daemons, and between two takeovers.
UNDER_LOAD_S = 1.0
# Rows of keys, added in as much time as most faults take
KEYED_ROWS, KEYED_BATCH, KEYED_PAUSE_S = 400, 10, 0.2


class Takeovers(Pair):
    """Two daemons on a new root below a folder, and the accounts of all rounds."""

    def __init__(self, daemons: Daemons, folder: Path, log_form: str, stack: contextlib.ExitStack, seed: int) -> None:
        settings = SETTINGS | processes.local_store(folder / f"root-{log_form}")
        settings |= {"store.log_form": log_form, "ownership.heartbeat_interval_s": HEARTBEAT_S}
        names = [f"{name}-{log_form}" for name in ("one", "two")]
        super().__init__([daemons.make(name, settings) for name in names], (*TOPICS, LOAD))
        self.answers = Answers()
        self.history = DeliveryHistory()
        self.rounds: Counter[str] = Counter()
        self._rng = random.Random(seed)
        for daemon in self.pair:
            stack.callback(daemon.kill)
        self.start()
        for topic in (*TOPICS, LOAD):
            traffic.create_subscription(self.pair[0].address, topic, SUBSCRIPTION)
        traffic.create_subscription(self.pair[0].address, SUBSCRIPTIONS, "first")
        self._loop = stack.enter_context(_running_loop())
        creating = key_traffic.create_subscription(self.pair[0].address)
        asyncio.run_coroutine_threadsafe(creating, self._loop).result(traffic.PATIENCE_S)
        for daemon in self.pair:
            stack.enter_context(
                traffic.Receiver(daemon.address, LOAD, self.history, rng=random.Random(seed), subscription=SUBSCRIPTION)
            )

    def round(self, fault: Callable[[Takeovers], None]) -> list[str]:
        """One round; return all breaches so far."""
        self.rounds[fault.__name__] += 1
        addresses = [daemon.address for daemon in self.pair]
        sender = traffic.Sender(
            f"ipv4:{','.join(addresses)}",
            LOAD,
            self.history,
            rng=random.Random(self._rng.random()),
            due=lambda rng, base_ms: base_ms + rng.randint(-500, 2_000),
            ledgers_from=1_000 * self.rounds.total(),
            pause_s=0.2,
            timeout_s=3.0,
        )
        callers = answer_traffic.AnswerTraffic(addresses, self.answers, self.history, self._rng)
        with sender, callers:
            keys = asyncio.run_coroutine_threadsafe(self._share_keys(addresses), self._loop)
            wait(UNDER_LOAD_S)
            fault(self)
            wait(UNDER_LOAD_S)
            sender.finish()
            keyed = keys.result(traffic.PATIENCE_S)
        self.history.wait_for(lambda: self.history.missing == 0, traffic.PATIENCE_S, "every answered row comes")
        owner, _ = self.owner_and_other()
        with tarry.Client(owner.address, timeout_s=traffic.PATIENCE_S) as client:
            self._look(client)
            self.answers.judge()
            self._drain(client, owner.address)
            self._look(client)
        return [*self.answers.judge(), *keyed, *self.history.breaches()]

    async def _share_keys(self, addresses: Sequence[str]) -> list[str]:
        """Give keys to the consumers of two dispatchers until all is acknowledged; return the breaches."""
        first_ledger = 10_000 * self.rounds.total()
        delays, added, planned = key_traffic.rows_of(
            self._rng, added=KEYED_ROWS, planned=KEYED_ROWS // 2, first_ledger=first_ledger
        )
        history = KeyHistory([*added, *planned])
        adder = key_traffic.Adder(addresses, history, delays)
        dispatchers = [
            key_traffic.Dispatcher(name, addresses, history, consumers=2, planned=log, seed=first_ledger)
            for name, log in (("planning", planned), ("other", []))
        ]
        batches = [added[first : first + KEYED_BATCH] for first in range(0, len(added), KEYED_BATCH)]
        working = (adder.run(batches, KEYED_PAUSE_S), *(dispatcher.run() for dispatcher in dispatchers))
        running = [asyncio.ensure_future(work) for work in working]
        try:
            await key_traffic.reached(lambda: history.all_acknowledged, running, history)
        except AssertionError:
            return history.breaches
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return []

    # ---- what is left

    def _look(self, client: tarry.Client) -> None:
        """Note each row and each name that is there."""
        rows: dict[Identity, tuple[int, int | None]] = {}
        dead: Counter[Identity] = Counter()
        for topic in TOPICS:
            for page in client.scheduled(topic):
                rows |= {(topic, *row[:2]): (row[2], None) for row in _rows(page)}
            for backlog in client.backlog(topic, SUBSCRIPTION):
                counts = backlog.redelivery_count.tolist()
                rows |= {(topic, *row[:2]): (row[2], count) for row, count in zip(_rows(backlog), counts, strict=True)}
            for letters in client.dead_letters(topic, SUBSCRIPTION):
                dead.update((topic, *row[:2]) for row in _rows(letters))
        rows |= {(register, number, 0): (0, 0) for register, number in self._registered(client)}
        self.answers.seen(rows, dead)

    def _registered(self, client: tarry.Client) -> list[tuple[str, int]]:
        names = [each.subscription for each in client.subscriptions(SUBSCRIPTIONS)]
        names += [each.topic for each in client.topics()]
        registered = [name.rpartition("-") for name in names]
        return [(register, int(number)) for register, _, number in registered if register in (SUBSCRIPTIONS, NAMES)]

    def _drain(self, client: tarry.Client, address: str) -> None:
        """Receive and acknowledge what is due, trim what is not, delete the names, and clear the topic of keys."""
        client.clear(key_traffic.TOPIC)
        asker = answer_traffic.Asker(address, self.answers, is_direct=False)
        workers = [
            answer_traffic.LaneSettler(asker, random.Random(self._rng.random()), topic, nacked_share=0.0)
            for topic in TOPICS
        ]
        for worker in workers:
            worker.start()
        for register, number in self._registered(client):
            asker.ask(answer_traffic.delete(register, number))
        for topic in TOPICS:
            # What is due soon comes.
            far = client.scheduled(topic, from_ms=traffic.now_ms() + FAR_MS // 2)
            for ledger in {ledger for page in far for ledger in page.ledger_id.tolist()}:
                asker.ask(answer_traffic.trim(topic, ledger))
            traffic.wait_until_nothing_is_left(address, topic)
        for worker in workers:
            worker.stopping.set()
            worker.join()
            worker.close()
        asker.client.close()


@contextlib.contextmanager
def _running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread: gRPC goes on to wake one that is closed between two rounds."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="keys", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _rows(page: tarry.RowsPage) -> list[tuple[int, int, int]]:
    return list(zip(page.ledger_id.tolist(), page.entry_id.tolist(), page.deliver_at_ms.tolist(), strict=True))


def wait(seconds: float) -> None:
    """Let the callers go on."""
    threading.Event().wait(seconds)


# ---- what befalls the daemons


def killed(story: Takeovers) -> None:
    """SIGKILL of the owner; the other one takes over, and the former one stands by for it."""
    owner, other = story.owner_and_other()
    owner.kill()
    other.wait_for_health(serving=True)
    wait(UNDER_LOAD_S)
    owner.start()


def terminated(story: Takeovers) -> None:
    """SIGTERM of the owner, which hands over."""
    owner, other = story.owner_and_other()
    owner.terminate()
    other.wait_for_health(serving=True)
    wait(UNDER_LOAD_S)
    owner.start()


def paused(story: Takeovers) -> None:
    """SIGSTOP of the owner until another one has taken over; then it goes on, and finds that out."""
    owner, other = story.owner_and_other()
    epoch = story.epoch_at(owner)
    with stopped(owner):
        _wait_until_taken_over(story, other, epoch)
        wait(UNDER_LOAD_S)
    owner.wait_for_health(serving=False)


def paused_in_turn(story: Takeovers) -> None:
    """The owner is paused, then its successor, while that lets requests wait for the end of the first one's time."""
    owner, other = story.owner_and_other()
    epoch = story.epoch_at(owner)
    with contextlib.ExitStack() as paused_ones:
        with stopped(owner):
            _wait_until_taken_over(story, other, epoch)
            epoch = story.epoch_at(other)
            wait(UNDER_LOAD_S)
            paused_ones.enter_context(stopped(other))
        _wait_until_taken_over(story, owner, epoch)
    other.wait_for_health(serving=False)


def paused_alone(story: Takeovers) -> None:
    """SIGSTOP of the owner where logs are files: the other one waits, and names the process."""
    owner, other = story.owner_and_other()
    said = f"waiting for process {owner.pid} since "
    before = other.log_text().count(said)
    with stopped(owner):
        patience.wait_until(
            lambda: other.log_text().count(said) > before, "the process is named", timeout_s=traffic.PATIENCE_S
        )
        assert not other.is_serving()
    owner.wait_for_health(serving=True)


@contextlib.contextmanager
def stopped(daemon: processes.DaemonProcess) -> Iterator[None]:
    """SIGSTOP, until the block ends."""
    daemon.stop()
    try:
        yield
    finally:
        daemon.resume()


def _wait_until_taken_over(story: Takeovers, by: processes.DaemonProcess, epoch: int) -> None:
    by.wait_for_health(serving=True)
    patience.wait_until(lambda: story.epoch_at(by) > epoch, "a takeover", timeout_s=traffic.PATIENCE_S)


FAULTS: Mapping[str, Sequence[Callable[[Takeovers], None]]] = {
    "files": (killed, terminated, paused_alone),
    "objects": (killed, terminated, paused, paused_in_turn),
}


# ---- the program


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if each answer was true."""
    parser = argparse.ArgumentParser(prog="python -m tests.wire._support.takeovers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="takeovers, all forms and faults in turn (default 20)")
    parser.add_argument("--form", choices=FAULTS, action="append", help="of the log; repeatable (default: both)")
    faults = {fault.__name__ for of_form in FAULTS.values() for fault in of_form}
    parser.add_argument("--fault", choices=sorted(faults), action="append", help="repeatable (default: all)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--keep-going", action="store_true", help="go on after a round that breaks a rule")
    options = parser.parse_args(arguments)
    turns = [
        (form, fault)
        for form in options.form or FAULTS
        for fault in FAULTS[form]
        if fault.__name__ in (options.fault or faults)
    ]
    with tempfile.TemporaryDirectory(prefix="takeovers-") as folder, contextlib.ExitStack() as stack:
        daemons = Daemons(Path(folder))
        stories = {
            form: Takeovers(daemons, Path(folder), form, stack, options.seed)
            for form in dict.fromkeys(f for f, _ in turns)
        }
        known: set[str] = set()
        for number in range(options.rounds):
            form, fault = turns[number % len(turns)]
            began_s = time.monotonic()
            breaches = [breach for breach in stories[form].round(fault) if breach not in known]
            seconds = time.monotonic() - began_s
            say(f"round {number}: {fault.__name__}, {form}, {seconds:.0f} s, {len(breaches)} breaches")
            say(*(f"  {breach}" for breach in breaches))
            known |= {*breaches}
            if breaches and not options.keep_going:
                break
        for form, story in stories.items():
            say(f"{form}: {dict(story.rounds)}; {story.history.describe()}")
            say(*(f"{story.answers.counts[name]:>9} {name}" for name in sorted(story.answers.counts)))
        if known:
            daemons.end()
    return 1 if known else 0


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
