"""Objects that hold schedule ids, or name some, under real daemons and jobs of a release that knows none, run from its
pinned archive.

It refuses shards and topics by their manifests, serves the rest, and rewrites nothing of what it does not know.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import random
import shutil
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import ulid

import tarry
from daemon.shard.range_operations import RequireOfShard, WriteCheckpoint
from examples.processes import DaemonProcess, local_store
from storage_backends import commit, log_fence, shard_manifests, topic_manifest
from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    log_slot_format,
    manifest,
    names,
    requirements,
    segment,
    slot_format,
)
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.local_directory import LocalDirectory
from storage_backends.object_log import ObjectLogs
from tests._support.processes import run_child
from tests._support.topic_names import topic_of

pytestmark = pytest.mark.long

PINNED = sorted((Path(__file__).parent / "pinned").glob("*.tar.xz"))
SHARDS = 8
PATIENCE_S = 300.0
FAR_MS = 2_000_000_000_000  # 2033
ROWS = 20


# What is newer, each in a shard of its own
UNTOUCHED, SHARD, CHECKPOINT, SECTION, TOPIC, BUCKET = range(6)
TOPICS = {shard: topic_of(shard, SHARDS, "topic-") for shard in range(6)}
# Another topic of the shard whose topic is refused
NEIGHBOUR = topic_of(TOPIC, SHARDS, "neighbour-")


@dataclasses.dataclass(frozen=True)
class Release:
    """Whose code runs. `checkout`: where its packages are."""

    name: str
    checkout: Path

    def run(self, module: str, *arguments: object) -> tuple[int, str, str]:
        environment = {**os.environ, "PYTHONPATH": str(self.checkout)}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        ended = run_child(command, env=environment, cwd=self.checkout)
        return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture(scope="module", params=[path.name.removesuffix(".tar.xz") for path in PINNED])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    checkout = tmp_path_factory.mktemp("former")
    with tarfile.open(Path(__file__).parent / "pinned" / f"{request.param}.tar.xz") as archive:
        # Python before 3.11.4 has no filters, and takes no argument for one.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(checkout)
    return Release(request.param, checkout)


# ---- a root with newer objects


def with_ids(ledger_id: int, first_ms: int = FAR_MS) -> Rows:
    entries = np.arange(ROWS, dtype=np.uint64)
    listed = [b"order-%d" % number for number in range(ROWS)]
    ids = ScheduleIds.of_piece(np.array(list(map(len, listed)), np.uint64), b"".join(listed))
    return Rows(np.uint64(first_ms) + entries, np.full(ROWS, ledger_id, np.uint64), entries, None, ids)


class Writer:
    """Writes what a daemon that knows schedule ids would write, in place of the owner that was killed."""

    def __init__(self, root: Path) -> None:
        self.store = LocalDirectory(root)
        self._tools = {
            "monotonic": time.monotonic,
            "sleep": time.sleep,
            "jitter": random.random,
            "new_id": lambda: str(uuid.uuid4()),
        }

    def shard_log(self, shard: int) -> commit.ManifestLog[manifest.ShardManifest]:
        return shard_manifests.shard_log(self.store, shard, **self._tools)  # type: ignore[arg-type]

    def topic_log(self, topic: str) -> commit.ManifestLog[manifest.TopicManifest]:
        shard = names.shard_of(topic, SHARDS)
        return topic_manifest.topic_log(self.store, shard, names.topic_id(topic), **self._tools)  # type: ignore[arg-type]

    def put(self, log: commit.ManifestLog[commit.M], operation: commit.Operation[commit.M]) -> None:
        commit.commit(log, operation, writer="newer", created_ms=1, deadline_s=PATIENCE_S)

    def tip(self, log: commit.ManifestLog[commit.M]) -> commit.M:
        tip = log.read_tip()
        assert tip is not None
        return tip.manifest

    def require_of_shard(self) -> None:
        log = self.shard_log(SHARD)
        self.put(log, RequireOfShard(requirement=requirements.SCHEDULE_IDS, epoch=self.tip(log).epoch))

    def require_of_topic(self) -> None:
        log = self.topic_log(TOPICS[TOPIC])
        epoch = self.tip(log).owner_epoch
        self.put(log, topic_manifest.RequireOfTopic(requirement=requirements.SCHEDULE_IDS, epoch=epoch))

    def checkpoint(self) -> None:
        """The checkpoint of a shard, whose topic has rows with ids."""
        log = self.shard_log(CHECKPOINT)
        tip = self.tip(log)
        owned = tip.open_range
        assert owned is not None
        topic = TOPICS[CHECKPOINT]
        part = checkpoint_format.TopicPart(names.topic_id(topic), topic, 1, with_ids(9))
        slot = ShardSlot(owned.first_slot)
        body = checkpoint_format.encode_checkpoint(
            checkpoint_format.Checkpoint(CHECKPOINT, tip.epoch, slot, (part,), known={names.topic_id(topic): 0})
        )
        key = names.checkpoint_key(CHECKPOINT, tip.head.number, str(ulid.ULID()))
        self.store.put(key, body)
        reference = topic_manifest.reference_to(key, tip.head.number, body)
        cut = manifest.CheckpointCut(object=reference, slot=slot, log_id=owned.log_id, at=owned.after)
        self.put(log, WriteCheckpoint(cut=cut, epoch=tip.epoch, delete_after_ms=FAR_MS))

    def section(self) -> None:
        """One more slot of the log, with a section of a shard: rows with ids."""
        owned = self.tip(self.shard_log(SECTION)).open_range
        assert owned is not None
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            slots = ObjectLogs(self.store, executor).log(owned.log_id)
            number = slots.highest()
            assert number is not None
            newest = log_fence.read_one(slots, number)
            assert newest is not None
            head = newest.header.heads[SECTION]
            record = slot_format.AddRecord(names.topic_id(TOPICS[SECTION]), 1, 0, with_ids(9))
            header = slot_format.SlotHeader(SECTION, head.epoch, ShardSlot(head.last_slot + 1), 1)
            heads = {**newest.header.heads, SECTION: Head(head.epoch, ShardSlot(head.last_slot + 1))}
            slot = LogSlotHeader(log_id=owned.log_id, number=number + 1, kind=LogSlotKind.DATA, heads=heads)
            body = slot_format.encode_slot(header, (record,))
            slots.create(number + 1, log_slot_format.encode_log_slot(slot, {SECTION: body}))

    def bucket(self) -> str:
        """A bucket in place of the one of a topic; return its key."""
        log = self.topic_log(TOPICS[BUCKET])
        (live,) = self.tip(log).live
        encoded = bucket_format.encode_bucket(
            with_ids(1),
            topic=TOPICS[BUCKET],
            subscription_id=0,
            limits=segment.SegmentLimits(),
            compatible=False,
        )
        key: str = live.object.name
        self.store.put(key, encoded.body)
        reference = dataclasses.replace(
            live.object, size_bytes=len(encoded.body), sha256=hashlib.sha256(encoded.body).digest()
        )

        class Replaced:
            def precondition(self, tip: manifest.TopicManifest | None) -> str | None:
                return None

            def apply(self, tip: manifest.TopicManifest | None) -> manifest.TopicManifest:
                assert tip is not None
                return dataclasses.replace(tip, live=(dataclasses.replace(live, object=reference),))

            def landed(self, tip: manifest.TopicManifest) -> bool:
                return False

        self.put(log, Replaced())
        return key


@pytest.fixture(scope="module")
def newer_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose owner was killed, with one newer object of each kind."""
    directory = tmp_path_factory.mktemp("newer")
    root = directory / "root"
    settings = {**local_store(root), "store.log_form": "objects", "daemon.shards": SHARDS}
    with DaemonProcess("one", directory, settings) as daemon:
        daemon.start_serving(PATIENCE_S)
        with tarry.Client(daemon.address, timeout_s=PATIENCE_S) as client:
            for topic in (*TOPICS.values(), NEIGHBOUR):
                client.create_subscription(topic, "s")
                client.add(topic, 1, range(ROWS), deliver_at_ms=FAR_MS)
            for shard in (TOPIC, BUCKET, UNTOUCHED):
                assert client.seal(TOPICS[shard]).bucket
        daemon.kill()
    writer = Writer(root)
    for write in (writer.section, writer.checkpoint, writer.bucket, writer.require_of_topic, writer.require_of_shard):
        write()
    return root


