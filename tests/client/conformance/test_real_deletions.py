"""Both clients and a real daemon: ledgers are recorded, verified, deleted, kept when in use, given up, and found."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tarry
import tarry.aio
from examples import processes
from storage_backends.local_directory import LocalDirectory
from tests._support.ledger_owner_server import LedgerOwnerServer, ledger_owner_server
from tests._support.processes import Daemons
from tests.client.conformance._support.threaded import in_thread
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_S = 600.0
DRIVER = "aws-s3"
SETTINGS: dict[str, object] = {
    "daemon.shards": 4,
    "deletion.reconsume_later_seconds": 1,
    "deletion.max_retry_delete_count": 1,
    "deletion.sweep_grace_s": 0,
}
CONFIGURATION = """
[[deletion.owners]]
name = "owner"
topic_prefixes = ["owned-"]
delete_url = "{url}"

[[deletion.object_stores]]
name = "archive"
drivers = ["aws-s3"]
kind = "local"
path = "{path}"
"""


@pytest.fixture(scope="module")
def owner() -> Iterator[LedgerOwnerServer]:
    with ledger_owner_server() as serving:
        yield serving


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDirectory]:
    store = LocalDirectory(tmp_path_factory.mktemp("archive"))
    yield store
    store.close()


def daemon_of(directory: Path, daemons: Daemons, owner: LedgerOwnerServer, archive: LocalDirectory) -> Any:
    configuration = CONFIGURATION.format(url=owner.url, path=archive.root)
    return daemons.make("tarryd", SETTINGS | processes.local_store(directory / "root"), configuration=configuration)


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, owner: LedgerOwnerServer, archive: LocalDirectory
) -> Iterator[processes.DaemonProcess]:
    directory = tmp_path_factory.mktemp("daemon")
    daemons = Daemons(directory)
    try:
        made = daemon_of(directory, daemons, owner, archive)
        made.start_serving()
        yield made
    finally:
        daemons.end()


@pytest.fixture
def mortal_daemon(
    tmp_path: Path, owner: LedgerOwnerServer, archive: LocalDirectory
) -> Iterator[processes.DaemonProcess]:
    daemons = Daemons(tmp_path)
    try:
        made = daemon_of(tmp_path, daemons, owner, archive)
        made.start_serving()
        yield made
    finally:
        daemons.end()


@pytest.fixture
def client(daemon: processes.DaemonProcess, connect: Connect) -> tarry.aio.Client:
    return connect(daemon.address, timeout_s=PATIENCE_S)


@pytest.fixture
def topic(topic: str) -> str:
    """Of the owner."""
    return f"owned-{topic}"


@pytest.fixture
def ledgers() -> range:
    """Five of their own for each test: one owner has them all."""
    first = uuid.uuid4().int >> 66
    return range(first, first + 5)


def metadata(topic: str, **others: str) -> dict[str, str]:
    return {"application": "pulsar", "component": "managed-ledger", "pulsar/managed-ledger": topic, **others}


class Offloaded:
    """An offloaded ledger in the archive."""

    def __init__(self, archive: LocalDirectory, topic: str, ledger_id: int, **others: str) -> None:
        self._archive = archive
        self.uuid = uuid.uuid4()
        self.names = [f"{self.uuid}-ledger-{ledger_id}{end}" for end in ("", "-index")]
        for name in self.names:
            stored = {key.replace("/", "-"): value for key, value in metadata(topic, **others).items()}
            archive.put(name, b"entries", metadata=stored)
        self.delete = tarry.PendingDelete(
            ledger_id,
            ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
            offload_context=tarry.OffloadContext(self.uuid, DRIVER),
        )

    @property
    def is_there(self) -> list[bool]:
        return [self._archive.path_of(name).exists() for name in self.names]


async def until(holds: Callable[[], Awaitable[Any]]) -> Any:
    """What is true in the end."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not (answer := await holds()):
        assert time.monotonic() < give_up_at, f"{holds} does not hold in time"
        await asyncio.sleep(0.02)
    return answer


async def listed(iterated: Any) -> list[tarry.Deletion]:
    return [each async for each in iterated]


