"""The golden roots are served and read as they were written, and have one of each kind of thing that is stored."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tarry
from batch.audit.findings import Kind
from examples.processes import DaemonProcess, local_store
from storage_backends import log_fence, object_store, store_opening
from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    deletion_format,
    log_slot_format,
    manifest,
    names,
    slot_format,
)
from storage_backends.formats.generated import deletion_pb2, journal_pb2
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.local_directory import LocalDirectory
from tests.batch.audit._support import audits
from tests.golden_root import account, make

DOCUMENT = Path(__file__).parents[2] / "docs" / "STORAGE_FORMAT.md"


@pytest.fixture(scope="module", params=make.FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """Of the logs of the root."""
    return str(request.param)


@pytest.fixture(scope="module")
def expected(form: str) -> account.Json:
    return json.loads(make.expected_of(form).read_text())


@pytest.fixture(scope="module")
def root(form: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    return make.unpack(form, tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def client(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tarry.Client]:
    """Of a daemon that serves a copy, under the id of the one that died on it, and has loaded all of it."""
    directory = tmp_path_factory.mktemp("served")
    settings = local_store(make.unpack(form, directory / "root"))
    with DaemonProcess(make.LAST_DAEMON, directory, settings) as daemon:
        daemon.start_serving(timeout_s=600)
        with tarry.Client(daemon.address, timeout_s=600) as client:
            make.wait_until(lambda: client.topics_page().topics_loading == 0, "all topics are loaded")
            yield client


# ---- what is served


def test_each_topic_is_served_as_it_was_left(client: tarry.Client, expected: account.Json) -> None:
    found = {each.topic: account.served(client, each.topic) for each in client.topics()}
    assert account.differences(expected["topics"], found) == []


def test_deletions_of_ledgers_stand_where_they_stood(client: tarry.Client, expected: account.Json) -> None:
    found = account.deletions_served(client)
    assert account.differences(expected["deletions"], found) == []


def test_what_is_due_is_handed_out_and_nothing_else(client: tarry.Client, expected: account.Json) -> None:
    now_ms = time.time_ns() // 1_000_000
    for topic, of_topic in expected["topics"].items():
        for subscription, of_subscription in of_topic["subscriptions"].items():
            due = [row for row in of_subscription["backlog"] if row[6] == 0]
            got = sorted(leased(client, topic, subscription, len(due)))
            assert got == sorted((row[0], row[1], row[3]) for row in due), (topic, subscription)
            assert all(row[3] <= now_ms for row in due)


def leased(client: tarry.Client, topic: str, subscription: str, rows: int) -> list[tuple[int, int, int]]:
    """What is handed out until there are so many, and what comes without waiting after that."""
    found: list[tuple[int, int, int]] = []
    while True:
        batch = client.get(topic, subscription, max_rows=10_000, wait_ms=60_000 if len(found) < rows else 0)
        if not len(batch):
            return found
        columns = (batch.ledger_id, batch.entry_id, batch.deliver_at_ms)
        found += zip(*(column.tolist() for column in columns), strict=True)


def test_a_topic_that_was_deleted_is_not_there(client: tarry.Client) -> None:
    with pytest.raises(tarry.NotFound):
        client.stats("deleted")
    assert client.stats("reborn").incarnation == 2


def test_a_difference_is_found() -> None:
    """Of a count, of a row that is missing, of a time out of its range."""
    expected = {"rows": [[1, [10, 20]]], "more": 1}
    assert account.differences(expected, {"rows": [[1, 15]], "more": 1}) == []
    assert account.differences(expected, {"rows": [[1, 21]], "more": 1})
    assert account.differences(expected, {"rows": [], "more": 1})
    assert account.differences(expected, {"rows": [[1, 15]]})


# ---- what is in it


class Stored:
    """All that is in the root, decoded."""

    def __init__(self, root: Path) -> None:
        store = LocalDirectory(root)
        bodies, self.damaged = {}, []
        for listed in store.list(""):
            try:
                bodies[listed.key] = store.get(listed.key)
            except object_store.Damaged:
                self.damaged.append(listed.key)
        self.logs = dict(_logs(store, manifest.decode_root_format(bodies[names.FORMAT_KEY]).log_form))
        log_slots = [slot for slots in self.logs.values() for slot in slots]
        stored = [slot.section(shard) for slot in log_slots for shard in slot.shards]
        self.magics = {body[:4].decode() for body in (log_slot_format.MAGIC, *bodies.values(), *stored)}
        of = {kind: [body for key, body in bodies.items() if f"/{kind}/" in key] for kind in KINDS}
        self.slots = [slot_format.read_slot(body) for body in stored]
        self.checkpoints = [checkpoint_format.decode_checkpoint(body) for body in of["checkpoint"]]
        self.properties = {
            key: manifest.decode_properties(body) for key, body in bodies.items() if "/properties/" in key
        }
        self.progress_objects = [manifest.decode_progress(body) for body in of["progress"]]
        shards: list[tuple[str, bytes]] = []
        topics: list[tuple[str, bytes]] = []
        for key, body in bodies.items():
            if "/manifest/" in key and not key.startswith("dead_objects/"):
                (topics if "/topics/" in key else shards).append((key, body))
        self.shard_tips = list(_tips(shards, manifest.decode_shard_manifest).values())
        self.shard_manifests = [manifest.decode_shard_manifest(body) for _, body in shards]
        self.topic_tips = list(_tips(topics, manifest.decode_topic_manifest).values())
        self.topic_manifests = [manifest.decode_topic_manifest(body) for _, body in topics]
        live = {each.object.name for tip in self.topic_tips for each in tip.live if not each.quarantined}
        self.buckets = [bucket_format.decode_bucket(bodies[key])[0] for key in live]
        self.live = [each for tip in self.topic_tips for each in tip.live]
        self.keys = set(bodies)
        self.progress = [tip.progress for tip in self.topic_tips if tip.progress is not None] + self.progress_objects
        self.parts = [part for each in self.checkpoints for part in each.topics]


KINDS = ("checkpoint", "progress")


def _logs(store: LocalDirectory, form: manifest.LogForm) -> Iterator[tuple[str, list[log_slot_format.LogSlot]]]:
    """By log, its slots, ascending."""
    with concurrent.futures.ThreadPoolExecutor() as executor:
        logs = store_opening.open_logs(form, store, executor)
        for log_id in sorted(logs.log_ids()):
            with contextlib.closing(logs.log(log_id)) as slots:
                found = slots.read(0, slots.highest() or 0)
            yield log_id, [log_fence.decoded(log_id, each.number, each.body, each.damage) for each in found]


def _tips(found: list[tuple[str, bytes]], decode: account.Json) -> dict[str, account.Json]:
    """The newest of each sequence."""
    return {key.rpartition("/")[0]: decode(body) for key, body in sorted(found)}


@pytest.fixture(scope="module")
def stored(root: Path) -> Stored:
    return Stored(root)


def test_it_has_each_kind_of_object(stored: Stored) -> None:
    # A root in a directory has no pass of the probe.
    documented = set(re.findall(r"`(Ty[A-Z]{2})`", DOCUMENT.read_text())) - {"TyBF", "TyPP"}
    assert len(documented) == 10
    assert stored.magics == documented


def test_it_has_each_kind_of_record(stored: Stored) -> None:
    written = {record.message.WhichOneof("decision") for slot in stored.slots for record in slot.records}
    assert written == {field.name for field in journal_pb2.Record.DESCRIPTOR.oneofs_by_name["decision"].fields}
    decided = {type(each) for slot in stored.slots for each in slot.deletions}
    assert len(decided) == len(deletion_pb2.DeletionRecord.DESCRIPTOR.oneofs_by_name["decision"].fields)


def test_it_has_each_form_of_a_record(stored: Stored) -> None:
    records = [record.decoded() for slot in stored.slots for record in slot.records]
    gone = {each.reason for each in records if isinstance(each, slot_format.GoneRecord)}
    assert gone == set(slot_format.GoneReason) - {slot_format.GoneReason.UNSPECIFIED}
    dead = {each.reason for each in records if isinstance(each, slot_format.DeadLetterRecord)}
    # The root is of before trims that leave dead letters.
    assert dead == set(slot_format.DeadLetterReason) - {slot_format.DeadLetterReason.TRIMMED}
    assert {each.added for each in records if isinstance(each, slot_format.NackRecord)} == {False, True}
    adds = [each for each in records if isinstance(each, slot_format.AddRecord)]
    assert {bool(each.delay_level) for each in adds} == {False, True}
    assert {bool(each.subscription_id) for each in adds} == {False, True}
    acknowledged = {_index_kind(each.index_id) for each in records if isinstance(each, slot_format.AcknowledgeRecord)}
    assert acknowledged == {"shared", "own", "parts"}
    decided = [each for slot in stored.slots for each in slot.deletions]
    changes = {each.change for each in decided if isinstance(each, deletion_format.ChangeInUse)}
    assert changes == set(deletion_format.InUseChange)
    answers = [each for one in decided if isinstance(one, deletion_format.AnswerDeletes) for each in one.answers]
    outcomes = {each.outcome for each in answers}
    assert outcomes == set(deletion_format.DeletionOutcome) - {deletion_format.DeletionOutcome.PENDING}


def _index_kind(index_id: int) -> str:
    return "shared" if index_id == 0 else "parts" if index_id >= 1 << 63 else "own"


def test_it_has_logs_of_two_owners_and_sections_above_two_checkpoints(stored: Stored) -> None:
    kinds = {slot.header.kind for slots in stored.logs.values() for slot in slots}
    assert kinds | {LogSlotKind.OPEN} == set(LogSlotKind), "OPEN goes when no shard needs it"
    living = {tip.open_range.log_id for tip in stored.shard_tips if tip.open_range is not None}
    ended = {log_id for log_id, slots in stored.logs.items() if slots[-1].header.kind.ends}
    assert living | ended == stored.logs.keys()
    assert living.isdisjoint(ended)
    assert {each.log_id for tip in stored.shard_tips for each in tip.ranges} & ended, "a range that is closed"
    both = [tip for tip in stored.shard_tips if tip.checkpoint and tip.previous_checkpoint]
    assert len(both) >= 2
    tails = {
        tip.shard
        for tip in both
        for slot in stored.slots
        if slot.header.shard == tip.shard and tip.checkpoint and slot.header.slot > tip.checkpoint.slot and slot.records
    }
    assert len(tails) >= 2


def test_its_checkpoints_have_every_part_of_a_topic(stored: Stored) -> None:
    assert any(len(part.mutable_rows) for part in stored.parts)
    assert any(part.own_rows for part in stored.parts)
    sealing = [each for part in stored.parts for each in part.sealing]
    assert {bool(each.subscription_id) for each in sealing} == {False, True}
    assert any(part.carried and part.slot is not None for part in stored.parts)
    assert any(part.progress and part.progress.redeliveries for part in stored.parts)
    states = [each.deletions for each in stored.checkpoints if each.deletions is not None]
    assert any(state.deletions and state.in_use for state in states)


def test_its_buckets_have_each_form(stored: Stored) -> None:
    live = stored.live
    assert {each.compatible_form for each in live} == {False, True}
    assert {each.quarantined for each in live} == {False, True}
    assert {min(each.level, 2) for each in live} == {0, 1, 2}
    assert any(each.subscription_id for each in live)
    assert any(each.kept for each in stored.buckets)


def test_its_progress_has_each_part_inline_and_as_an_object(stored: Stored) -> None:
    assert any(tip.progress for tip in stored.topic_tips)
    assert any(tip.progress_object for tip in stored.topic_tips)
    buckets = [each for progress in stored.progress for each in progress.buckets]
    assert any(each.gone for each in buckets)
    assert any(each.acknowledged for each in buckets)
    everywhere = stored.progress + [part.progress for part in stored.parts if part.progress is not None]
    redeliveries = [each for progress in everywhere for each in progress.redeliveries]
    assert any(each.nacked for each in redeliveries)
    assert any(each.counts for each in redeliveries)
    assert any(each.dead_letters for each in redeliveries)
    assert any(progress.levels for progress in everywhere)


def test_its_manifests_have_what_leaves_and_what_was_set(stored: Stored) -> None:
    assert any(tip.tombstones for tip in stored.topic_tips)
    assert any(tip.tombstones for tip in stored.shard_tips)
    assert {tip.deleted for tip in stored.topic_tips} == {False, True}
    assert max(tip.incarnation for tip in stored.topic_tips) >= 2
    assert any(tip.delay_levels for tip in stored.topic_tips)
    named = {tip.properties_object.name for tip in stored.topic_tips if tip.properties_object is not None}
    assert {len(stored.properties[key].subscriptions) for key in named} == {1, 2}
    buried = {each.object.name for tip in stored.topic_tips for each in tip.tombstones}
    assert stored.properties.keys() & buried == stored.properties.keys() - named != set()
    subscriptions = [each for tip in stored.topic_tips for each in tip.subscriptions]
    kinds = {each.policy.redelivery.kind for each in subscriptions if each.policy.redelivery is not None}
    assert kinds == set(manifest.RedeliveryKind)
    shared = [each.policy.key_shared for each in subscriptions if each.policy.key_shared is not None]
    assert {each.selector for each in shared} == set(manifest.HashSelector)
    assert {each.order for each in shared} == set(manifest.KeyOrder)
    assert {each.nack_order for each in shared} == set(manifest.NackOrder)


# ---- who reads it without a daemon


def test_the_audit_finds_the_damaged_bucket_and_what_was_given_up_and_nothing_else(root: Path, stored: Stored) -> None:
    (damaged,) = stored.damaged
    now_ms = max(tip.head.created_ms for tip in stored.shard_tips)
    found = audits.kinds(audits.audited(LocalDirectory(root), now_ms=now_ms))
    assert [key for kind, key in found if kind is Kind.QUARANTINED] == [damaged]
    given_up = sorted(key for kind, key in found if kind is Kind.GIVEN_UP)
    assert given_up == sorted(key for key in stored.keys if key.startswith("dead_objects/"))
    assert {kind for kind, _ in found} == {Kind.QUARANTINED, Kind.GIVEN_UP}, found
