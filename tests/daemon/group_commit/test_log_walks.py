"""Logs, fences, claims, bounds and replay together, in orders that seeds decide; each planted bug is found.

Owns: which rules of the protocol are broken, one at a time, in the real code. Does not own: the walk (`log_walk`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from daemon.errors import TarryError
from daemon.group_commit.daemon_log import Certain, FrozenSlot, LogCursor, LogTruncation, OwnLogEnd, SlotOutcome
from daemon.shard import range_operations
from daemon.shard.range_operations import ClaimShard, GiveBack, NeedLess, Release, WriteCheckpoint
from storage_backends import log_fence
from storage_backends.formats.log_slot_format import Head, LogSlotKind, SlotIdentity
from storage_backends.formats.manifest import LogRange, ShardManifest
from storage_backends.log_fence import Fence
from tests._support import parts
from tests.daemon.group_commit._support.log_walk import Broken, walk
from tests.planted import registry

STEPS = 250
SEEDS = 160
SEEDS_MAX = 3_000
Plant = Callable[[pytest.MonkeyPatch], None]


# ---- claims


def any_fence_allows_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(range_operations, "_is_proof", lambda tip, fence: True)
    checked = ClaimShard.precondition

    def precondition(self: ClaimShard, tip: ShardManifest | None) -> str | None:
        owned = None if tip is None else tip.open_range
        if owned is None or not isinstance(self.former, Fence):
            return checked(self, tip)
        patched = dataclasses.replace(owned, log_id=self.former.log_id)
        assert tip is not None
        return checked(self, dataclasses.replace(tip, ranges=(*tip.ranges[:-1], patched)))

    patch.setattr(ClaimShard, "precondition", precondition)


def a_fence_in_an_emptied_number_allows_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(range_operations, "_is_proof", lambda tip, fence: True)


def an_empty_range_is_followed_from_the_checkpoint_on(patch: pytest.MonkeyPatch) -> None:
    closed = range_operations._closed

    def from_checkpoint(tip: ShardManifest, former: Any) -> tuple[tuple[LogRange, ...], int]:
        ranges, last_slot = closed(tip, former)
        return ranges, last_slot if len(ranges) == len(tip.ranges) else tip.checkpoint_slot

    patch.setattr(range_operations, "_closed", from_checkpoint)


def heads_count_whatever_their_epoch(patch: pytest.MonkeyPatch) -> None:
    def closed(tip: ShardManifest, former: Any) -> tuple[tuple[LogRange, ...], int]:
        owned, head = tip.ranges[-1], former.heads.get(tip.shard)
        if head is None:
            return tip.ranges[:-1], owned.first_slot - 1
        ended = dataclasses.replace(owned, through=former.end, last_slot=head.last_slot)
        return (*tip.ranges[:-1], ended), head.last_slot

    patch.setattr(range_operations, "_closed", closed)


def a_claim_begins_behind_the_next_number(patch: pytest.MonkeyPatch) -> None:
    apply = ClaimShard.apply

    def late(self: ClaimShard, tip: ShardManifest | None) -> ShardManifest:
        made = apply(self, tip)
        own = made.ranges[-1]
        return dataclasses.replace(made, ranges=(*made.ranges[:-1], dataclasses.replace(own, after=own.after + 1)))

    patch.setattr(ClaimShard, "apply", late)


def a_shard_of_nobody_is_claimed_from_its_checkpoint_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardManifest, "last_closed_slot", ShardManifest.checkpoint_slot)


def a_claim_drops_what_the_newest_checkpoint_covers(patch: pytest.MonkeyPatch) -> None:
    apply = ClaimShard.apply

    def dropping(self: ClaimShard, tip: ShardManifest | None) -> ShardManifest:
        made = apply(self, tip)
        kept = (each for each in made.ranges if each.last_slot is None or each.last_slot > made.checkpoint_slot)
        return dataclasses.replace(made, ranges=tuple(kept))

    patch.setattr(ClaimShard, "apply", dropping)


# ---- checkpoints, release, giving back


def ranges_go_with_the_newest_checkpoint(patch: pytest.MonkeyPatch) -> None:
    def still_needed(manifest: ShardManifest) -> tuple[LogRange, ...]:
        return tuple(
            each for each in manifest.ranges if each.last_slot is None or each.last_slot > manifest.checkpoint_slot
        )

    patch.setattr(range_operations, "_still_needed", still_needed)


def an_open_range_begins_at_the_newest_checkpoint(patch: pytest.MonkeyPatch) -> None:
    still_needed = range_operations._still_needed

    def too_late(manifest: ShardManifest) -> tuple[LogRange, ...]:
        return still_needed(dataclasses.replace(manifest, previous_checkpoint=manifest.checkpoint))

    patch.setattr(range_operations, "_still_needed", too_late)


def a_checkpoint_of_another_log_moves_the_open_range(patch: pytest.MonkeyPatch) -> None:
    still_needed = range_operations._still_needed

    def taken_for_own(manifest: ShardManifest) -> tuple[LogRange, ...]:
        previous = manifest.previous_checkpoint
        if previous is not None:
            previous = dataclasses.replace(previous, log_id=manifest.ranges[-1].log_id)
        return still_needed(dataclasses.replace(manifest, previous_checkpoint=previous))

    patch.setattr(range_operations, "_still_needed", taken_for_own)


def a_checkpoint_that_lands_after_a_claim_is_taken(patch: pytest.MonkeyPatch) -> None:
    def precondition(self: WriteCheckpoint, tip: ShardManifest | None) -> str | None:
        return None if tip is not None and tip.open_range is not None else "nobody owns it"

    patch.setattr(WriteCheckpoint, "precondition", precondition)


def an_idle_shard_is_one_whose_newest_checkpoint_is_at_its_end(patch: pytest.MonkeyPatch) -> None:
    checked = NeedLess.precondition

    def precondition(self: NeedLess, tip: ShardManifest | None) -> str | None:
        assert tip is not None
        return checked(self, dataclasses.replace(tip, previous_checkpoint=tip.checkpoint))

    patch.setattr(NeedLess, "precondition", precondition)


def an_idle_shard_needs_nothing_up_to_a_number_that_is_not_certain(patch: pytest.MonkeyPatch) -> None:
    apply = NeedLess.apply

    def too_far(self: NeedLess, tip: ShardManifest | None) -> ShardManifest:
        return apply(dataclasses.replace(self, after=self.after + 1), tip)

    patch.setattr(NeedLess, "apply", too_far)


def a_release_writes_its_checkpoint_once(patch: pytest.MonkeyPatch) -> None:
    apply = Release.apply

    def once(self: Release, tip: ShardManifest | None) -> ShardManifest:
        assert tip is not None
        return dataclasses.replace(apply(self, tip), previous_checkpoint=tip.checkpoint)

    patch.setattr(Release, "apply", once)


def a_release_keeps_its_ranges(patch: pytest.MonkeyPatch) -> None:
    apply = Release.apply

    def keeping(self: Release, tip: ShardManifest | None) -> ShardManifest:
        assert tip is not None
        ended = dataclasses.replace(tip.ranges[-1], through=10**6, last_slot=self.last_slot)
        kept = tip.ranges[:-1] if ended.first_slot > self.last_slot else (*tip.ranges[:-1], ended)
        made = apply(self, tip)
        return dataclasses.replace(made, ranges=kept, previous_checkpoint=tip.checkpoint)

    patch.setattr(Release, "apply", keeping)


def a_shard_is_given_back_although_a_section_was_written(patch: pytest.MonkeyPatch) -> None:
    checked = GiveBack.precondition

    def precondition(self: GiveBack, tip: ShardManifest | None) -> str | None:
        return checked(dataclasses.replace(self, own_head=None), tip)

    patch.setattr(GiveBack, "precondition", precondition)


def a_shard_is_given_back_although_its_ranges_name_the_own_log(patch: pytest.MonkeyPatch) -> None:
    checked = GiveBack.precondition

    def precondition(self: GiveBack, tip: ShardManifest | None) -> str | None:
        assert tip is not None
        return checked(self, dataclasses.replace(tip, ranges=tip.ranges[-1:]))

    patch.setattr(GiveBack, "precondition", precondition)


# ---- the own log


def a_shard_stops_while_its_section_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogCursor, "stop", lambda self, shard: self._staging.pop(shard))


def a_stopped_shard_has_sections(patch: pytest.MonkeyPatch) -> None:
    def stop(self: LogCursor, shard: int) -> Head:
        return self._staging[shard]

    def begin(self: LogCursor, shard: int, claimed: Head) -> None:
        self._staging[shard] = claimed

    patch.setattr(LogCursor, "stop", stop)
    patch.setattr(LogCursor, "begin", begin)


def a_log_ends_before_the_slot_under_way(patch: pytest.MonkeyPatch) -> None:
    def end(self: LogCursor) -> OwnLogEnd:
        return OwnLogEnd(log_id=self.log_id, end=self._certain, heads=self._heads)

    patch.setattr(LogCursor, "end", end)
    patch.setattr(LogCursor, "stop", lambda self, shard: self._staging.pop(shard))


def a_section_that_cannot_be_encoded_uses_up_its_shard_slot(patch: pytest.MonkeyPatch) -> None:
    frozen = LogCursor.frozen

    def used_up(self: LogCursor, slot: FrozenSlot | None) -> None:
        filling = self._under_way
        frozen(self, slot)
        if filling is not None:
            self._staging.update((shard, head) for shard, (head, _) in filling.sections.items())

    patch.setattr(LogCursor, "frozen", used_up)


# ---- what became of a slot


def what_is_created_again_is_certain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotOutcome, "created", lambda self, sent_at_s: Certain(sent_at_s))


def a_fence_in_the_way_is_taken_for_the_own_slot(patch: pytest.MonkeyPatch) -> None:
    asked = SlotOutcome.asked

    def any_slot(self: SlotOutcome, found: SlotIdentity | None) -> Any:
        return asked(self, None if found is None else self._identity)

    patch.setattr(SlotOutcome, "asked", any_slot)


# ---- what goes, and where a log ends


def another_epoch_lets_go_of_a_shard(patch: pytest.MonkeyPatch) -> None:
    learned = LogTruncation.manifest_committed

    def letting_go(self: LogTruncation, manifest: ShardManifest) -> None:
        learned(self, manifest)
        if self._epochs.get(manifest.shard, manifest.epoch) < manifest.epoch:
            self._needs[manifest.shard] = 10**6

    patch.setattr(LogTruncation, "manifest_committed", letting_go)


def only_the_open_range_is_needed(patch: pytest.MonkeyPatch) -> None:
    learned = LogTruncation.manifest_committed

    def of_open(self: LogTruncation, manifest: ShardManifest) -> None:
        learned(self, dataclasses.replace(manifest, ranges=manifest.ranges[-1:]))

    patch.setattr(LogTruncation, "manifest_committed", of_open)


def the_highest_slot_goes(patch: pytest.MonkeyPatch) -> None:
    def bound(self: LogTruncation, last_certain: int) -> int:
        return max(0, min((last_certain, *self._needs.values(), *self._claims.values())))

    patch.setattr(LogTruncation, "bound", bound)


def a_fence_has_the_heads_of_the_slot_that_was_listed(patch: pytest.MonkeyPatch) -> None:
    fencing_from = log_fence._fencing_from

    def stale(log_id: str, number: int, *by: Any) -> Any:
        steps = fencing_from(log_id, number, *by)
        step, heads = next(steps), None
        try:
            while True:
                answer = yield step
                if isinstance(step, log_fence.ReadOne) and answer is not None and not answer.header.kind.ends:
                    heads = answer.header.heads if heads is None else heads
                    answer = dataclasses.replace(answer, header=dataclasses.replace(answer.header, heads=heads))
                step = steps.send(answer)
        except StopIteration as ended:
            return ended.value

    patch.setattr(log_fence, "_fencing_from", stale)


def a_fence_is_taken_for_granted(patch: pytest.MonkeyPatch) -> None:
    def granted(log_id: str, number: int, *by: Any) -> Any:
        slot = yield log_fence.ReadOne(number)
        if slot is None:
            return None
        return Fence(log_id, number + 1, LogSlotKind.FENCE, slot.header.heads, proof=log_fence._PROOF)

    patch.setattr(log_fence, "_fencing_from", granted)


# The seed of a walk that meets each; any other may, when what happens in it has changed.
PLANTED: Mapping[Plant, int] = {
    any_fence_allows_a_claim: 4,
    a_fence_in_an_emptied_number_allows_a_claim: 1303,
    an_empty_range_is_followed_from_the_checkpoint_on: 3,
    heads_count_whatever_their_epoch: 978,
    a_claim_begins_behind_the_next_number: 0,
    a_shard_of_nobody_is_claimed_from_its_checkpoint_on: 37,
    a_claim_drops_what_the_newest_checkpoint_covers: 1,
    ranges_go_with_the_newest_checkpoint: 1,
    an_open_range_begins_at_the_newest_checkpoint: 0,
    a_checkpoint_of_another_log_moves_the_open_range: 2,
    a_checkpoint_that_lands_after_a_claim_is_taken: 5,
    an_idle_shard_is_one_whose_newest_checkpoint_is_at_its_end: 2,
    an_idle_shard_needs_nothing_up_to_a_number_that_is_not_certain: 1,
    a_release_writes_its_checkpoint_once: 2,
    a_release_keeps_its_ranges: 2,
    a_shard_is_given_back_although_a_section_was_written: 0,
    a_shard_is_given_back_although_its_ranges_name_the_own_log: 2,
    a_shard_stops_while_its_section_is_under_way: 0,
    a_stopped_shard_has_sections: 0,
    a_log_ends_before_the_slot_under_way: 0,
    a_section_that_cannot_be_encoded_uses_up_its_shard_slot: 17,
    what_is_created_again_is_certain: 646,
    a_fence_in_the_way_is_taken_for_the_own_slot: 0,
    another_epoch_lets_go_of_a_shard: 37,
    only_the_open_range_is_needed: 1,
    the_highest_slot_goes: 0,
    a_fence_has_the_heads_of_the_slot_that_was_listed: 1,
    a_fence_is_taken_for_granted: 0,
}


def found_by(plant: Plant, seeds: Any) -> int | None:
    """The first seed whose walk breaks something with the bug."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in seeds:
            try:
                walk(seed, steps=STEPS)
            except (Broken, TarryError, ValueError):
                return int(seed)
    return None


def test_what_was_answered_is_found_in_any_order_of_steps() -> None:
    counts: dict[str, int] = {}
    for seed in (seed for part in parts.seeds(SEEDS) for seed in part):
        for name, count in walk(seed, steps=STEPS).items():
            counts[name] = counts.get(name, 0) + count
    assert all(counts.values()), counts


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_what_was_answered_is_found_in_many_more_orders_of_steps() -> None:
    for seed in range(SEEDS, SEEDS + 6_000):
        walk(seed, steps=2 * STEPS, shards=1 + seed % 3)


@pytest.mark.rotating
@pytest.mark.parametrize(("plant", "seed"), PLANTED.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_bug_of_logs_is_found_and_nothing_without_it(plant: Plant, seed: int) -> None:
    found = found_by(plant, dict.fromkeys((seed, *range(SEEDS_MAX))))
    assert found is not None
    walk(found, steps=STEPS)


registry.register("walks of daemons with a log each", PLANTED)
