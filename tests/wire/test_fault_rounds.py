"""Fault after fault on one root that two daemons share: SIGKILL, SIGSTOP, a full disk, lost answers.

Each round begins with traffic, has its fault, which it asserts, and ends with nothing lost, nothing early, and an audit
of the whole root that finds nothing. The processes are real, and so are the file systems; the S3 server is moto.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
import subprocess
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from examples import processes
from storage_backends.local_directory import LocalDirectory
from storage_backends.object_store import ObjectStore
from storage_backends.s3 import S3Store
from tests._support import patience
from tests._support.delivery_history import DeliveryHistory
from tests._support.lost_answer_proxy import Loss, LostAnswerProxy, lost_answer_proxy
from tests._support.moto_server import MotoServer, moto_server
from tests._support.processes import Daemons
from tests.batch.audit._support import audits
from tests.wire._support import traffic
from tests.wire._support.pair import SETTINGS, Pair

ROUNDS = 5
TOPICS = ("north", "south", "west")
DISK_BYTES = 256 << 20
NO_SPACE = "No space left on device"
# Rows that come between two steps of a round.
SOME_ROWS = 200


@dataclasses.dataclass
class Place:
    """Where the root is: the daemons' settings, and how to open the store for an audit. Of the faults that want them:
    the folder of a small disk, and the proxy before the S3 server.
    """

    settings: dict[str, object]
    open_store: Callable[[], ObjectStore]
    disk: Path | None = None
    proxy: LostAnswerProxy | None = None


# ---- places


@contextlib.contextmanager
def files(folder: Path) -> Iterator[Place]:
    yield _local(folder, "files")


@contextlib.contextmanager
def objects(folder: Path) -> Iterator[Place]:
    yield _local(folder, "objects")


@contextlib.contextmanager
def files_on_small_disk(folder: Path) -> Iterator[Place]:
    with _small_disk(folder) as disk:
        yield _local(disk, "files", disk=disk)


@contextlib.contextmanager
def objects_on_small_disk(folder: Path) -> Iterator[Place]:
    with _small_disk(folder) as disk:
        yield _local(disk, "objects", disk=disk)


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Place]:
    with moto_server() as server, lost_answer_proxy(server.endpoint_url) as proxy:
        yield _on_s3(server, proxy)


def _local(folder: Path, log_form: str, *, disk: Path | None = None) -> Place:
    root = folder / "root"
    settings = processes.local_store(root) | {"store.log_form": log_form}
    return Place(settings, lambda: LocalDirectory(root), disk)


def _on_s3(server: MotoServer, proxy: LostAnswerProxy) -> Place:
    bucket = "rounds"
    # The audit's requests wait for as long as a busy machine takes.
    own = server.settings(bucket, read_timeout_s=traffic.PATIENCE_S)
    settings: dict[str, object] = {
        "store.kind": "s3",
        "store.s3.bucket": bucket,
        "store.s3.endpoint_url": proxy.endpoint_url,
        "store.s3.addressing": "path",
    }
    return Place(settings, lambda: S3Store(own), proxy=proxy)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, which ends with the block, whoever has a file of it open."""
    disk = folder / "disk"
    disk.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk))
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a small disk cannot be mounted: there is no mount here")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(("umount", "--lazy", str(disk)), check=True)


# ---- a story of rounds


class Story(Pair):
    """Two daemons on one root, one of which serves; those who add and receive at them; and what these were told.

    Each daemon has receivers of its own, which go on at it whether it serves or not. Those who add ask both in turn.
    """

    def __init__(self, daemons: Daemons, place: Place, stack: contextlib.ExitStack, seed: int) -> None:
        self.place = place
        self.history = DeliveryHistory()
        self.rng = random.Random(seed)
        self._stack = stack
        super().__init__([daemons.make(name, SETTINGS | place.settings) for name in ("one", "two")], TOPICS)
        for daemon in self.pair:
            # Before the disk goes.
            stack.callback(daemon.kill)
        self.start()
        for topic in TOPICS:
            traffic.create_subscription(self.pair[0].address, topic)
        self.receivers = {
            daemon.name: [self._receiver(daemon.address, topic) for topic in TOPICS] for daemon in self.pair
        }

    def _receiver(self, address: str, topic: str) -> traffic.Receiver:
        rng = random.Random(self.rng.random())
        return self._stack.enter_context(traffic.Receiver(address, topic, self.history, rng=rng))

    def wait_for_rows(self, rows: int = SOME_ROWS) -> None:
        """Until so many rows more have come, to anybody."""
        until = self.history.received_rows + rows
        self.history.wait_for(lambda: self.history.received_rows >= until, traffic.PATIENCE_S, f"{rows} rows more come")

    def wait_for_rows_at(self, daemon: processes.DaemonProcess) -> None:
        """Until each topic has handed out something more there."""
        before = [len(receiver.received) for receiver in self.receivers[daemon.name]]
        self.history.wait_for(
            lambda: all(
                len(each.received) > had for each, had in zip(self.receivers[daemon.name], before, strict=True)
            ),
            traffic.PATIENCE_S,
            f"rows of every topic come at {daemon.name}",
        )

    def round(self, number: int, fault: Fault) -> None:
        """Traffic, the fault, and the account."""
        both = "ipv4:" + ",".join(daemon.address for daemon in self.pair)
        with contextlib.ExitStack() as adding:
            senders = [
                adding.enter_context(
                    traffic.Sender(
                        both,
                        topic,
                        self.history,
                        rng=random.Random(self.rng.random()),
                        due=_due,
                        ledgers_from=1_000_000 * place + 1_000 * number,
                        timeout_s=3.0,
                    )
                )
                for place, topic in enumerate(TOPICS, start=1)
            ]
            self.wait_for_rows()
            fault.befall(self)
            self.wait_for_rows()
            for sender in senders:
                sender.finish()
        self.history.wait_for(
            lambda: self.history.missing == 0, traffic.PATIENCE_S, f"every answered row of round {number} comes"
        )
        assert self.history.breaches() == []
        self._audit()

    def _audit(self) -> None:
        with contextlib.closing(self.place.open_store()) as store:
            report = audits.audited(store, now_ms=traffic.now_ms())
        assert audits.findings(report) == []

    def end(self) -> None:
        """Everything that is left comes, and is acknowledged."""
        for receiver in (each for own in self.receivers.values() for each in own):
            receiver.finish()
        owner, _ = self.owner_and_other()
        for topic in TOPICS:
            traffic.wait_until_nothing_is_left(owner.address, topic)
        assert self.history.breaches() == []