async def outcomes(client: tarry.aio.Client, topic: str, ended: int) -> dict[tuple[int, str], tarry.Deletion]:
    """By ledger and type, when so many of the topic have ended."""
    which = tarry.DeletionFilter(topic=topic)

    async def all_ended() -> list[tarry.Deletion] | None:
        found = await listed(client.ended_deletes(which))
        return found if len(found) == ended else None

    found = await until(all_ended)
    assert (await client.deletion_stats(topic)).in_flight == 0
    return {(each.pending_delete.ledger_id, each.pending_delete.ledger_type.name): each for each in found}


# Recorded, verified, deleted.


async def test_of_ledgers_1_to_5_of_which_1_is_recorded_and_2_is_not_2_to_5_remain(
    client: tarry.aio.Client, owner: LedgerOwnerServer, topic: str, ledgers: range
) -> None:
    """The example of PIP-186, with a second record that is malformed."""
    owner.ledgers.update(dict.fromkeys(ledgers, metadata(topic)))
    wrong = tarry.PendingDelete(ledgers[1], cursor_name="departures")
    became = await client.record_pending_deletes(topic, [tarry.PendingDelete(ledgers[0]), wrong])
    assert became.remaining(ledgers) == list(ledgers[1:])
    ((refused, reason, text),) = [(each.delete, each.reason, each.text) for each in became.refused]
    assert (refused, reason) == (wrong, tarry.RefusalReason.MALFORMED)
    assert "cursor_name" in text
    ended = await outcomes(client, topic, 1)
    assert ended[ledgers[0], "LEDGER"].outcome == tarry.DeletionOutcome.DELETED
    assert [ledger_id in owner.ledgers for ledger_id in ledgers] == [False, True, True, True, True]


async def test_what_was_recorded_before_the_daemon_went_away_is_deleted_and_the_rest_remains(
    mortal_daemon: processes.DaemonProcess, connect: Connect, owner: LedgerOwnerServer, topic: str, ledgers: range
) -> None:
    """The example of PIP-186, with a second record that nobody answers."""
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    owner.ledgers.update(dict.fromkeys(ledgers, metadata(topic)))
    owner.status = 503
    try:
        became = await client.record_pending_deletes(topic, [tarry.PendingDelete(ledgers[0])])
        await in_thread(mortal_daemon.kill)
        with pytest.raises(tarry.DeadlineExceeded):
            await client.record_pending_deletes(topic, [tarry.PendingDelete(ledgers[1])], timeout_s=0.3)
        assert became.remaining(ledgers) == list(ledgers[1:])
    finally:
        owner.status = 200
    await in_thread(mortal_daemon.start_serving)
    ended = await outcomes(client, topic, 1)
    assert ended[ledgers[0], "LEDGER"].outcome == tarry.DeletionOutcome.DELETED
    assert [ledger_id in owner.ledgers for ledger_id in ledgers] == [False, True, True, True, True]


async def test_a_ledger_and_what_was_offloaded_of_it_are_deleted_by_two_records(
    client: tarry.aio.Client, owner: LedgerOwnerServer, archive: LocalDirectory, topic: str, ledgers: range
) -> None:
    ledger_id = ledgers[0]
    owner.ledgers[ledger_id] = metadata(topic)
    offloaded = Offloaded(archive, topic, ledger_id)
    both = [tarry.PendingDelete(ledger_id), offloaded.delete]
    became = await client.record_pending_deletes(topic, both)
    assert (became.recorded, became.already_recorded, became.remaining([ledger_id])) == (tuple(both), (), [])
    ended = await outcomes(client, topic, 2)
    assert {each.outcome for each in ended.values()} == {tarry.DeletionOutcome.DELETED}
    assert (ledger_id in owner.ledgers, offloaded.is_there) == (False, [False, False])
    seen = ended[ledger_id, "OFFLOADED_LEDGER"]
    assert (seen.pending_delete, seen.topic, seen.by_sweeper) == (offloaded.delete, topic, False)
    assert seen.recorded_at_ms <= (seen.ended_at_ms or 0)
    # As after an answer that was lost: nothing is there any more, and that is no failure.
    assert (await client.record_pending_deletes(topic, both)).recorded == tuple(both)
    assert {each.outcome for each in (await outcomes(client, topic, 4)).values()} == {
        tarry.DeletionOutcome.ALREADY_GONE
    }


