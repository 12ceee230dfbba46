"""Every named place between record, verification, deletion and outcome, with what may happen to a daemon there.

In each story somebody has ledgers with every fate (`deletion_stories`). After each: what was dropped from the metadata
has a record until it is gone, nothing that is in use or is not what its record says is deleted, nothing is deleted
without a durable begin, a record without an object ends as already gone, and in the end nothing is left that was
recorded and matched.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import daemon
from daemon.ledger_deletion import shard_deletions
from storage_backends.formats.deletion_format import LedgerComponent
from storage_backends.local_directory import LocalDirectory
from storage_backends.s3 import S3Store
from tests._support.engine_fixture import Daemon, EngineFixture, Killed
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests._support.ledger_owner_server import LedgerOwnerServer, ledger_owner_server
from tests._support.moto_server import MotoServer, moto_server
from tests.daemon.ledger_deletion._support.deletion_stories import AtTheirOwner, InObjects, Place, Story

DELETING = (
    "deletion.after_record",
    "deletion.before_begin",
    "deletion.after_begin",
    "deletion.before_verify",
    "deletion.after_verify",
    "deletion.after_index_delete",
    "deletion.after_delete",
    "deletion.before_answer",
    "deletion.after_answer",
)
DELETED_HALF = "deletion.after_index_delete"
DELETED = {DELETED_HALF, "deletion.after_delete"}
WRITING = ("log.before_put", "log.after_put", "checkpoint.before_put", "checkpoint.after_put")
SETTINGS = (
    "deletion.parallelism=2",
    "deletion.reconsume_later_seconds=2",
    "journal.checkpoint_slots=4",
)
PLACES = ("directory", "s3", "owner")
# At which arrival at a place something happens.
NTH = (1, 3)
# For so long a daemon may delete that has not heard that it was superseded (R8).
CONFIRMED_S = 15.0


def cases() -> Iterator[object]:
    """Every point in a directory, of one component after the other; at the other places by part, and, in long runs, of
    each component.
    """
    tried = [
        (point, place)
        for point, place in itertools.product((*DELETING, *WRITING), PLACES)
        if (point, place) != ("deletion.after_index_delete", "owner")
    ]
    for turn, (point, place) in enumerate(tried):
        for component, nth in itertools.product(LedgerComponent, NTH):
            short = (component, nth) == (list(LedgerComponent)[turn % 3], NTH[turn % 2])
            by_part = () if place == "directory" else (pytest.mark.rotating,)
            marks = by_part if short else (pytest.mark.long,)
            yield pytest.param(point, nth, place, component, marks=marks, id=f"{point}-{nth}-{place}-{component.name}")


CASES = pytest.mark.parametrize(("point", "nth", "place", "component"), tuple(cases()), indirect=["place"])


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="module")
def bucket(moto: MotoServer) -> Iterator[S3Store]:
    with closing(S3Store(moto.settings("ledgers"))) as store:
        yield store


@pytest.fixture(scope="module")
def owner() -> Iterator[LedgerOwnerServer]:
    with ledger_owner_server() as server:
        yield server


@pytest.fixture(autouse=True)
def answers_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several decisions on answers to crash at."""
    monkeypatch.setattr(shard_deletions, "GATHER_S", 0.0)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "owner":
        yield AtTheirOwner(request.getfixturevalue("owner"))
    elif request.param == "s3":
        store = request.getfixturevalue("bucket")
        yield InObjects(store)
        for listed in list(store.list("")):
            store.delete(listed.key)
    else:
        with closing(LocalDirectory(tmp_path)) as store:
            yield InObjects(store)


def test_every_crash_point_of_a_deletion_is_tried_here() -> None:
    (package,) = daemon.__path__
    sources = Path(package).rglob("*.py")
    found = {
        name for source in sources for name in re.findall(r'"(deletion\.(?:before|after)_\w+)"', source.read_text())
    }
    assert found == set(DELETING)


class At:
    """Does something to a daemon at its nth arrival at a place. `later`: the places that it comes to after that."""

    def __init__(self, process: Daemon, point: str, nth: int, do: Callable[[Daemon], None]) -> None:
        self.reached = False
        self.later: list[str] = []
        self._process = process
        self._point = point
        self._left = nth
        self._do = do
        process.at_crash_point = self._at

    def _at(self, name: str) -> None:
        if self.reached:
            self.later.append(name)
        if name != self._point or self.reached:
            return
        self._left -= 1
        if self._left == 0:
            self.reached = True
            self._do(self._process)


def crash(process: Daemon) -> None:
    """SIGKILL; what runs on the loop goes on in memory alone until its next turn, which never comes."""
    process.kill()
    if process.loop.in_job:
        raise Killed


def pause(process: Daemon) -> None:
    """SIGSTOP; a job stops here, the loop at its next turn."""
    process.suspend()
    while process.loop.in_job and process.suspended:
        process.loop.block(0.0)
    if process.dead:
        raise Killed


@CASES
async def test_a_crash_leaves_nothing_deletable_without_a_record_and_deletes_nothing_else(
    machines: EngineFixture, point: str, nth: int, place: Place, component: LedgerComponent
) -> None:
    story = Story(machines, place, component, *SETTINGS)
    first = await story.serving("one")
    here = At(first, point, nth, crash)
    await story.work(first)
    await story.until(lambda: here.reached)
    story.check_nothing_is_lost()
    second = await story.serving("two")
    story.check_nothing_is_lost()
    await story.work_again(second)
    await story.check_the_end(second)
    second.kill()
    await story.check_the_end(await story.serving("one"))


@CASES
async def test_a_daemon_that_pauses_is_superseded_and_does_no_harm_when_it_goes_on(
    machines: EngineFixture, point: str, nth: int, place: Place, component: LedgerComponent
) -> None:
    story = Story(machines, place, component, *SETTINGS)
    first = await story.serving("one")
    here = At(first, point, nth, pause)
    work = asyncio.ensure_future(story.work(first))
    await story.until(lambda: here.reached)
    # It is stopped for long enough to be superseded; at the first arrival not for much longer.
    second = await story.serving("two")
    story.check_nothing_is_lost()
    await work
    await story.work_again(second)
    is_late = nth > 1
    if is_late:
        await asyncio.sleep(CONFIRMED_S)
    first.resume()
    await story.until(lambda: not first.engine.health.serving)
    if is_late and point != DELETED_HALF:
        assert not DELETED.intersection(here.later), "it does not know any more that it may delete"
    await story.check_the_end(second)


@CASES
async def test_lost_answers_of_the_journal_and_of_the_place_are_found_out(
    machines: EngineFixture, point: str, nth: int, place: Place, component: LedgerComponent
) -> None:
    def lose(process: Daemon) -> None:
        process.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
        place.lose_an_answer()

    story = Story(machines, place, component, *SETTINGS)
    first = await story.serving("one")
    here = At(first, point, nth, lose)
    await story.work(first)
    await story.until(lambda: here.reached)
    await story.over()
    await story.work_again(first)
    assert first.engine.health.serving
    await story.check_the_end(first)
    first.kill()
    await story.check_the_end(await story.serving("one"))
