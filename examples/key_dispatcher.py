"""Dispatches a log to several consumers: some messages are delayed, and those of a key are in order.

It keeps the cursor, that is which entries of the log were planned and which are acknowledged, and handles everything
that a KEY_SHARED subscription returns. The daemon decides who receives which entry; the client library has streams and
permits.

`python -m examples.key_dispatcher` runs it against the daemon at `--address`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np

import tarry

LEDGER = 1
# Entries that are planned at once, and that may be planned and not acknowledged
PORTION, WINDOW = 100, 1_000
IDLE_S = 0.02


@dataclasses.dataclass(frozen=True)
class Message:
    """An entry of the log; its number is its place in the log."""

    key: str
    delay_ms: int = 0


Deliver = Callable[[tarry.Consumer, int, Message], None]
"""Called with (consumer, entry, message) when the message has reached the consumer and was processed."""


def publish(client: tarry.Client, topic: str, log: Sequence[Message]) -> None:
    """Add the delayed messages, as the publish path does. The log has all messages."""
    delayed = [entry for entry, message in enumerate(log) if message.delay_ms]
    if delayed:
        client.add(
            topic,
            LEDGER,
            delayed,
            delay_ms=[log[entry].delay_ms for entry in delayed],
            key_hash=tarry.key_hash(log[entry].key for entry in delayed),
        )


class Dispatcher:
    """A dispatcher that runs until every message of the log is acknowledged."""

    def __init__(self, subscription: tarry.KeySharedSubscription, log: Sequence[Message], deliver: Deliver) -> None:
        self._subscription = subscription
        self._log = log
        self._deliver = deliver
        self._key_hash = tarry.key_hash(message.key for message in log)
        self._acknowledged = np.zeros(len(log), np.bool_)
        self._next = 0
        # Plans of the stream before are lost; `PlanAgain` says where to begin.
        self._is_lost = False
        self._begins_anew = False

    @property
    def mark_delete(self) -> int:
        """The lowest entry that is not acknowledged."""
        left = np.flatnonzero(~self._acknowledged)
        return int(left[0]) if len(left) else len(self._log)

    def run(self) -> None:
        while self.mark_delete < len(self._log):
            self._plan()
            try:
                event = self._subscription.receive(IDLE_S)
            except tarry.DeadlineExceeded:
                # No daemon can be reached now; the library goes on trying.
                continue
            match event:
                case tarry.ConsumerBatch() as batch:
                    self._dispatch(batch)
                case tarry.TakenBack() as taken:
                    # They are redelivered; their acknowledgements do not count.
                    self._acknowledged[taken.positions.entry_id.astype(np.intp)] = False
                case tarry.PlanAgain():
                    self._next = self.mark_delete
                    self._is_lost, self._begins_anew = False, True
        self._subscription.flush()

    def _plan(self) -> None:
        """Plan the next entries of the log.

        The delayed ones are planned as well: they are HELD, and delivered when they are due.
        """
        last = min(self._next + PORTION, len(self._log), self.mark_delete + WINDOW)
        entries = self._next + np.flatnonzero(~self._acknowledged[self._next : last])
        if self._is_lost or not len(entries):
            self._next = self._next if self._is_lost else max(self._next, last)
            return
        try:
            self._subscription.plan(LEDGER, entries, self._key_hash[entries], anew=self._begins_anew).result()
        except tarry.PlanLost:
            self._is_lost = True
            return
        self._next, self._begins_anew = last, False

    def _dispatch(self, batch: tarry.ConsumerBatch) -> None:
        for entry in batch.entry_id.tolist():
            self._deliver(batch.consumer, entry, self._log[entry])
        self._acknowledged[batch.entry_id.astype(np.intp)] = True
        self._subscription.ack(batch)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default=tarry.DEFAULT_TARGET)
    parser.add_argument("--topic", default="key-dispatcher")
    options = parser.parse_args(arguments)
    dice = random.Random(7)
    log = [Message(f"key-{dice.randrange(50)}", delay_ms=dice.choice((0, 0, 0, 500))) for _ in range(2_000)]
    seen: dict[str, list[int]] = {}

    def deliver(consumer: tarry.Consumer, entry: int, message: Message) -> None:
        seen.setdefault(consumer.name, []).append(entry)

    with tarry.Client(options.address) as client:
        consumers = [tarry.Consumer(name, permits=100) for name in ("a", "b", "c")]
        with client.subscribe_key_shared(options.topic, "all", consumers=consumers, create=True) as subscription:
            publish(client, options.topic, log)
            Dispatcher(subscription, log, deliver).run()
        client.delete_topic(options.topic)
    for name, entries in sorted(seen.items()):
        keys = len({log[entry].key for entry in entries})
        print(f"{name}: {len(entries):,} messages of {keys} keys")


if __name__ == "__main__":
    main()
