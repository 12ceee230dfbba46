"""Up to where a daemon may delete its log, from its own memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daemon.errors import InvariantViolated
from daemon.group_commit.daemon_log import LogTruncation
from storage_backends import commit
from storage_backends.formats.manifest import LogRange, ShardManifest
from tests.planted import registry

OWN, OTHER = "own", "other"


def manifest(shard: int, epoch: int, *ranges: tuple[str, int]) -> ShardManifest:
    """Ranges as (log, after), of which the last is open."""
    made = [
        LogRange(log_id=log_id, epoch=epoch, after=after, through=after + 5, first_slot=1, last_slot=1)
        for log_id, after in ranges
    ]
    if made:
        last = ranges[-1]
        made[-1] = LogRange(log_id=last[0], epoch=epoch, after=last[1], through=None, first_slot=2, last_slot=None)
    return ShardManifest(head=commit.NO_HEAD, shard=shard, epoch=epoch, ranges=tuple(made))


def truncation(*claimed: ShardManifest) -> LogTruncation:
    made = LogTruncation(OWN)
    for each in claimed:
        made.claims(each.shard, after=each.ranges[-1].after)
        made.claimed(each)
    return made


def test_the_last_certain_slot_stays() -> None:
    assert truncation().bound(9) == 8
    assert truncation().bound(0) == 0


def test_what_a_shard_needs_stays() -> None:
    held = truncation(manifest(0, 1, (OWN, 4)), manifest(1, 1, (OTHER, 1), (OWN, 6)))
    assert held.bound(9) == 4
    held.manifest_committed(manifest(0, 1, (OWN, 7)))
    assert held.bound(9) == 6


def test_a_closed_range_of_the_own_log_is_needed_too() -> None:
    assert truncation(manifest(0, 2, (OWN, 2), (OWN, 6))).bound(9) == 2


def test_what_a_claim_under_way_may_name_stays() -> None:
    held = truncation()
    held.claims(0, after=3)
    assert held.bound(9) == 3
    held.claim_failed(0)
    assert held.bound(9) == 8


def test_what_was_released_or_given_back_is_needed_no_more() -> None:
    held = truncation(manifest(0, 1, (OWN, 4)))
    held.manifest_committed(manifest(0, 1))
    assert held.bound(9) == 4, "whether it has landed, the owner has not heard"
    held.left(0)
    assert held.bound(9) == 8


def test_a_manifest_of_another_epoch_lets_nothing_go() -> None:
    held = truncation(manifest(0, 1, (OWN, 4)))
    held.manifest_committed(manifest(0, 2, (OTHER, 1)))
    held.manifest_committed(manifest(0, 2, (OWN, 7), (OTHER, 1)))
    assert held.bound(9) == 4


def test_a_bound_never_falls() -> None:
    held = truncation(manifest(0, 1, (OWN, 6)))
    held.manifest_committed(manifest(0, 1, (OWN, 3)))
    assert held.bound(9) == 6


def test_a_shard_has_one_claim_under_way() -> None:
    held = truncation()
    held.claims(0, after=3)
    with pytest.raises(InvariantViolated, match="two claims"):
        held.claims(0, after=4)


# ---- planted bugs


def claims_under_way_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        LogTruncation, "bound", lambda self, last_certain: max(0, min((last_certain - 1, *self._needs.values())))
    )


def the_newest_manifest_counts_whatever_its_epoch(patch: pytest.MonkeyPatch) -> None:
    learned = LogTruncation.manifest_committed

    def whatever(self: LogTruncation, manifest: ShardManifest) -> None:
        self._epochs[manifest.shard] = manifest.epoch
        learned(self, manifest)

    patch.setattr(LogTruncation, "manifest_committed", whatever)


def what_cannot_be_owned_is_let_go(patch: pytest.MonkeyPatch) -> None:
    learned = LogTruncation.manifest_committed

    def unnamed(self: LogTruncation, manifest: ShardManifest) -> None:
        learned(self, manifest)
        if manifest.lowest_after(OWN) is None:
            self._needs.pop(manifest.shard)

    patch.setattr(LogTruncation, "manifest_committed", unnamed)


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    claims_under_way_hold_nothing: test_what_a_claim_under_way_may_name_stays,
    the_newest_manifest_counts_whatever_its_epoch: test_a_manifest_of_another_epoch_lets_nothing_go,
    what_cannot_be_owned_is_let_go: test_what_was_released_or_given_back_is_needed_no_more,
}


@pytest.mark.parametrize(("plant", "test"), PLANTED.items(), ids=lambda each: each.__name__)
def test_a_planted_bug_of_the_bound_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test()


registry.register("bound of the own log", PLANTED)