def _due(rng: random.Random, base_ms: int) -> int:
    """Some are due already, most soon, a few when the round's fault is over."""
    kind = rng.random()
    if kind < 0.2:
        return base_ms - rng.randint(0, 1_000)
    return base_ms + rng.randint(0, 2_000 if kind < 0.9 else 15_000)


# ---- faults


class Fault:
    """What befalls the daemons in each round of a story."""

    @abstractmethod
    def befall(self, story: Story) -> None:
        """The fault, and that it was one. Somebody serves at its end."""


class Killed(Fault):
    """The owner is killed; the other one takes over, and the former one stands by for it."""

    def befall(self, story: Story) -> None:
        owner, other = story.owner_and_other()
        epoch = story.epoch_at(owner)
        owner.kill()
        other.wait_for_health(serving=True)
        assert story.epoch_at(other) > epoch, "no takeover"
        story.wait_for_rows_at(other)
        owner.start()


class Stopped(Fault):
    """The owner is stopped until another one has taken over and hands out; then it goes on, and finds that out."""

    def befall(self, story: Story) -> None:
        owner, other = story.owner_and_other()
        epoch = story.epoch_at(owner)
        owner.stop()
        try:
            other.wait_for_health(serving=True)
            assert story.epoch_at(other) > epoch, "no takeover"
            story.wait_for_rows_at(other)
        finally:
            owner.resume()
        owner.wait_for_health(serving=False)


class DiskFull(Fault):
    """Not a byte more can be written, until the owner has said so and serves no longer."""

    BLOCK: ClassVar[bytes] = bytes(1 << 20)

    def befall(self, story: Story) -> None:
        owner, _ = story.owner_and_other()
        assert story.place.disk is not None
        ballast = story.place.disk / "ballast"
        said = owner.log_text().count(NO_SPACE)
        with ballast.open("ab", buffering=0) as file:
            # What is deleted meanwhile makes room again.
            patience.wait_until(
                lambda: self._fill(file.write) and owner.log_text().count(NO_SPACE) > said and not owner.is_serving(),
                "the owner says that the disk is full, and is not serving",
                timeout_s=traffic.PATIENCE_S,
            )
        ballast.unlink()
        story.owner_and_other()

    def _fill(self, write: Callable[[bytes], int | None]) -> bool:
        size = len(self.BLOCK)
        while size:
            try:
                write(self.BLOCK[:size])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
        return True


class AnswersLost(Fault):
    """Answers to the owner are lost; then it is killed, and those to its successor are lost while that takes over."""

    def befall(self, story: Story) -> None:
        owner, other = story.owner_and_other()
        epoch = story.epoch_at(owner)
        self._lose(story)
        owner.kill()
        self._lose(story, wait=False)
        other.wait_for_health(serving=True)
        assert story.epoch_at(other) > epoch, "no takeover"
        self._wait_until_lost(story)
        owner.start()

    def _lose(self, story: Story, *, wait: bool = True) -> None:
        proxy = story.place.proxy
        assert proxy is not None
        self._until = proxy.lost_answers + 4
        proxy.drop_next_put_answer(count=2)
        proxy.drop_next_put_answer(loss=Loss.SILENT)
        proxy.drop_next_answer("GET", loss=Loss.CUT)
        proxy.answer_next_put_with(503)
        if wait:
            self._wait_until_lost(story)

    def _wait_until_lost(self, story: Story) -> None:
        proxy = story.place.proxy
        assert proxy is not None
        patience.wait_until(
            lambda: proxy.lost_answers >= self._until, "answers were lost", timeout_s=traffic.PATIENCE_S
        )


FAULTS = [
    (Killed, files),
    (Killed, objects),
    (Killed, s3),
    (Stopped, objects),
    (Stopped, s3),
    (DiskFull, files_on_small_disk),
    (DiskFull, objects_on_small_disk),
    (AnswersLost, s3),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "place"), [pytest.param(*each, id="-".join(e.__name__ for e in each)) for each in FAULTS]
)
def test_nothing_is_lost_or_early_and_the_root_is_sound_after_each_fault(
    fault: type[Fault],
    place: Callable[[Path], contextlib.AbstractContextManager[Place]],
    daemons: Daemons,
    tmp_path: Path,
) -> None:
    with place(tmp_path) as where, contextlib.ExitStack() as stack:
        story = Story(daemons, where, stack, seed=ROUNDS)
        for number in range(ROUNDS):
            story.round(number, fault())
        story.end()