async def test_the_same_record_twice_is_one(client: tarry.aio.Client, topic: str, ledgers: range) -> None:
    unowned = topic.removeprefix("owned-")
    delete = tarry.PendingDelete(ledgers[0], tarry.LedgerComponent.MANAGED_CURSOR, cursor_name="departures")
    became = await client.record_pending_deletes(unowned, [delete, delete])
    assert (len(became.recorded), became.already_recorded) == (2, (delete,))
    assert (await client.record_pending_deletes(unowned, [delete])).already_recorded == (delete,)
    which = tarry.DeletionFilter(topic=unowned)

    async def given_up() -> list[tarry.Deletion]:
        return await listed(client.dead_deletes(which))

    (dead,) = await until(given_up)
    assert dead.pending_delete == delete
    await client.purge_dead_deletes(which)


async def test_a_forged_record_deletes_nothing(
    client: tarry.aio.Client, owner: LedgerOwnerServer, archive: LocalDirectory, topic: str, ledgers: range
) -> None:
    owner.ledgers[ledgers[0]] = metadata(topic, **{"pulsar/cursor": "departures"})
    cursor = Offloaded(archive, topic, ledgers[1], **{"pulsar/cursor": "departures"})
    forged = [tarry.PendingDelete(ledgers[0]), cursor.delete]
    await client.record_pending_deletes(topic, forged)
    ended = await outcomes(client, topic, 2)
    assert {each.outcome for each in ended.values()} == {tarry.DeletionOutcome.METADATA_MISMATCH}
    assert "pulsar/cursor" in ended[ledgers[1], "OFFLOADED_LEDGER"].text
    assert (ledgers[0] in owner.ledgers, cursor.is_there) == (True, [True, True])


# In use.


async def test_what_is_in_use_is_kept_until_its_owner_takes_that_back(
    client: tarry.aio.Client, owner: LedgerOwnerServer, archive: LocalDirectory, topic: str, ledgers: range
) -> None:
    owner.ledgers.update(dict.fromkeys(ledgers, metadata(topic)))
    offloaded = Offloaded(archive, topic, ledgers[0])
    became = await client.record_in_use(topic, ledgers)
    assert (became.recorded, became.being_deleted_index.tolist()) == (5, [])
    of_archive: dict[str, Any] = {"ledger_type": tarry.LedgerType.OFFLOADED_LEDGER, "uuid": offloaded.uuid}
    await client.record_in_use(topic, ledgers[0], **of_archive)
    assert (await client.deletion_stats(topic)).in_use == 6
    await client.record_pending_deletes(topic, [tarry.PendingDelete(ledgers[0]), offloaded.delete])
    ended = await outcomes(client, topic, 2)
    assert {each.outcome for each in ended.values()} == {tarry.DeletionOutcome.IN_USE}
    assert (ledgers[0] in owner.ledgers, offloaded.is_there) == (True, [True, True])
    stats = await client.deletion_stats(topic)
    assert (stats.in_flight, stats.held) == (0, 2)

    assert await client.forget_in_use(topic, ledgers[0], **of_archive) == 1
    # These and no others: the first one is not among them.
    assert (await client.record_in_use(topic, ledgers[1:], replace=True)).recorded == 4
    ended = await outcomes(client, topic, 2)
    assert {each.outcome for each in ended.values()} == {tarry.DeletionOutcome.DELETED}
    assert (ledgers[0] in owner.ledgers, offloaded.is_there) == (False, [False, False])
    assert await client.forget_in_use(topic, ledgers) == 4


