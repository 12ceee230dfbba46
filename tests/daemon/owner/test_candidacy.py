"""When a daemon may claim what another one owns."""

from __future__ import annotations

import itertools

import pytest

from daemon.owner import heartbeat, standby
from daemon.owner.standby import ClaimNow, OwnerLock, RecordedOwner, Wait

OTHER = RecordedOwner(owner="north", address="127.0.0.1:7461")


def beat_of(daemon_id: str, sequence: int) -> heartbeat.Heartbeat:
    return heartbeat.Heartbeat(
        daemon_id=daemon_id, address="127.0.0.1:7461", shards=(0, 1), instance="a", sequence=sequence
    )


def silent_watch(*, until_s: float) -> heartbeat.Watch:
    """A watch that read the same heartbeat every interval from 0 s to `until_s`."""
    watch = heartbeat.Watch()
    now_s = 0.0
    while now_s <= until_s:
        watch.observe(beat_of("north", 7), now_s=now_s)
        now_s += heartbeat.INTERVAL_S
    return watch


def decide(
    recorded: RecordedOwner | None,
    *,
    lock: OwnerLock = OwnerLock.UNKNOWN,
    log_ended: bool = False,
    watch: heartbeat.Watch | None = None,
    rank: int = 0,
    now_s: float = 4.0,
) -> ClaimNow | Wait:
    watch = silent_watch(until_s=0.0) if watch is None else watch
    return standby.decide_candidacy(
        recorded, daemon_id="south", lock=lock, log_ended=log_ended, watch=watch, rank=rank, now_s=now_s
    )


@pytest.mark.parametrize(
    ("recorded", "lock", "reason"),
    [
        (None, OwnerLock.UNKNOWN, "nobody ever owned it"),
        (RecordedOwner(owner="", address=""), OwnerLock.UNKNOWN, "its owner gave it up"),
        (RecordedOwner(owner="south", address="x:1"), OwnerLock.HELD, "it belonged to this daemon before"),
        (OTHER, OwnerLock.FREE, "the process of daemon north has ended"),
    ],
)
def test_what_belongs_to_nobody_alive_is_claimed_at_once(
    recorded: RecordedOwner | None, lock: OwnerLock, reason: str
) -> None:
    decision = decide(recorded, lock=lock)
    assert isinstance(decision, ClaimNow)
    assert reason in decision.reason


@pytest.mark.parametrize("lock", [OwnerLock.HELD, OwnerLock.UNKNOWN])
def test_a_daemon_stands_by_while_the_owner_beats_and_says_whom_it_waits_for(lock: OwnerLock) -> None:
    decision = decide(OTHER, lock=lock)
    assert decision == Wait("waiting for daemon north at 127.0.0.1:7461 (last heartbeat seen 4 s ago)", stands_by=True)


def test_a_log_with_an_end_is_proof_though_its_owner_beats_and_others_go_first() -> None:
    decision = decide(OTHER, lock=OwnerLock.HELD, log_ended=True, rank=3)
    assert decision == ClaimNow("the log of daemon north has ended")


def test_a_daemon_that_has_read_no_heartbeat_yet_waits() -> None:
    assert decide(OTHER, watch=heartbeat.Watch()) == Wait(
        "waiting for daemon north at 127.0.0.1:7461 (its heartbeat was not read yet)", stands_by=True
    )


def test_an_owner_without_a_heartbeat_is_waited_for_as_long_as_a_silent_one() -> None:
    watch = heartbeat.Watch()
    decisions = []
    for now_s in (0.0, 3.0, 6.0, 9.0):
        watch.observe(None, now_s=now_s)
        decisions.append(decide(OTHER, watch=watch, now_s=now_s))
    assert decisions[2] == Wait("waiting for daemon north at 127.0.0.1:7461 (no heartbeat for 6 s)", stands_by=True)
    assert isinstance(decisions[3], ClaimNow)


@pytest.mark.parametrize("lock", [OwnerLock.HELD, OwnerLock.UNKNOWN])
def test_a_silent_owner_is_succeeded_after_three_missed_beats_even_if_its_process_exists(lock: OwnerLock) -> None:
    # Read at 0, 3, 6 and 9 s: three intervals of 3 s without a change.
    assert isinstance(decide(OTHER, lock=lock, watch=silent_watch(until_s=6.0), now_s=6.0), Wait)
    decision = decide(OTHER, lock=lock, watch=silent_watch(until_s=9.0), now_s=9.0)
    assert decision == ClaimNow("daemon north at 127.0.0.1:7461 is silent (last heartbeat seen 9 s ago)")


def test_a_candidate_waits_one_interval_for_each_that_goes_first() -> None:
    watch = silent_watch(until_s=9.0)
    # Suspected at 9 s; rank 2 waits 2 * 3 s = 6 s more.
    waiting = decide(OTHER, watch=watch, rank=2, now_s=14.9)
    assert isinstance(waiting, Wait)
    assert "2 other candidates go first" in waiting.reason
    assert isinstance(decide(OTHER, watch=watch, rank=2, now_s=15.0), ClaimNow)


def test_candidates_are_spaced_by_the_interval_that_is_set() -> None:
    watch = heartbeat.Watch(interval_s=0.5)
    for now_s in (0.0, 0.5, 1.0, 1.5):
        watch.observe(None, now_s=now_s)
    assert isinstance(decide(OTHER, watch=watch, rank=2, now_s=2.4), Wait)
    assert isinstance(decide(OTHER, watch=watch, rank=2, now_s=2.5), ClaimNow)


def test_candidates_have_ranks_of_their_own_that_all_agree_on() -> None:
    candidates = {"a", "b", "c", "d"}
    ranks = {standby.rendezvous_rank(one, others=candidates, former_owner="north") for one in candidates}
    assert ranks == {0, 1, 2, 3}


def test_the_former_owner_and_the_candidate_itself_are_not_waited_for() -> None:
    assert standby.rendezvous_rank("a", others={"a", "north"}, former_owner="north") == 0


def test_different_owners_are_inherited_by_different_candidates() -> None:
    candidates = [f"candidate-{number}" for number in range(4)]
    heirs = {
        one
        for one, owner in itertools.product(candidates, [f"owner-{number}" for number in range(40)])
        if standby.rendezvous_rank(one, others=candidates, former_owner=owner) == 0
    }
    assert heirs == set(candidates)
