"""Makes the golden roots, one of each form of logs: `python -m tests.golden_root.make` writes an archive of each and
what it must serve beside this file.

Daemons of this commit are asked through the client for one of each thing that they can store, killed, taken over from,
and misled where a state is rare (`misled_daemon`). What the root must serve is written down beside each request, by an
account of its own. Rows are due long ago or in the year 2200, so that the answer is the same whenever it is asked for.

A root that was made stays as it is until the storage format is broken on purpose: it stands for the roots of users.

Owns: the story, and the archive. Does not own: the account (`account`) and the check (`test_golden_root`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tarry
from examples.processes import DaemonProcess, local_store
from storage_backends import file_log, topic_manifest
from storage_backends.formats import manifest, names
from storage_backends.local_directory import LocalDirectory
from tests._support import patience
from tests._support.ledger_owner_server import LedgerOwnerServer
from tests.golden_root import misled_daemon
from tests.golden_root.account import NO_BATCH_INDEX, Json, Row, TopicAccount

HERE = Path(__file__).parent
FORMS = tuple(form.name.lower() for form in manifest.LogForm)
PAST_MS = 1_577_836_800_000  # 2020
FAR_MS = 7_258_118_400_000  # 2200
CENTURY_MS = 36_500 * 86_400_000
PRECISION_MS = 256
SHARDS = 4
TIMEOUT_S = 120.0
PROGRAM = (sys.executable, "-m", misled_daemon.__name__)
TRANSIENT = {".locks", ".temporary", "daemons", "probe", file_log.LOCK_FILE}
SETTINGS: Mapping[str, object] = {
    "daemon.shards": SHARDS,
    "limits.delay_max_ms": 9_007_199_254_740_992,
    "journal.checkpoint_slots": 30,
    "bucket.max_num_buckets": -1,
    "collection.interval_s": 86_400,
    "deletion.reconsume_later_seconds": 1,
    "deletion.max_retry_delete_count": 1,
}
OFFLOAD_DRIVER = "filesystem"
LEDGER_OWNER = "owned/"
# Whose shards they are in the end.
LAST_DAEMON = "two"


class Owner(LedgerOwnerServer):
    """Says of ledger 7 that it cannot be meant, and of ledger 8 that it is in use."""

    def answer(self, asked: Mapping[str, Any]) -> str | None:
        return {7: "malformed", 8: "in_use"}.get(int(asked["ledger_id"])) or super().answer(asked)


class Story:
    """The root, its daemon and the accounts of its topics. `form`: of its logs."""

    def __init__(self, directory: Path, owner: Owner, form: str) -> None:
        self.root, self.offloaded = directory / "root", directory / "offloaded"
        self.topics: dict[str, TopicAccount] = {}
        self.deletions: dict[str, Any] = {"pending": [], "given_up": [], "ended": [], "in_use": 0}
        self._directory, self._owner, self._form = directory, owner, form
        self._control = directory / "control.json"
        os.environ[misled_daemon.CONTROL] = str(self._control)
        self.mislead()

    def mislead(self, *refused: tuple[str, str], step_ms: int = 0) -> None:
        """The daemon's store refuses these operations on keys that have these parts; its clock is so far ahead."""
        written = self._control.with_suffix(".new")
        written.write_text(json.dumps({"refused": refused, "step_ms": step_ms}))
        written.replace(self._control)

    @contextlib.contextmanager
    def daemon(self, daemon_id: str, *, stops: bool = False, **settings: object) -> Iterator[tarry.Client]:
        """A daemon that is killed at the end, or `stops` in order, and its client."""
        configuration = (
            f'[[deletion.object_stores]]\nname = "archive"\ndrivers = ["{OFFLOAD_DRIVER}"]\nkind = "local"\n'
            f'path = "{self.offloaded}"\n'
            f'[[deletion.owners]]\nname = "owner"\ntopic_prefixes = ["{LEDGER_OWNER}"]\n'
            f'delete_url = "{self._owner.url}"\n'
        )
        given = {
            **SETTINGS,
            **local_store(self.root),
            "store.log_form": self._form,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        daemon = DaemonProcess(daemon_id, self._directory, given, configuration=configuration, program=PROGRAM)
        with daemon:
            daemon.start_serving(TIMEOUT_S)
            with tarry.Client(daemon.address, timeout_s=TIMEOUT_S) as client:
                self.client = client
                yield client
            if stops:
                daemon.terminate()

    # ---- requests, each with its account

    def topic(self, name: str) -> TopicAccount:
        return self.topics.setdefault(name, TopicAccount(FAR_MS - 1))

    def subscribe(self, topic: str, *subscriptions: str, **policy: Any) -> None:
        for subscription in subscriptions:
            self.client.create_subscription(topic, subscription, tarry.SubscriptionPolicy(**policy))
            self.topic(topic).subscriptions[subscription] = tarry.SubscriptionPolicy(**policy)

    def policy(self, topic: str, **policy: Any) -> None:
        self.topic(topic).policy = tarry.TopicPolicy(**policy)
        self.client.set_policy(topic, self.topic(topic).policy)

    def add(
        self,
        topic: str,
        ledger_id: int,
        entries: range,
        first_ms: int,
        *,
        keys: bool = False,
        alone: str | None = None,
    ) -> None:
        """Rows a second apart, owed to all subscriptions. `alone`: for that one."""
        times = [first_ms + 1_000 * number for number in range(len(entries))]
        hashes = [hash_of(f"key {entry_id % 5}") for entry_id in entries] if keys else None
        added = self.client.add(
            topic, ledger_id, list(entries), deliver_at_ms=times, key_hash=hashes, subscription=alone
        )
        assert (added.accepted, len(added.raised_index)) == (len(entries), 0), added
        account = self.topic(topic)
        whom = tuple(account.subscriptions) if alone is None else (alone,)
        account.add(ledger_id, entries, times, owed=whom, keys=hashes, index=alone or "")

    def add_soon(self, topic: str, ledger_id: int, entries: range) -> None:
        """Rows that are owed to every subscription that was created before, and are due at once."""
        due_ms = now_ms() + 200
        self.client.add(topic, ledger_id, list(entries), deliver_at_ms=due_ms)
        account = self.topic(topic)
        account.add(ledger_id, entries, [due_ms] * len(entries), owed=account.subscriptions)

    def lease(self, topic: str, subscription: str, rows: int) -> dict[tuple[int, int], int]:
        """Hands out exactly so many; the time of each position."""
        found: dict[tuple[int, int], int] = {}
        while len(found) < rows:
            leased = self.client.get(
                topic, subscription, max_rows=rows - len(found), lease_ms=12 * 3_600_000, wait_ms=10_000
            )
            columns = (leased.ledger_id.tolist(), leased.entry_id.tolist(), leased.deliver_at_ms.tolist())
            found.update(((ledger, entry), due) for ledger, entry, due in zip(*columns, strict=True))
        return found

    def ack(
        self, topic: str, subscription: str, ledger_id: int, entries: range, batch_index: int | None = None
    ) -> None:
        rows = self._found(topic, ledger_id, entries, batch_index)
        given = (ledger_id, [row.entry_id for row in rows], [_ms(row) for row in rows], batch_index)
        assert self.client.ack(topic, subscription, given) == 0
        self.topic(topic).owe_no_longer(subscription, rows)

    def nack(
        self, topic: str, subscription: str, ledger_id: int, entries: range, delay_ms: int, *, dead: bool = False
    ) -> None:
        rows = self._found(topic, ledger_id, entries)
        given = (ledger_id, [row.entry_id for row in rows], [_ms(row) for row in rows])
        before_ms = now_ms()
        nacked = self.client.nack(topic, subscription, given, delay_ms=delay_ms)
        assert (nacked.ignored, nacked.dead_lettered) == (0, len(rows) if dead else 0), nacked
        account = self.topic(topic)
        if dead:
            account.bury(subscription, rows, tarry.DeadLetterReason.TOO_OFTEN)
        else:
            account.nack(subscription, rows, (before_ms + delay_ms, now_ms() + delay_ms + PRECISION_MS))

    def reject(self, topic: str, subscription: str, ledger_id: int, entries: range, text: str) -> None:
        rows = self._found(topic, ledger_id, entries)
        given = (ledger_id, [row.entry_id for row in rows], [_ms(row) for row in rows])
        assert self.client.reject(topic, subscription, given, text).dead_lettered == len(rows)
        self.topic(topic).bury(subscription, rows, tarry.DeadLetterReason.REJECTED, text)

    def seal(self, topic: str) -> None:
        assert self.client.seal(topic).bucket

    def _found(self, topic: str, ledger_id: int, entries: range, batch_index: int | None = None) -> list[Row]:
        rows = self.topic(topic).find(
            ledger_id, entries, batch_index=NO_BATCH_INDEX if batch_index is None else batch_index
        )
        assert len(rows) == len(entries)
        return rows

    # ---- reading

    def checkpoint_of(self, shard: int) -> str | None:
        """The newest one of a shard, by its key."""
        prefix = names.shard_manifest_prefix(shard)
        keys = sorted(each.key for each in self._store().list(prefix))
        tip = manifest.decode_shard_manifest(self._store().get(keys[-1]))
        return None if tip.checkpoint is None else tip.checkpoint.object.name

    def buckets_of(self, topic: str) -> list[str]:
        shard = names.shard_of(topic, SHARDS)
        log = topic_manifest.topic_log(
            self._store(),
            shard,
            names.topic_id(topic),
            monotonic=time.monotonic,
            sleep=time.sleep,
            jitter=lambda: 0.5,
            new_id=lambda: "",
        )
        tip = log.read_tip()
        assert tip is not None
        return [bucket.object.name for bucket in tip.manifest.live]

    def _store(self) -> LocalDirectory:
        return LocalDirectory(self.root)


def hash_of(key: str) -> int:
    return int(tarry.key_hash(key)[0])


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _ms(row: Row) -> int:
    assert isinstance(row.deliver_at_ms, int), "the maker knows this time"
    return row.deliver_at_ms


wait_until = functools.partial(patience.wait_until, timeout_s=TIMEOUT_S)


# ---- the story


def collected(story: Story) -> None:
    """A merge whose sources cannot be deleted: they are given up."""
    topic = "collected"
    story.subscribe(topic, "s")
    for ledger_id in (1, 2):
        story.add(topic, ledger_id, range(10), FAR_MS)
        story.seal(topic)
    story.client.merge(topic, 1)
    time.sleep(0.01)  # Behind the grace of 0 ms.
    story.mislead(("delete", "/buckets/"))
    list(story.client.collect_garbage())
    story.mislead()


def orders(story: Story) -> None:
    """Two subscriptions of one index: what one acknowledged, what one was trimmed, what was withdrawn."""
    topic = "orders"
    story.subscribe(topic, "ship")
    story.add(topic, 1, range(40), PAST_MS, keys=True)
    story.ack(topic, "ship", 1, range(5))
    story.subscribe(topic, "bill", in_flight_rows_max=1_000, lease_ms=60_000, properties={"team": "money"})
    story.add(topic, 2, range(60), FAR_MS, keys=True)
    story.add_soon(topic, 3, range(20))
    story.lease(topic, "bill", 20)
    story.ack(topic, "bill", 3, range(4))
    story.ack(topic, "ship", 3, range(2, 8))
    withdraw(story, topic, 2, range(5), range(5, 10))
    story.seal(topic)
    story.ack(topic, "ship", 3, range(10, 14))
    withdraw(story, topic, 2, range(10, 15), range(15, 20))
    account = story.topic(topic)
    # All that is owed to `bill` of ledger 3 up to entry 15: partly to nobody else.
    dropped = [row for row in account.find(3, range(16)) if "bill" in row.owed]
    assert story.client.trim(topic, 3, 15, subscription="bill") == len(dropped)
    account.owe_no_longer("bill", dropped)
    trimmed = account.find(2, range(23))
    assert story.client.trim(topic, 2, 22) == len(trimmed)
    account.leave(trimmed)
    story.add(topic, 4, range(30), FAR_MS, keys=True)


def withdraw(story: Story, topic: str, ledger_id: int, cancelled: range, rescheduled: range) -> None:
    account = story.topic(topic)
    assert story.client.cancel(topic, ledger_id, list(cancelled)).cancelled == len(cancelled)
    account.leave(account.find(ledger_id, cancelled))
    later_ms = FAR_MS + 86_400_000
    moved = story.client.reschedule(topic, ledger_id, list(rescheduled), deliver_at_ms=later_ms)
    assert moved.rescheduled == len(rescheduled)
    for row in account.find(ledger_id, rescheduled):
        row.deliver_at_ms, row.key_hash = later_ms, 0


def compatible(story: Story) -> None:
    """PIP-195's form, and a progress too large to be inline."""
    topic = "compatible"
    story.policy(topic, bucket_form=tarry.BucketForm.COMPATIBLE, min_indexes_per_bucket_snapshot_segment=5)
    story.subscribe(topic, "s")
    story.add(topic, 1, range(400), PAST_MS, keys=True)
    story.add(topic, 2, range(50), FAR_MS)
    story.seal(topic)
    # Positions without a run: they do not compress.
    scattered = [number * number % 397 for number in range(1, 200)]
    for entry_id in sorted(set(scattered)):
        account = story.topic(topic)
        account.owe_no_longer("s", account.find(1, (entry_id,)))
    entries = sorted(set(scattered))
    assert story.client.ack(topic, "s", (1, entries, [PAST_MS + 1_000 * each for each in entries])) == 0
    story.add(topic, 3, range(10), FAR_MS)
    story.seal(topic)


def merged(story: Story) -> None:
    """Buckets of buckets, with what left before each merge, and after; and properties that were replaced."""
    topic = "merged"
    story.subscribe(topic, "s", "t", properties={"team": "gates", "note": ""})
    for ledger_id in (1, 2, 3):
        story.add(topic, ledger_id, range(30), FAR_MS)
        story.add_soon(topic, ledger_id + 10, range(10))
        story.lease(topic, "s", 10)
        story.seal(topic)
        story.ack(topic, "s", ledger_id + 10, range(6))
        withdraw(story, topic, ledger_id, range(3), range(3, 6))
    story.client.merge(topic, 1)
    for ledger_id in (4, 5):
        story.add(topic, ledger_id, range(20), FAR_MS)
        story.seal(topic)
    withdraw(story, topic, 4, range(3), range(3, 6))
    story.client.merge(topic, 1)
    story.ack(topic, "s", 13, range(6, 8))


def private(story: Story) -> None:
    """Rows of one subscription alone."""
    topic = "private"
    story.subscribe(topic, "a", "b")
    story.add(topic, 1, range(10), FAR_MS)
    story.add(topic, 2, range(20), PAST_MS, alone="a", keys=True)
    story.add(topic, 3, range(20), FAR_MS, alone="a")
    story.seal(topic)
    story.ack(topic, "a", 2, range(5))
    story.add(topic, 4, range(20), PAST_MS, alone="b")
    story.ack(topic, "b", 4, range(5))
    account = story.topic(topic)
    assert story.client.cancel(topic, 3, [0, 1], subscription="a").cancelled == 2
    account.leave(account.find(3, range(2)))
    story.add(topic, 5, range(10), FAR_MS, alone="b")


def unshared(story: Story) -> None:
    """Rows that are copied to each subscription's own index."""
    topic = "unshared"
    story.policy(topic, shared_index=False, tick_ms=100, pending_rows_max=1_000_000, two_phase_deletion_enabled=True)
    story.subscribe(topic, "a", "b")
    for first_ms, ledger_id in ((PAST_MS, 1), (FAR_MS, 2)):
        times = [first_ms + number for number in range(12)]
        assert not len(story.client.add(topic, ledger_id, list(range(12)), deliver_at_ms=times).raised_index)
        for index in ("a", "b"):
            story.topic(topic).add(ledger_id, range(12), times, owed=(index,), index=index)
    rows = [row for row in story.topic(topic).find(1, range(6)) if row.index == "a"]
    assert story.client.ack(topic, "a", (1, list(range(6)), [_ms(row) for row in rows])) == 0
    story.topic(topic).owe_no_longer("a", rows)


def redelivered(story: Story) -> None:
    """What was negatively acknowledged, by whom it was given up, and messages of a batch."""
    topic = "redelivered"
    delays = tarry.ExponentialDelay(1_000, max_ms=60_000, jitter=0.25)
    story.subscribe(topic, "s", redelivery=delays, max_redeliver_count=2)
    story.add(topic, 1, range(40), PAST_MS, keys=True)
    story.subscribe(topic, "precise", nack_precision_bits=0, redelivery=tarry.LinearDelay(1_000, 5_000, max_ms=60_000))
    story.lease(topic, "s", 40)
    back_again(story, topic, range(10))
    story.seal(topic)
    back_again(story, topic, range(4))
    story.nack(topic, "s", 1, range(2), 0, dead=True)
    story.nack(topic, "s", 1, range(4, 12), CENTURY_MS)
    story.reject(topic, "s", 1, range(20, 24), "no such order")
    story.reject(topic, "s", 1, range(24, 26), "")
    parts(story, topic)
    never_added(story, topic, 9)
    replay(story, topic, [3, 4], [5])


def back_again(story: Story, topic: str, entries: range) -> None:
    """Negatively acknowledged, and handed out again."""
    story.nack(topic, "s", 1, entries, 0)
    for row in story.topic(topic).find(1, entries):
        del row.redelivered_ms["s"]
    story.lease(topic, "s", len(entries))


def parts(story: Story, topic: str) -> None:
    """Messages of the batch that is entry 30; 3 is acknowledged, 4 is given up."""
    (whole,) = story.topic(topic).find(1, range(30, 31))
    for batch_index in range(5):
        before_ms = now_ms()
        nacked = story.client.nack(
            topic, "s", (1, 30, _ms(whole)), delay_ms=CENTURY_MS, batch_index=batch_index, key_hash=whole.key_hash
        )
        assert nacked.ignored == 0
        part = Row("s", 1, 30, _ms(whole), whole.key_hash, {"s"}, batch_index)
        story.topic(topic).rows.append(part)
        story.topic(topic).nack("s", [part], (before_ms + CENTURY_MS, now_ms() + CENTURY_MS + PRECISION_MS))
    story.ack(topic, "s", 1, range(30, 31), batch_index=3)
    (part,) = story.topic(topic).find(1, (30,), batch_index=4)
    rejected = story.client.reject(topic, "s", (1, 30, _ms(part)), "not this one", batch_index=4)
    assert rejected.dead_lettered == 1
    story.topic(topic).bury("s", [part], tarry.DeadLetterReason.REJECTED, "not this one")


def never_added(story: Story, topic: str, ledger_id: int) -> None:
    """Ordinary messages that were negatively acknowledged: they have no time."""
    before_ms = now_ms()
    story.client.nack(topic, "precise", (ledger_id, [1, 2], 0), delay_ms=CENTURY_MS, key_hash=hash_of("a"))
    after_ms = now_ms()
    account = story.topic(topic)
    account.add(ledger_id, (1, 2), [0, 0], owed=("precise",), keys=[hash_of("a")] * 2, index="precise")
    account.nack("precise", account.find(ledger_id, (1, 2)), (before_ms + CENTURY_MS, after_ms + CENTURY_MS))


def replay(story: Story, topic: str, again: list[int], forgotten: list[int]) -> None:
    """Some dead letters wait again, others are forgotten."""
    account = story.topic(topic)
    before_ms = now_ms()
    replayed = story.client.replay_dead_letters(topic, "s", tarry.DeadLetterFilter(ids=again), delay_ms=CENTURY_MS * 2)
    assert replayed.replayed == len(again)
    due_ms = (before_ms + CENTURY_MS * 2, now_ms() + CENTURY_MS * 2)
    assert story.client.purge_dead_letters(topic, "s", tarry.DeadLetterFilter(ids=forgotten)) == len(forgotten)
    for letter in [letter for letter in account.dead["s"] if letter[0] in again]:
        account.add(letter[1], (letter[2],), [due_ms], owed=("s",), keys=[letter[5]], index="s")
    account.dead["s"] = [letter for letter in account.dead["s"] if letter[0] not in (*again, *forgotten)]


def levels(story: Story) -> None:
    topic = "levels"
    account = story.topic(topic)
    account.levels = tarry.DelayLevels("1s 5s 73000d", clamp=False)
    story.client.set_delay_levels(topic, account.levels)
    story.subscribe(topic, "s", redelivery=tarry.DelayLadder())
    add_by_level(story, topic, 1)
    story.seal(topic)
    add_by_level(story, topic, 2)


def add_by_level(story: Story, topic: str, ledger_id: int) -> None:
    account = story.topic(topic)
    before_ms = now_ms()
    story.client.add(topic, ledger_id, list(range(8)), delay_level=3)
    due_ms = (before_ms + 2 * CENTURY_MS, now_ms() + 2 * CENTURY_MS)
    account.add(ledger_id, range(8), [due_ms] * 8, owed=("s",))
    account.by_level[3] = account.by_level.get(3, 0) + 8


def keys(story: Story) -> None:
    """How keys are shared, in each way."""
    topic = "keys"
    ways: tuple[dict[str, Any], ...] = (
        {"selector": tarry.HashSelector.AUTO_SPLIT, "allow_out_of_order_delivery": True},
        {"selector": tarry.HashSelector.CONSISTENT_HASHING, "points_per_consumer": 7},
        {"order": tarry.KeyOrder.LAST_SENT_POSITION},
        {
            "selector": tarry.HashSelector.STICKY,
            "nack_order": tarry.NackOrder.BLOCK_KEY,
            "nack_block_max_ms": 1_000,
        },
    )
    for number, way in enumerate(ways):
        story.subscribe(
            topic, f"way-{number}", key_shared=tarry.KeySharedPolicy(**way), redelivery=tarry.DelayList((1_000, 5_000))
        )
    story.add_soon(topic, 1, range(5))
    story.add(topic, 2, range(30), FAR_MS, keys=True)
    received = 0
    with story.client.subscribe_key_shared(topic, "way-1", consumers=[tarry.Consumer("a"), tarry.Consumer("b")]) as due:
        for batch in due:
            assert isinstance(batch, tarry.ConsumerBatch)
            assert due.ack(batch).result(TIMEOUT_S) == 0
            received += len(batch)
            if received == 5:
                break
    story.topic(topic).owe_no_longer("way-1", story.topic(topic).find(1, range(5)))


def deleted(story: Story) -> None:
    """A topic that is no more, and one that came again."""
    for topic in ("deleted", "reborn"):
        story.subscribe(topic, "s")
        story.add(topic, 1, range(20), FAR_MS)
        story.seal(topic)
        story.add(topic, 2, range(20), FAR_MS)
        story.client.delete_topic(topic)
        del story.topics[topic]
    story.subscribe("reborn", "again", ack_timeout_ms=60_000, redelivery=tarry.ConstantDelay(7_000))
    story.add("reborn", 1, range(5), FAR_MS)


def unsubscribed(story: Story) -> None:
    """The last subscription went: what was due went with it."""
    topic = "unsubscribed"
    story.subscribe(topic, "s")
    story.add(topic, 1, range(10), PAST_MS)
    story.add(topic, 2, range(10), FAR_MS)
    story.client.delete_subscription(topic, "s")
    account = story.topic(topic)
    del account.subscriptions["s"]
    account.leave(account.find(1, range(10)))


def stepped(story: Story) -> None:
    """Rows due in an hour; a subscription that was created, as the clock said, an hour after."""
    topic = "stepped"
    story.subscribe(topic, "before")
    story.add(topic, 1, range(5), now_ms() + 3_600_000)
    story.mislead(step_ms=2 * 3_600_000)
    story.subscribe(topic, "after")
    story.mislead()


def stepped_back(story: Story) -> None:
    """Nobody is owed them any more; they come due."""
    topic = "stepped"
    account = story.topic(topic)
    story.client.delete_subscription(topic, "before")
    del account.subscriptions["before"]
    story.mislead(step_ms=90 * 60_000)
    wait_until(lambda: story.client.stats(topic).pending == 0, "the rows come due")
    story.mislead()
    account.leave(account.find(1, range(5)))
    story.add(topic, 2, range(3), FAR_MS)


def ledgers(story: Story) -> None:
    """Deletions of ledgers, by what came of them."""
    store = LocalDirectory(story.offloaded)
    topic = "persistent://public/default/flights"
    index_of = {"deleted": 1, "gone": 2, "mismatch": 3, "in use": 4, "orphan": 5}
    known = {"application": "pulsar", "component": "managed-ledger"}
    for what, ledger_id in index_of.items():
        if what == "gone":
            continue
        name = f"{_uuid(ledger_id)}-ledger-{ledger_id}"
        owner = "another" if what == "mismatch" else "public/default/persistent/flights"
        for key in (name, f"{name}-index"):
            store.put(key, b"entries", metadata={**known, "pulsar-managed-ledger": owner})
    offloaded = tarry.LedgerType.OFFLOADED_LEDGER
    story.client.record_in_use(topic, [4], ledger_type=offloaded, uuid=_uuid(4))
    story.deletions["in_use"] += 1
    story.client.record_pending_deletes(
        topic, [_offloaded(index_of[each]) for each in ("deleted", "gone", "mismatch", "in use")]
    )
    outcomes = {1: "DELETED", 2: "ALREADY_GONE", 3: "METADATA_MISMATCH", 4: "IN_USE"}
    for ledger_id, outcome in outcomes.items():
        story.deletions["ended"].append([topic, "MANAGED_LEDGER", offloaded.name, ledger_id, False, outcome])
    owned = "owned/trains"
    for ledger_id, outcome in ((7, "MALFORMED"), (8, "IN_USE")):
        cursor = tarry.PendingDelete(ledger_id, tarry.LedgerComponent.MANAGED_CURSOR, cursor_name="dispatcher")
        story.client.record_pending_deletes(owned, [cursor])
        story.deletions["ended"].append([owned, "MANAGED_CURSOR", "LEDGER", ledger_id, False, outcome])
    wait_until(lambda: story.client.deletion_stats().in_flight == 0, "deletions end")
    for _ in story.client.sweep_orphans("archive", grace_ms=0, delete=True, unknown_topics=True, force=True):
        pass
    # What a record took for another one's is an orphan of its own.
    for whose, ledger_id in ((topic, 5), ("another", 3)):
        story.deletions["ended"].append([whose, "MANAGED_LEDGER", offloaded.name, ledger_id, True, "DELETED"])
    wait_until(lambda: story.client.deletion_stats().in_flight == 0, "what was swept is deleted")


def given_up(story: Story, topic: str) -> None:
    """Ledgers whose owner nobody knows: given up, one retried, one forgotten."""
    schema = tarry.LedgerComponent.SCHEMA_STORAGE
    story.client.record_pending_deletes(
        topic, [tarry.PendingDelete(each, schema, schema_id="v1") for each in (1, 2, 3)]
    )
    wait_until(lambda: story.client.deletion_stats(topic).given_up == 3, "they are given up")
    story.client.retry_dead_deletes(tarry.DeletionFilter(topic=topic, ledger_id=1))
    wait_until(lambda: story.client.deletion_stats(topic).given_up == 3, "it is given up again")
    assert story.client.purge_dead_deletes(tarry.DeletionFilter(topic=topic, ledger_id=2)) == 1
    story.deletions["given_up"] += [[topic, schema.name, "LEDGER", each, False, None] for each in (1, 3)]


def uses(story: Story, topic: str) -> None:
    """What owners say is in use: more, less, all of it, in one decision and in several."""
    client, few, many = story.client, f"few {topic}", f"many {topic}"
    client.record_in_use(topic, [1, 2, 3])
    assert client.forget_in_use(topic, [2]) == 1
    client.record_in_use(few, [1, 2])
    client.record_in_use(few, [2, 3], replace=True)
    client.record_in_use(many, list(range(10)))
    client.record_in_use(many, list(range(5, 12)), replace=True)
    story.deletions["in_use"] += 2 + 2 + 7


def _uuid(ledger_id: int) -> uuid.UUID:
    return uuid.UUID(int=(17 << 64) + ledger_id)


def _offloaded(ledger_id: int) -> tarry.PendingDelete:
    return tarry.PendingDelete(
        ledger_id,
        ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
        offload_context=tarry.OffloadContext(_uuid(ledger_id), OFFLOAD_DRIVER, {"kept": "cold"}),
    )


def to_be_damaged(story: Story) -> None:
    topic = "damaged"
    story.subscribe(topic, "s")
    story.add(topic, 1, range(20), FAR_MS)
    story.add(topic, 2, range(20), FAR_MS)
    story.seal(topic)
    story.add(topic, 3, range(20), FAR_MS)


def damage(story: Story) -> None:
    """One bit of one bucket."""
    (key,) = story.buckets_of("damaged")
    path = story.root / key
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(bytes(body))


def damaged(story: Story) -> None:
    """It is found; half of the rows are added again."""
    topic = "damaged"
    account = story.topic(topic)
    for ledger_id in (1, 2):
        account.leave(account.find(ledger_id, range(20)))
    account.rebuild = [[1, 2]]
    with contextlib.suppress(tarry.TarryError):
        list(story.client.scheduled(topic, timeout_s=5))
    wait_until(lambda: bool(story.client.stats(topic).rebuild_needed), "the damage is found")
    wait_until(lambda: any(each.quarantined for each in story.client.buckets(topic)), "the bucket is quarantined")
    story.add(topic, 1, range(10), FAR_MS + 5_000)


def same_shard_as(topic: str) -> str:
    """Another topic of its shard, for traffic."""
    shard = names.shard_of(topic, SHARDS)
    return next(each for each in (f"traffic-{n}" for n in range(1_000)) if names.shard_of(each, SHARDS) == shard)


def checkpointed(story: Story, topic: str) -> None:
    """Traffic on the shard of a topic, until it has another checkpoint."""
    shard, other = names.shard_of(topic, SHARDS), same_shard_as(topic)
    before, account = story.checkpoint_of(shard), story.topic(other)
    for _ in range(20 * int(str(SETTINGS["journal.checkpoint_slots"]))):
        story.add(other, 1, range(len(account.rows), len(account.rows) + 1), FAR_MS + len(account.rows))
        if story.checkpoint_of(shard) != before:
            return
    raise TimeoutError(f"shard {shard} wrote no checkpoint")


def to_be_carried(story: Story) -> None:
    """A topic in the log, that the next owner cannot load."""
    topic = "carried"
    story.subscribe(topic, "s")
    story.add(topic, 1, range(10), PAST_MS)
    story.add(topic, 2, range(10), FAR_MS)
    story.ack(topic, "s", 1, range(4))
    story.add(topic, 3, range(10), FAR_MS, alone="s")


def unsealed(story: Story) -> None:
    """A seal that does not get through, beside a checkpoint."""
    topic = "sealing"
    story.subscribe(topic, "s")
    story.add(topic, 1, range(20), FAR_MS)
    story.add(topic, 2, range(20), FAR_MS, alone="s")
    story.mislead(*REFUSED, ("put", f"{names.topic_id(topic)}/buckets/"))
    with contextlib.suppress(tarry.TarryError):
        story.client.seal(topic, timeout_s=30)
    story.add(topic, 3, range(5), FAR_MS)
    checkpointed(story, topic)


def above_the_checkpoints(story: Story) -> None:
    """What only the log knows."""
    story.add("orders", 5, range(7), FAR_MS)
    story.ack("orders", "ship", 3, range(14, 16))
    withdraw(story, "orders", 4, range(3), range(3, 6))
    trimmed = story.topic("orders").find(4, range(10))
    assert story.client.trim("orders", 4, 9) == len(trimmed)
    story.topic("orders").leave(trimmed)
    waived = [row for row in story.topic("orders").find(3, range(18)) if "bill" in row.owed]
    assert story.client.trim("orders", 3, 17, subscription="bill") == len(waived) == 2
    story.topic("orders").owe_no_longer("bill", waived)
    story.lease("redelivered", "s", 10)
    story.nack("redelivered", "s", 1, range(2, 4), 0, dead=True)
    story.nack("redelivered", "s", 1, range(12, 14), CENTURY_MS)
    story.reject("redelivered", "s", 1, range(14, 18), "no such order")
    replay(story, "redelivered", [7, 8], [9])
    never_added(story, "redelivered", 10)
    story.ack("redelivered", "s", 1, range(30, 31), batch_index=2)
    story.ack("private", "a", 2, range(5, 7))
    story.add("private", 6, range(5), FAR_MS, alone="a")
    add_by_level(story, "levels", 3)
    uses(story, "later users")
    given_up(story, "nobody either")
    ledgers(story)


CARRIED_MANIFESTS = f"{names.topic_id('carried')}/manifest/"
REFUSED = tuple((operation, CARRIED_MANIFESTS) for operation in ("list", "head", "get_with_metadata", "put_if_absent"))


def tell(story: Story) -> None:
    with story.daemon("one", stops=True, collection__grace_s=0, collection__attempts_max=1):
        collected(story)
    with story.daemon("one"):
        for chapter in (orders, compatible, merged, private, unshared, redelivered, levels, keys, deleted):
            chapter(story)
        for chapter in (unsubscribed, stepped, to_be_damaged, to_be_carried):
            chapter(story)
        uses(story, "users")
        given_up(story, "nobody")
    damage(story)
    story.mislead(*REFUSED)
    with story.daemon(LAST_DAEMON):
        stepped_back(story)
        story.mislead(*REFUSED)
        damaged(story)
        checkpointed(story, "carried")
        unsealed(story)
        for topic in ("orders", "redelivered", "private", "sealing"):
            checkpointed(story, topic)
        above_the_checkpoints(story)


def expectation(story: Story) -> Json:
    for found in (story.deletions["ended"], story.deletions["given_up"]):
        found.sort()
    return {
        "topics": {name: account.to_json() for name, account in sorted(story.topics.items())},
        "deletions": story.deletions,
    }


def pack(root: Path) -> bytes:
    """The root's objects as one archive that holds nothing of the machine."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.is_file() and not TRANSIENT & set(relative.parts):
                member = tarfile.TarInfo(str(relative))
                member.size, member.mode = path.stat().st_size, 0o644
                with path.open("rb") as body:
                    archive.addfile(member, body)
    return packed.getvalue()


def archive_of(form: str) -> Path:
    return HERE / f"root-{form}.tar.xz"


def expected_of(form: str) -> Path:
    return HERE / f"expected-{form}.json"


def unpack(form: str, directory: Path) -> Path:
    """A copy of the golden root whose logs have that form."""
    with tarfile.open(archive_of(form)) as archive:
        # Python before 3.11.4 has no filters, and takes no argument for one.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(directory)
    return directory


def main() -> int:
    there = [path for path in map(archive_of, FORMS) if path.exists()]
    if there:
        sys.stderr.write(f"{there[0]} exists: it stays as it is until the storage format is broken on purpose\n")
        return 1
    owner = Owner()
    owner.start()
    try:
        for form in FORMS:
            with tempfile.TemporaryDirectory(prefix="tarry-golden-") as directory:
                story = Story(Path(directory), owner, form)
                tell(story)
                body = pack(story.root)
                expected_of(form).write_text(json.dumps(expectation(story)).replace(", [", ",\n[") + "\n")
                archive_of(form).write_bytes(body)
    finally:
        owner.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