async def test_what_is_being_deleted_cannot_be_used_any_more(
    client: tarry.aio.Client, owner: LedgerOwnerServer, topic: str, ledgers: range
) -> None:
    """The owner's answer does not say that it deleted nothing: perhaps it did."""
    which = tarry.DeletionFilter(topic=topic)
    owner.ledgers[ledgers[1]] = metadata(topic)
    owner.status = 503

    async def failed() -> bool:
        known = [*await listed(client.pending_deletes(which)), *await listed(client.dead_deletes(which))]
        return any(each.maybe_deleted for each in known)

    async def over() -> list[tarry.Deletion]:
        # It may have been given up before the owner was itself again.
        await client.retry_dead_deletes(which)
        return await listed(client.ended_deletes(which))

    try:
        await client.record_pending_deletes(topic, [tarry.PendingDelete(ledgers[1])])
        await until(failed)
        became = await client.record_in_use(topic, ledgers[:3])
    finally:
        owner.status = 200
    assert (became.recorded, became.being_deleted_index.tolist()) == (2, [1])
    (ended,) = await until(over)
    assert ended.outcome == tarry.DeletionOutcome.DELETED


# Given up


async def test_what_belongs_to_nobody_is_given_up_retried_and_forgotten(
    client: tarry.aio.Client, topic: str, ledgers: range
) -> None:
    unowned = topic.removeprefix("owned-")
    which = tarry.DeletionFilter(topic=unowned)
    await client.record_pending_deletes(unowned, [tarry.PendingDelete(each) for each in ledgers])

    async def given_up() -> list[tarry.Deletion] | None:
        found = await listed(client.dead_deletes(which))
        return found if len(found) == 5 else None

    dead = await until(given_up)
    assert {(each.state, each.failures) for each in dead} == {(tarry.DeletionState.GIVEN_UP, 2)}
    assert all("unknown owner" in each.text for each in dead)
    stats = await client.deletion_stats(unowned)
    assert (stats.in_flight, stats.given_up, stats.oldest_ms) == (0, 5, None)
    assert stats.counts[0] == tarry.DeletionCount(
        tarry.LedgerComponent.MANAGED_LEDGER, tarry.LedgerType.LEDGER, 0, None, 5, 0
    )
    some = [each.deletion_id for each in dead[:2]]
    assert await client.retry_dead_deletes(tarry.DeletionFilter(deletion_ids=[*some, "0.99999999"])) == 2
    assert await client.purge_dead_deletes(tarry.DeletionFilter(topic=unowned, ledger_id=ledgers[4])) == 1
    # Those that were retried are given up again, and counted from 0.
    found = {each.deletion_id: each for each in await until(lambda: _dead(client, which, 4))}
    assert {found[deletion_id].failures for deletion_id in some} == {2}
    assert await client.purge_dead_deletes(which) == 4
    assert await client.purge_dead_deletes(which) == 0


async def _dead(client: tarry.aio.Client, which: tarry.DeletionFilter, number: int) -> list[tarry.Deletion] | None:
    found = await listed(client.dead_deletes(which))
    return found if len(found) == number else None


async def test_deletions_are_listed_page_by_page(client: tarry.aio.Client, topic: str) -> None:
    unowned = topic.removeprefix("owned-")
    which = tarry.DeletionFilter(topic=unowned)
    deletes = [tarry.PendingDelete(ledger_id) for ledger_id in range(1_200)]
    assert (await client.record_pending_deletes(unowned, deletes)).recorded == tuple(deletes)
    seen: list[int] = []
    token = ""
    while True:
        page = await client.pending_deletes_page(which, token, page_size=500)
        assert len(page) <= 500
        seen += [each.pending_delete.ledger_id for each in page.items]
        token = page.next_page_token
        if not token:
            break
    waiting = [each.pending_delete.ledger_id for each in await listed(client.pending_deletes(which))]
    dead = [each.pending_delete.ledger_id for each in await listed(client.dead_deletes(which))]
    assert set(range(1_200)) <= {*seen, *waiting, *dead}
    await until(lambda: _dead(client, which, 1_200))
    assert await client.purge_dead_deletes(which) == 1_200


