"""Logs that daemons wrote, sound and damaged: what each damage is found as, where logs are objects and where they are
files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batch.audit.findings import Finding, Kind, Severity
from storage_backends import object_store
from storage_backends.file_log import LOGS_FOLDER
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, ShardSlot
from storage_backends.formats.manifest import LogForm, Progress
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from storage_backends.store_opening import open_logs
from storage_backends.topic_manifest import ClaimTopic, Seal
from tests.batch.audit._support.audits import audited, findings, kinds
from tests.batch.engine._support.roots import NOW_MS, StoredTopic, make_root
from tests.batch.engine._support.stored_logs import LogDaemon
from tests.daemon.group_commit._support.log_walk import AtOnce


def found_in(store: ObjectStore) -> list[Finding]:
    return findings(audited(store, now_ms=NOW_MS))


class Story:
    """Two shards that three daemons had, one after the other, and a third shard's worth of nothing.

    one    slots 2 to 6 have sections of both shards; checkpoints of shard 0 behind slots 3 and 5; it dies
    two    fences it, claims both, writes slots 2 to 4 of both, takes shard 1 from itself, writes slot 5; it ends
    three  claims both, writes slots 2 to 4; checkpoints of shard 0 behind 2 and 3; it lives
    """

    def __init__(self, store: ObjectStore, form: LogForm) -> None:
        self.store = store
        make_root(store, form)
        self.logs = open_logs(form, store, AtOnce())
        self.one = self.daemon("one")
        for shard in (0, 1):
            self.one.claim(shard)
        for number in range(2, 7):
            self.both(self.one)
            if number in (3, 5):
                self.one.checkpoint(0)
        self.two = self.daemon("two")
        fence = self.two.fence(self.one)
        for shard in (0, 1):
            self.two.claim(shard, fence)
        for _ in range(3):
            self.both(self.two)
        self.two.reclaim(1)
        self.both(self.two)
        self.two.end_log()
        self.three = self.daemon("three")
        closed = self.three.fence(self.two)
        for shard in (0, 1):
            self.three.claim(shard, closed)
        for number in range(2, 5):
            self.both(self.three)
            if number < 4:
                self.three.checkpoint(0)

    def daemon(self, name: str) -> LogDaemon:
        return LogDaemon(self.store, self.logs, name)

    def both(self, daemon: LogDaemon) -> int:
        return daemon.write({0: [], 1: []})

    def close(self) -> None:
        for daemon in (self.one, self.two, self.three):
            daemon.close()


@pytest.fixture(params=list(LogForm))
def story(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Story]:
    """In both forms."""
    with LocalDirectory(tmp_path / "root") as store:
        made = Story(store, request.param)
        yield made
        made.close()


@pytest.fixture
def objects() -> Story:
    """In memory, where each slot is an object."""
    return Story(MemoryStore(), LogForm.OBJECTS)


def change(story: Story, daemon: LogDaemon, number: int, changed: Callable[[bytes], bytes]) -> str:
    """Other bytes of a slot, where slots are objects; its key."""
    key = names.log_slot_key(daemon.log_id, number)
    body, metadata = story.store.get_with_metadata(key)
    story.store.put(key, changed(body), metadata=metadata)
    return key


def delete(story: Story, daemon: LogDaemon, *numbers: int) -> list[str]:
    deleted = [names.log_slot_key(daemon.log_id, number) for number in numbers]
    for key in deleted:
        story.store.delete(key)
    return deleted


# ---- sound


def test_sound_logs_have_no_findings_and_every_slot_is_read(story: Story) -> None:
    report = audited(story.store, now_ms=NOW_MS)
    assert findings(report) == []
    assert report.tally.objects["log slot"] == 7 + 6 + 4
    assert report.tally.moved_on == 0


def test_what_was_truncated_and_what_was_collected_is_not_missed(story: Story) -> None:
    """Nobody needs log one any more, nor what log three has below the checkpoint before the newest."""
    for number in range(2):
        story.both(story.three)
        for shard in (0, 1):
            story.three.checkpoint(shard)
        assert number < 2
    tips = [story.three.tip(shard) for shard in (0, 1)]
    lowest = min(tip.lowest_after(story.three.log_id) or 0 for tip in tips)
    assert lowest > 1
    story.three.truncate(lowest)
    collector = story.logs.log(story.one.log_id)
    collector.delete_through(6)
    collector.close()
    assert findings(audited(story.store, now_ms=NOW_MS)) == []


def test_a_shard_that_was_handed_over_needs_nothing_of_the_log(story: Story) -> None:
    for shard in (0, 1):
        story.three.release(shard)
    assert findings(audited(story.store, now_ms=NOW_MS)) == []
    other = story.daemon("four")
    other.claim(0)
    other.write({0: []})
    other.claim(1)
    other.give_back(1)
    assert findings(audited(story.store, now_ms=NOW_MS)) == []
    other.close()


def test_an_idle_shard_that_needs_less_is_sound(story: Story) -> None:
    for _ in range(2):
        story.three.checkpoint(1)
    for _ in range(2):
        story.three.write({0: []})
    story.three.need_less(1)
    assert findings(audited(story.store, now_ms=NOW_MS)) == []


def test_a_stray_and_a_fence_in_emptied_numbers_are_no_findings(objects: Story) -> None:
    """A late copy below, and the fence of somebody whose list was old."""
    three = objects.three
    bodies = {number: objects.store.get_with_metadata(names.log_slot_key(three.log_id, number)) for number in (2, 3)}
    for _ in range(2):
        objects.both(three)
        for shard in (0, 1):
            three.checkpoint(shard)
    three.truncate(5)
    objects.both(three)
    heads = log_slot_format.decode_log_slot(bodies[3][0]).header.heads
    header = LogSlotHeader(
        log_id=three.log_id, number=4, kind=LogSlotKind.FENCE, heads=heads, writer=log_slot_format.Writer("x", "", "")
    )
    objects.store.put(names.log_slot_key(three.log_id, 4), log_slot_format.encode_log_slot(header))
    for number, (body, metadata) in bodies.items():
        objects.store.put(names.log_slot_key(three.log_id, number), body, metadata=metadata)
    assert found_in(objects.store) == []


# ---- damage


def test_a_damaged_section_is_damage_of_its_shard(objects: Story) -> None:
    key = change(objects, objects.three, 3, lambda body: body[:-1] + bytes([body[-1] ^ 1]))
    (found,) = found_in(objects.store)
    assert (found.kind, found.object, found.shard, found.severity) == (Kind.DAMAGED, key, 1, Severity.ERROR)


def test_a_damaged_header_is_damage_of_the_shards_that_density_shows(objects: Story) -> None:
    key = change(objects, objects.three, 3, lambda body: body[:50] + bytes([body[50] ^ 1]) + body[51:])
    found = found_in(objects.store)
    assert [(each.kind, each.object, each.shard) for each in found] == [
        (Kind.DAMAGED, key, -1),
        (Kind.SLOT_MISSING, key, 0),
        (Kind.SLOT_MISSING, key, 1),
    ]
    assert all("slot 3 is damaged" in each.detail for each in found[1:])


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    with LocalDirectory(tmp_path / "root") as store:
        story = Story(store, LogForm.FILES)
        story.close()
        folder = tmp_path / "root" / LOGS_FOLDER / story.two.log_id
        first = min(path for path in folder.iterdir() if path.name != "LOCK")
        body = bytearray(first.read_bytes())
        body[-2] ^= 1
        first.write_bytes(body)
        found = found_in(store)
        assert [(each.kind, each.shard) for each in found] == [(Kind.DAMAGED, 1)]
        assert found[0].object == names.log_slot_key(story.two.log_id, 5)


def test_damage_that_a_second_read_does_not_show_is_none(objects: Story) -> None:
    key = names.log_slot_key(objects.three.log_id, 3)
    body = objects.store.get(key)
    reads = 0

    def flicker(read: str) -> None:
        nonlocal reads
        if read == key:
            reads += 1
            change(objects, objects.three, 3, lambda _: body[:-1] + b"x" if reads == 1 else body)

    assert findings(audited(objects.store, now_ms=NOW_MS, before_read=flicker)) == []
    assert reads > 1


def test_what_the_store_does_not_give_is_told_and_not_missed(objects: Story) -> None:
    key = names.log_slot_key(objects.three.log_id, 3)

    def fail(read: str) -> None:
        if read == key:
            raise object_store.StoreUnavailable(read, "out for lunch")

    (found,) = findings(audited(objects.store, now_ms=NOW_MS, before_read=fail))
    assert (found.kind, found.object) == (Kind.UNREADABLE, key)


# ---- what is not there


def test_a_hole_is_told_by_log_number_shard_and_shard_slot(objects: Story) -> None:
    """Shard 1 has no checkpoint: it needs everything."""
    keys = delete(objects, objects.one, 3, 4)
    (found,) = found_in(objects.store)
    assert (found.kind, found.object, found.shard) == (Kind.SLOT_MISSING, keys[0], 1)
    assert found.detail == (
        f"sections 2 to 3 of shard 1 in log {objects.one.log_id}, after slot 2 and before slot 5: "
        "replay needs all above section 0"
    )


def test_what_the_checkpoints_cover_is_not_needed_by_the_shard(objects: Story) -> None:
    """A slot that only shard 0 is in."""
    number = objects.three.write({0: []})
    objects.both(objects.three)
    (key,) = delete(objects, objects.three, number)
    found = found_in(objects.store)
    assert [(each.kind, each.object, each.shard) for each in found] == [(Kind.SLOT_MISSING, key, 0)]
    for _ in range(2):
        objects.three.checkpoint(0)
    (found_still,) = found_in(objects.store)
    assert (found_still.kind, found_still.object, found_still.shard) == (Kind.SLOT_MISSING, key, -1), "shard 1 keeps it"
    assert "kept for the shards that name it" in found_still.detail


def test_a_log_whose_end_was_lost_is_found(objects: Story) -> None:
    """The checkpoint of shard 0 has what was in the last slots."""
    objects.three.checkpoint(0)
    keys = delete(objects, objects.three, 3, 4)
    found = found_in(objects.store)
    assert [(each.kind, each.object, each.shard) for each in found] == [
        (Kind.SLOT_MISSING, keys[0], -1),
        (Kind.SLOT_MISSING, keys[1], 0),
    ]


def test_a_log_that_is_gone_is_found(objects: Story) -> None:
    delete(objects, objects.two, *range(1, 7))
    found = found_in(objects.store)
    prefix = names.log_prefix(objects.two.log_id)
    assert {(each.kind, each.object, each.shard) for each in found} == {(Kind.SLOT_MISSING, prefix, 1)}
    assert "which has no slot" in found[0].detail
    delete(objects, objects.three, *range(1, 5))
    assert any(each.object == names.log_prefix(objects.three.log_id) for each in found_in(objects.store))


def test_a_shard_whose_manifests_are_gone_is_found_by_its_sections(objects: Story) -> None:
    for entry in [*objects.store.list(names.shard_manifest_prefix(1))]:
        objects.store.delete(entry.key)
    (found,) = found_in(objects.store)
    assert (found.kind, found.object, found.shard) == (Kind.NO_MANIFEST, names.shard_manifest_prefix(1), 1)


# ---- what may not be


def rewritten(body: bytes, heads: dict[int, Head]) -> bytes:
    """A slot with other heads, and checksums that are right."""
    slot = log_slot_format.decode_log_slot(body)
    sections = {shard: slot.section(shard) for shard in slot.shards}
    header = dataclasses.replace(slot.header, heads={**slot.header.heads, **heads})
    return log_slot_format.encode_log_slot(header, sections)


def test_heads_that_fall_are_found_and_so_is_a_section_that_is_another(objects: Story) -> None:
    key = change(objects, objects.three, 4, lambda body: rewritten(body, {0: Head(1, 9)}))
    found = [each for each in found_in(objects.store) if each.kind is Kind.LOG_RULE]
    assert {(each.object, each.shard) for each in found} == {(key, 0)}
    details = " / ".join(each.detail for each in found)
    assert "is section 9 of epoch 1, after section" in details
    assert "its section 9 of shard 0, epoch 1, is section" in details


def test_a_fence_with_other_heads_than_the_slot_before_it_is_found(objects: Story) -> None:
    key = change(objects, objects.one, 7, lambda body: rewritten(body, {1: Head(1, 4)}))
    (found,) = found_in(objects.store)
    assert (found.kind, found.object, found.shard) == (Kind.LOG_RULE, key, 1)
    assert "it is a FENCE" in found.detail


def test_a_slot_under_the_number_of_another_is_found(objects: Story) -> None:
    other = objects.store.get(names.log_slot_key(objects.three.log_id, 3))
    key = change(objects, objects.three, 2, lambda _: other)
    found = found_in(objects.store)
    assert (Kind.LOG_RULE, key) in [(each.kind, each.object) for each in found]
    assert found[-1].detail.startswith("it is slot 3 of log") or found[0].detail.startswith("it is slot 3 of log")


def test_a_slot_behind_the_end_of_a_log_is_found(objects: Story) -> None:
    """Whoever wrote it did not look for the fence."""
    body = objects.store.get(names.log_slot_key(objects.one.log_id, 6))
    slot = log_slot_format.decode_log_slot(body)
    later = dataclasses.replace(slot.header, number=8)
    key = names.log_slot_key(objects.one.log_id, 8)
    objects.store.put(key, log_slot_format.encode_log_slot(later, {each: slot.section(each) for each in slot.shards}))
    (found,) = found_in(objects.store)
    assert (found.kind, found.object) == (Kind.LOG_RULE, key)
    assert "after slot 7, the end of the log" in found.detail


def test_what_is_no_slot_among_slots_is_told(objects: Story) -> None:
    key = f"{names.log_prefix(objects.one.log_id)}notes"
    objects.store.put(key, b"mine")
    assert (Kind.FOREIGN, key) in kinds(audited(objects.store, now_ms=NOW_MS))
    objects.store.delete(key)
    key = f"{names.LOGS_PREFIX}notes/{1:020d}"
    objects.store.put(key, b"mine")
    assert kinds(audited(objects.store, now_ms=NOW_MS)) == [(Kind.FOREIGN, key)], "the logs that are named are read"


def test_a_topic_that_has_applied_what_its_shard_never_had_is_found(objects: Story) -> None:
    topic = StoredTopic(objects.store, "t")
    last = objects.three.last_slot(topic.shard)
    for epoch in range(2, 4):
        topic.commit(ClaimTopic(epoch=epoch))
    topic.epoch = 3

    def applied(slot: int) -> None:
        topic.commit(
            Seal(
                buckets=(),
                progress=Progress(),
                progress_object=None,
                slot_from=ShardSlot(topic.tip().applied),
                slot_to=ShardSlot(slot),
                epoch=topic.epoch,
                replaced_delete_after_ms=NOW_MS,
            )
        )

    applied(last)
    assert found_in(objects.store) == []
    applied(last + 1)
    (found,) = found_in(objects.store)
    assert (found.kind, found.topic) == (Kind.BEYOND_LOG, "t")
    assert f"has applied section {last + 1}, but the sections of its shard end at {last}" in found.detail


# ---- meanwhile


def test_what_owners_do_while_logs_are_read_is_no_finding(story: Story) -> None:
    """The manifests of shards are old when the logs are read: checkpoints, truncation, a takeover, collection."""
    steps: Iterator[Callable[[], object]] = iter(_steps(story))

    def between() -> None:
        next(steps, lambda: None)()

    for _ in range(8):
        assert findings(audited(story.store, now_ms=NOW_MS, between=between)) == []
    assert next(steps, None) is None, "the whole story was told"


def _steps(story: Story) -> Iterator[Callable[[], object]]:
    three = story.three
    for _ in range(3):
        yield lambda: story.both(three)
        for shard in (0, 1):
            yield lambda shard=shard: three.checkpoint(shard)  # type: ignore[misc]
    yield lambda: three.truncate(min(three.tip(shard).lowest_after(three.log_id) or 0 for shard in (0, 1)))
    four = story.daemon("four")
    fence = four.fence(three)
    for shard in (0, 1):
        yield lambda shard=shard: four.claim(shard, fence)  # type: ignore[misc]
    yield lambda: story.both(four)
    for shard in (0, 1, 0, 1):
        yield lambda shard=shard: four.checkpoint(shard)  # type: ignore[misc]
    yield lambda: story.logs.log(three.log_id).delete_through(fence.end)
    yield four.close