@pytest.fixture
def root(newer_root: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "root"
    shutil.copytree(newer_root, copied, symlinks=True)
    return copied


def contents(root: Path, prefix: str) -> Mapping[str, bytes]:
    store = LocalDirectory(root)
    return {each.key: store.get(each.key) for each in store.list(prefix)}


# ---- daemons


@pytest.fixture
def daemon(release: Release, root: Path, tmp_path: Path) -> Iterator[DaemonProcess]:
    settings = {**local_store(root), "collection.interval_s": 1, "journal.checkpoint_slots": 2}
    with DaemonProcess("one", tmp_path, settings, checkout=release.checkout) as daemon:
        daemon.start_serving(PATIENCE_S)
        yield daemon
        assert daemon.alive


REFUSED = {
    SHARD: f"shard {SHARD}, .*manifest.*version 2",
    SECTION: f"shard {SECTION}, .*version 2 is not known",
    TOPIC: f"topic {TOPICS[TOPIC]}: .*manifest.*version 2",
}


def test_a_daemon_refuses_what_it_does_not_know_by_name_and_leaves_it_as_it_is(
    daemon: DaemonProcess, root: Path
) -> None:
    kept = {
        SHARD: names.shard_prefix(SHARD),
        TOPIC: names.topic_prefix(TOPIC, names.topic_id(TOPICS[TOPIC])),
    }
    before = {shard: contents(root, prefix) for shard, prefix in kept.items()}
    (bucket,) = contents(root, names.buckets_prefix(BUCKET, names.topic_id(TOPICS[BUCKET]))).items()
    with tarry.Client(daemon.address, timeout_s=PATIENCE_S) as client:
        for topic in (TOPICS[UNTOUCHED], NEIGHBOUR):
            # Also what is written meanwhile: sections, checkpoints, seals
            assert client.add(topic, 2, range(ROWS), deliver_at_ms=FAR_MS).accepted == ROWS
            assert client.seal(topic).bucket
            assert client.stats(topic).pending == 2 * ROWS
    for shard, pattern in REFUSED.items():
        with (
            tarry.Client(daemon.address, timeout_s=PATIENCE_S) as client,
            pytest.raises(tarry.TarryError, match=pattern),
        ):
            client.add(TOPICS[shard], 2, range(ROWS), deliver_at_ms=FAR_MS)
    with tarry.Client(daemon.address, timeout_s=PATIENCE_S) as client:
        # It takes the checkpoint for damaged, and goes on from the one before; it quarantines the bucket, and serves
        # the rest. Manifests of version 2, which it refuses, name such objects.
        for shard in (CHECKPOINT, BUCKET):
            assert client.add(TOPICS[shard], 2, range(ROWS), deliver_at_ms=FAR_MS).accepted == ROWS
    writer = Writer(root)
    (live,) = writer.tip(writer.topic_log(TOPICS[BUCKET])).live
    assert live.quarantined
    assert {shard: contents(root, prefix) for shard, prefix in kept.items()} == before
    assert LocalDirectory(root).get(bucket[0]) == bucket[1]


# ---- jobs


def test_an_audit_names_what_it_does_not_know_and_reads_the_rest(release: Release, root: Path) -> None:
    before = contents(root, "")
    status, output, log = release.run(
        "batch.cli.entry", "audit", "--engine", "local", "--store", root, "--json", "--quiet"
    )
    assert status == 1, log
    report = json.loads(output)
    found = {each["object"]: each["detail"] for each in report["findings"] if each["kind"] == "damaged"}
    for pattern in (
        f"shards/0{SHARD}/manifest/",
        f"shards/0{CHECKPOINT}/checkpoint/",
        f"shards/0{TOPIC}/topics/{names.topic_id(TOPICS[TOPIC])}/manifest/",
        f"shards/0{BUCKET}/topics/{names.topic_id(TOPICS[BUCKET])}/buckets/",
        "logs/",
    ):
        details = [detail for key, detail in found.items() if key.startswith(pattern)]
        assert details, (pattern, found)
        assert all("version 2 is not known" in each for each in details), details
    assert report["topics"] >= 5
    assert contents(root, "") == before


@pytest.mark.parametrize("command", ["compact", "forecast"])
def test_a_job_leaves_out_what_it_does_not_know(release: Release, root: Path, command: str) -> None:
    before = {
        prefix: contents(root, prefix)
        for prefix in (names.shard_prefix(shard) for shard in (SHARD, CHECKPOINT, SECTION, TOPIC, BUCKET))
    }
    status, output, log = release.run("batch.cli.entry", command, "--engine", "local", "--store", root, "--json")
    assert status in {0, 1}, log
    assert "version 2 is not known" in log + output
    assert {prefix: contents(root, prefix) for prefix in before} == before


def test_there_is_a_pinned_release() -> None:
    assert PINNED
