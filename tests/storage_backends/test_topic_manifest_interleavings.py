"""Every order of a topic's owner, its successor and a network that loses answers, within bounds: policies, a deletion,
the topic born again, and a claim between any of them. Every planted bug is found in one of the orders.

An owner whose commit has an unknown outcome commits the same operation again, under another commit id. Invariants,
after each run: what was reported is in the history, in its order; nothing is applied twice; nothing of the former owner
follows a claim; only an owner that was replaced is refused; each deletion, and nothing else, raises the incarnation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest

from storage_backends import commit, topic_manifest
from storage_backends.formats import manifest, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import TopicDelayLevels, TopicManifest, TopicPolicy
from storage_backends.memory_store import MemoryStore
from storage_backends.topic_manifest import ClaimTopic, Create, DeleteTopic, SetDelayLevels, SetPolicy
from tests._support import parts
from tests.planted import registry
from tests.storage_backends._support import interleavings
from tests.storage_backends._support.interleavings import Bounds, Broken, Choices, Run, SteppedStore
from tests.storage_backends._support.topic_manifests import CREATE, EPOCH, TOPIC, TOPIC_ID, Operation

SHARD = 3
PREFIX = names.topic_manifest_prefix(SHARD, TOPIC_ID)
# How often an operation whose outcome is unknown is committed again.
TRIES = 3


def policy(delay_max_ms: int, epoch: int) -> SetPolicy:
    return SetPolicy(policy=TopicPolicy(delay_max_ms=delay_max_ms), epoch=epoch)


def levels(table: str, epoch: int) -> SetDelayLevels:
    return SetDelayLevels(levels=TopicDelayLevels(table=table), epoch=epoch)


def delete(slot: int, epoch: int) -> DeleteTopic:
    return DeleteTopic(slot=ShardSlot(slot), epoch=epoch, delete_after_ms=1)


def create(slot: int, epoch: int) -> Create:
    return Create(topic=TOPIC, topic_id=TOPIC_ID, epoch=epoch, applied=ShardSlot(slot))


OWNER: list[Operation] = [policy(1, EPOCH), delete(60, EPOCH), create(61, EPOCH), levels("2s", EPOCH)]
SUCCESSOR: list[Operation] = [ClaimTopic(epoch=EPOCH + 1), delete(70, EPOCH + 1), create(71, EPOCH + 1)]
CLAIMS: list[Operation] = [ClaimTopic(epoch=EPOCH + 1), policy(3, EPOCH + 1)]


@dataclasses.dataclass(slots=True)
class Reported:
    """What one owner heard, by the place of its operations. `uncertain`: refused, or given up, after an unknown
    outcome.
    """

    committed: list[int] = dataclasses.field(default_factory=list)
    refused: list[int] = dataclasses.field(default_factory=list)
    uncertain: list[int] = dataclasses.field(default_factory=list)


def log_of(store: MemoryStore, run: Run, name: str) -> commit.ManifestLog[TopicManifest]:
    """The manifests of a topic whose objects have short names here."""
    ids = (f"{name}-{number}" for number in itertools.count())
    log = topic_manifest.topic_log(
        store,
        SHARD,
        TOPIC_ID,
        monotonic=run.clock.now,
        sleep=run.clock.block,
        jitter=lambda: 0.5,
        new_id=lambda: next(ids),
    )
    log.codec = topic_manifest.CODEC
    return log


def acts(run: Run, name: str, epoch: int, operations: Sequence[Operation], reported: Reported) -> Callable[[], None]:
    """An owner: its operations one after the other, until it is refused. A manifest's `created_ms` is the place of the
    operation that made it.
    """

    def act() -> None:
        log, tip = log_of(SteppedStore(run), run, name), None
        for place, operation in enumerate(operations):
            if tip is not None and tip.manifest.deleted != isinstance(operation, Create):
                # What the former owner did before the claim has left nothing to do.
                continue
            for tries in itertools.count(1):
                try:
                    tip = commit.commit(log, operation, writer=name, created_ms=place, warm=tip, deadline_s=0.0)
                    reported.committed.append(place)
                    break
                except commit.CommitOutcomeUnknown:
                    tip = None
                    if tries == TRIES:
                        reported.uncertain.append(place)
                        return
                except commit.Refused as refused:
                    (reported.refused if tries == 1 else reported.uncertain).append(place)
                    if refused.tip is None or refused.tip.manifest.owner_epoch == epoch:
                        raise Broken(f"{name} is the owner, and refused: {refused}") from refused
                    return

    return act


def explore(bounds: Bounds, successor: Sequence[Operation]) -> int:
    """Makes every run; how many there were. Raises Broken with the steps that led to it."""

    def once(choices: Choices) -> None:
        run = Run(choices, bounds, PREFIX)
        log = log_of(run.store, run, "before")
        commit.commit(log, CREATE, writer="before", created_ms=0, deadline_s=1.0)
        heard = {"owner": Reported(), "successor": Reported()}
        try:
            run.run(
                {
                    "owner": acts(run, "owner", EPOCH, OWNER, heard["owner"]),
                    "successor": acts(run, "successor", EPOCH + 1, successor, heard["successor"]),
                }
            )
            check(history(run.store), heard)
        except Broken as broken:
            broken.add_note(" | ".join(run.trace))
            raise

    return interleavings.explore(once)


def history(store: MemoryStore) -> list[TopicManifest]:
    keys = sorted(entry.key for entry in store.list(PREFIX))
    return [manifest.decode_topic_manifest(store.get(key)) for key in keys]


def check(made: Sequence[TopicManifest], heard: dict[str, Reported]) -> None:
    for name, reported in heard.items():
        places = [each.head.created_ms for each in made if each.head.writer == name]
        if len(set(places)) < len(places) or places != sorted(places):
            raise Broken(f"{name} applied {places}")
        if not set(reported.committed) <= set(places):
            raise Broken(f"{name} was told of {reported.committed}, the history has {places}")
        if set(reported.refused) & set(places):
            raise Broken(f"{name} was refused {reported.refused}, the history has {places}")
    for before, after in itertools.pairwise(made):
        if after.head.writer == "owner" and before.owner_epoch > EPOCH:
            raise Broken(f"manifest {after.head.number} of the former owner follows a claim")
        if after.owner_epoch < before.owner_epoch:
            raise Broken(f"manifest {after.head.number} gives the topic back to epoch {after.owner_epoch}")
        raised = after.incarnation - before.incarnation
        if raised != (after.deleted and not before.deleted):
            raise Broken(f"manifest {after.head.number} raises the incarnation by {raised}")


IN_THE_GATE = [
    (Bounds(preemptions=3, lost_puts=0, collections=0), SUCCESSOR),
    (Bounds(preemptions=1, lost_puts=1, collections=0), SUCCESSOR),
    (Bounds(preemptions=1, lost_puts=1, failed_heads=1, collections=0), CLAIMS),
]
IN_A_LONG_RUN = [
    (Bounds(preemptions=4, lost_puts=0, collections=0), SUCCESSOR),
    (Bounds(preemptions=2, lost_puts=1, failed_heads=1, collections=0), SUCCESSOR),
    (Bounds(preemptions=1, lost_puts=2, failed_heads=1, collections=0), CLAIMS),
]


@pytest.mark.parametrize(("bounds", "successor"), parts.first_and_rotating(IN_THE_GATE))
def test_in_every_order_owner_and_successor_make_one_history(bounds: Bounds, successor: Sequence[Operation]) -> None:
    assert explore(bounds, successor) > 100, "the bounds leave room for what they are to try"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bounds", "successor"), IN_A_LONG_RUN)
def test_in_every_order_within_wider_bounds_they_do(bounds: Bounds, successor: Sequence[Operation]) -> None:
    assert explore(bounds, successor) > 1_000


# ---- planted bugs


def without_epoch(kind: type[Operation]) -> Callable[[pytest.MonkeyPatch], None]:
    """A zombie may do it."""
    precondition = kind.precondition

    def plant(patch: pytest.MonkeyPatch) -> None:
        def anyone(self: Operation, tip: TopicManifest | None) -> str | None:
            epoch = getattr(self, "epoch")  # noqa: B009 - of operations of owners, all of these
            return precondition(self, None if tip is None else dataclasses.replace(tip, owner_epoch=epoch))

        patch.setattr(kind, "precondition", anyone)

    return plant


def never_finds_itself(kind: type[Operation]) -> Callable[[pytest.MonkeyPatch], None]:
    """After an unknown outcome it does not see that it has landed."""
    return lambda patch: patch.setattr(kind, "landed", lambda self, tip: False)


def claims_what_it_has(patch: pytest.MonkeyPatch) -> None:
    """A claim does not look at the epoch."""
    patch.setattr(ClaimTopic, "precondition", lambda self, tip: None)
    patch.setattr(ClaimTopic, "landed", lambda self, tip: False)


def gives_the_incarnation_again(patch: pytest.MonkeyPatch) -> None:
    apply = DeleteTopic.apply

    def forgets(self: DeleteTopic, tip: TopicManifest | None) -> TopicManifest:
        deleted = apply(self, tip)
        return dataclasses.replace(deleted, incarnation=deleted.incarnation - 1)

    patch.setattr(DeleteTopic, "apply", forgets)


BUGS = {
    "policies without epoch": without_epoch(SetPolicy),
    "delay levels without epoch": without_epoch(SetDelayLevels),
    "deletion without epoch": without_epoch(DeleteTopic),
    "creation without epoch": without_epoch(Create),
    "a policy does not find itself": never_finds_itself(SetPolicy),
    "delay levels do not find themselves": never_finds_itself(SetDelayLevels),
    "a deletion does not find itself": never_finds_itself(DeleteTopic),
    "a creation does not find itself": never_finds_itself(Create),
    "claims without epoch": claims_what_it_has,
    "an incarnation is given again": gives_the_incarnation_again,
}


def explore_all() -> None:
    for bounds, successor in IN_THE_GATE:
        explore(bounds, successor)


@pytest.mark.rotating
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_in_one_of_the_orders(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(Broken):
        explore_all()


registry.register("orders of an owner and its successor", BUGS)
