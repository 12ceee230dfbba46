"""Makes the golden root whose rows have schedule ids: `python -m tests.golden_root.make_with_ids` writes it and what it
must serve beside this file.

Daemons of this commit run in this process, in virtual time, and are killed. The root has an id in each place that may
have one: sections, a checkpoint, a sealed bucket and a merged one, rows that wait for their redelivery, dead letters,
batch parts, and rows of one subscription alone.

A root that was made stays as it is until the storage format is broken on purpose: it stands for the roots of users.

Owns: the story, and the archive. Does not own: the check (`test_golden_root_with_ids`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from daemon.call_values import Nack
from daemon.core.backlog.dead_letter_rows import ALL, DeadLetterFilter
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.withdrawal_decisions import RescheduleBatch
from storage_backends import crash_points
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver
from tests._support.virtual_loop import VirtualLoop

ARCHIVE = Path(__file__).parent / "root-with-ids.tar.xz"
EXPECTED = Path(__file__).parent / "expected-with-ids.json"
SETTINGS = ("daemon.shards=1", "journal.checkpoint_slots=1000", "collection.interval_s=86400")
TOPIC, SUBSCRIPTION = "orders", "s"
# Headers of a member that are not metadata of its object
_OF_TAR = frozenset({"path", "linkpath", "size", "uname", "gname", "mtime"})
# Nothing that waits comes before a daemon of another run has loaded it.
LATER_MS = 1_200_000
# (ledger, entry, message of the entry, its id) of a row that is handed out
Expected = list[tuple[int, int, int, str]]


def id_of(ledger_id: int, entry_id: int) -> bytes:
    """Every fourth row has none; one is not ASCII."""
    if entry_id % 4 == 3:
        return b""
    return "\u20ac".encode() * 85 if entry_id == 5 else b"order-%d/%d" % (ledger_id, entry_id)


def ids_of(ledger_id: int, entries: range) -> ScheduleIds:
    ids = [id_of(ledger_id, entry_id) for entry_id in entries]
    return ScheduleIds.of_piece(np.array(list(map(len, ids)), np.uint64), b"".join(ids))


class Story:
    """A daemon that serves, and what a later one must hand out and list."""

    def __init__(self, machines: EngineFixture) -> None:
        self.machines = machines
        self.expected: Expected = []
        self.dead: Expected = []
        self.daemon: Daemon
        self.receiver: Receiver

    async def start(self) -> None:
        self.daemon = await self.machines.served_by("one", *SETTINGS)
        self.receiver = await self.daemon.receiver(TOPIC, SUBSCRIPTION)

    async def add(self, ledger_id: int, entries: range, delay_ms: int = LATER_MS, *, alone: bool = False) -> None:
        ids = [id_of(ledger_id, entry_id) for entry_id in entries]
        subscription = SUBSCRIPTION if alone else None
        await self.daemon.add(TOPIC, ledger_id, entries, delay_ms, subscription=subscription, schedule_ids=ids)
        if delay_ms == LATER_MS:
            self._owe(ledger_id, entries)

    def _owe(self, ledger_id: int, entries: range, batch_index: int = NO_BATCH_INDEX) -> None:
        self.expected += [(ledger_id, each, batch_index, id_of(ledger_id, each).decode()) for each in entries]

    async def received(self, ledger_id: int, entries: range) -> HeldPositions:
        """Rows that are due are handed out; their names."""
        before = len(self.receiver.rows)
        await self.add(ledger_id, entries, 0)
        await self.receiver.received(before + len(entries))
        rows = [row for row in self.receiver.rows if row[0] == ledger_id]
        ledgers, entry_id, times = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
        return HeldPositions(ledgers, entry_id, times)

    async def nack(self, ledger_id: int, entries: range) -> None:
        held = await self.received(ledger_id, entries)
        nack = Nack(held, delay_ms=np.full(len(held), LATER_MS, np.uint64))
        await self.daemon.call(self.daemon.engine.requests.negative_acknowledge(TOPIC, SUBSCRIPTION, nack))
        self._owe(ledger_id, entries)

    async def nack_parts(self, ledger_id: int, entries: range) -> None:
        held = await self.received(ledger_id, entries)
        parts = HeldPositions(held.ledger_id, held.entry_id, held.deliver_at_ms, np.full(len(held), 2, np.uint32))
        requests = self.daemon.engine.requests
        nack = Nack(parts, delay_ms=np.full(len(held), LATER_MS, np.uint64))
        await self.daemon.call(requests.negative_acknowledge(TOPIC, SUBSCRIPTION, nack))
        named = HeldPositions(
            held.ledger_id, held.entry_id, held.deliver_at_ms, redelivery_count=np.zeros(len(held), np.uint32)
        )
        assert not len(await self.daemon.call(requests.acknowledge(TOPIC, SUBSCRIPTION, named)))
        self._owe(ledger_id, entries, 2)

    async def reject(self, ledger_id: int, entries: range) -> None:
        held = await self.received(ledger_id, entries)
        nack = Nack(held, reject=True, text="no such order")
        await self.daemon.call(self.daemon.engine.requests.negative_acknowledge(TOPIC, SUBSCRIPTION, nack))
        self.dead += [
            (ledger_id, each, NO_BATCH_INDEX, id_of(ledger_id, each).decode()) for each in held.entry_id.tolist()
        ]

    async def replay_first(self) -> None:
        """The first dead letter waits again."""
        requests = self.daemon.engine.requests
        page = await self.daemon.call(requests.list_dead_letters(TOPIC, SUBSCRIPTION, ALL, 1, 0))
        asked = DeadLetterFilter(ids=page.rows.dead_letter_id[:1])
        await self.daemon.call(requests.replay_dead_letters(TOPIC, SUBSCRIPTION, asked, LATER_MS))
        self.expected.append(self.dead.pop(0))

    async def reschedule(self, ledger_id: int, entries: range) -> None:
        count = len(entries)
        batch = RescheduleBatch(
            np.full(count, ledger_id, np.uint64),
            np.array(entries, np.uint64),
            None,
            np.full(count, LATER_MS, np.uint64),
            None,
            ids_of(ledger_id, entries),
        )
        outcome = await self.daemon.call(self.daemon.engine.requests.reschedule(TOPIC, None, batch))
        assert outcome.rescheduled == count

    async def everything(self, ledger_id: int) -> None:
        """Each thing that may have an id, in ledgers from this one on."""
        await self.add(ledger_id, range(20))
        await self.add(ledger_id + 1, range(6), alone=True)
        await self.nack(ledger_id + 2, range(10))
        await self.nack_parts(ledger_id + 3, range(6))
        await self.reject(ledger_id + 4, range(6))
        await self.replay_first()
        await self.reschedule(ledger_id, range(4, 9))


async def tell(story: Story) -> None:
    await story.start()
    requests = story.daemon.engine.requests
    for ledger_id in (1, 2):
        await story.add(ledger_id, range(10))
        assert (await story.daemon.call(requests.seal(TOPIC))).rows
    assert (await story.daemon.call(requests.merge(TOPIC, 1))).merges == 1
    await story.everything(10)
    assert (await story.daemon.call(requests.seal(TOPIC))).rows
    await story.everything(20)
    # What is in memory goes into a checkpoint.
    await story.daemon.stop()
    await story.start()
    await story.everything(30)
    story.daemon.kill()


def pack(store: ObjectStore) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9, format=tarfile.PAX_FORMAT) as archive:
        for entry in store.list(""):
            body, metadata = store.get_with_metadata(entry.key)
            member = tarfile.TarInfo(entry.key)
            member.size, member.mode, member.pax_headers = len(body), 0o644, dict(metadata)
            archive.addfile(member, io.BytesIO(body))
    return packed.getvalue()


def unpack() -> MemoryStore:
    """The root, in memory."""
    store = MemoryStore()
    with tarfile.open(ARCHIVE) as archive:
        for member in archive.getmembers():
            body = archive.extractfile(member)
            assert body is not None
            metadata = {name: value for name, value in member.pax_headers.items() if name not in _OF_TAR}
            store.put(member.name, body.read(), metadata=metadata)
    return store


@contextlib.contextmanager
def machines_of(store: MemoryStore, *, first_id: int = 0) -> Iterator[EngineFixture]:
    """Daemons on a store; the running loop is a `VirtualLoop`. `first_id`: beyond the ids that the root has."""
    machines = EngineFixture(store)
    machines.numbers = itertools.count(first_id)
    with crash_points.intercepted(machines.crash_point):
        yield machines


async def _make(store: MemoryStore) -> Story:
    with machines_of(store) as machines:
        story = Story(machines)
        await tell(story)
        await machines.close()
        return story


def main() -> int:
    if ARCHIVE.exists():
        sys.stderr.write(f"{ARCHIVE} exists: it stays as it is until the storage format is broken on purpose\n")
        return 1
    store = MemoryStore()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        story = runner.run(_make(store))
    told = {"handed_out": sorted(story.expected), "dead_letters": sorted(story.dead)}
    EXPECTED.write_text(json.dumps(told).replace("], [", "],\n[") + "\n")
    ARCHIVE.write_bytes(pack(store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