async def test_where_it_is_switched_off_nothing_is_recorded(
    client: tarry.aio.Client, topic: str, ledgers: range
) -> None:
    await client.set_policy(topic, tarry.TopicPolicy(two_phase_deletion_enabled=False))
    became = await client.record_pending_deletes(topic, [tarry.PendingDelete(each) for each in ledgers])
    assert {each.reason for each in became.refused} == {tarry.RefusalReason.DISABLED}
    assert became.remaining(ledgers) == list(ledgers)
    assert (await client.deletion_stats(topic)).in_flight == 0
    await client.delete_topic(topic)


async def test_wrong_calls_are_answered_by_name(client: tarry.aio.Client, topic: str) -> None:
    record = [tarry.PendingDelete(1)]
    wrong: list[tuple[Callable[[], Awaitable[object]], type[tarry.TarryError], str]] = [
        (lambda: client.record_pending_deletes("", record), tarry.InvalidArgument, "topic"),
        (lambda: client.record_in_use(topic, []), tarry.InvalidArgument, "ledger_id"),
        (lambda: client.record_in_use(topic, 1, uuid=uuid.uuid4()), tarry.InvalidArgument, "uuid"),
        (lambda: client.forget_in_use("", 1), tarry.InvalidArgument, "topic"),
        (lambda: client.pending_deletes_page(page_size=1_001), tarry.InvalidArgument, "page_size"),
        (lambda: client.dead_deletes_page(None, "nonsense"), tarry.InvalidArgument, "page_token"),
        (
            lambda: client.ended_deletes_page(tarry.DeletionFilter(deletion_ids=["nonsense"])),
            tarry.InvalidArgument,
            "deletion_id",
        ),
        (lambda: client.retry_dead_deletes(tarry.DeletionFilter()), tarry.InvalidArgument, "all"),
        (lambda: client.purge_dead_deletes(tarry.DeletionFilter()), tarry.InvalidArgument, "all"),
        (lambda: listed(client.sweep_orphans("nowhere")), tarry.NotFound, "nowhere"),
    ]
    for call, kind, says in wrong:
        with pytest.raises(kind, match=says):
            await call()


# Sweeps.


async def test_a_sweep_finds_what_nobody_knows_and_has_it_deleted(
    client: tarry.aio.Client, archive: LocalDirectory, topic: str, ledgers: range
) -> None:
    used, orphan, stranger = (
        Offloaded(archive, each, ledger_id)
        for each, ledger_id in ((topic, ledgers[0]), (topic, ledgers[1]), (f"other-{topic}", ledgers[2]))
    )
    offloaded: dict[str, Any] = {"ledger_type": tarry.LedgerType.OFFLOADED_LEDGER, "replace": True}
    await client.record_in_use(topic, ledgers[0], uuid=used.uuid, **offloaded)

    async def swept(name: str, **named: Any) -> tuple[list[tarry.OrphanedLedger], tarry.SweepStep]:
        steps = [step async for step in client.sweep_orphans("archive", prefix=name, **named)]
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        return [each for step in steps for each in step.orphans], steps[-1]

    found, last = await swept(str(orphan.uuid))
    assert [(each.topic, each.pending_delete.ledger_id, each.unknown_topic) for each in found] == [
        (topic, ledgers[1], False)
    ]
    size_bytes = found[0].size_bytes
    assert (last.counts.listed, last.counts.orphaned) == (tarry.SweptObjects(2, size_bytes),) * 2
    assert orphan.is_there == [True, True]
    assert (await swept(str(orphan.uuid), grace_ms=3_600_000))[1].counts.young.objects == 2
    assert (await swept(str(used.uuid)))[1].counts.in_use.objects == 2
    (unknown,), last = await swept(str(stranger.uuid), delete=True)
    assert (unknown.unknown_topic, last.counts.of_unknown_topics.objects, last.counts.ledgers_recorded) == (True, 2, 0)

    _, last = await swept(str(orphan.uuid), delete=True)
    assert (last.refused, last.counts.ledgers_recorded) == ("", 1)
    ended = await outcomes(client, topic, 1)
    assert ended[ledgers[1], "OFFLOADED_LEDGER"].by_sweeper
    assert [each.is_there for each in (used, orphan, stranger)] == [[True, True], [False, False], [True, True]]
    assert (await swept(str(orphan.uuid)))[1].counts.listed.objects == 0
