"""A model of two-phase deletion: one ledger, its owner, daemons that follow each other, a forger, and slow deletes.

Owns: the protocol's steps, what must hold, and the planted bugs.
Does not own: the search (`exploration`), and what the daemon does (`daemon.core.deletions`).

    owner    states that the ledger is in use; records its deletion; drops it from its metadata when that is answered;
             takes the statement back. It may crash at any moment, and then says what its metadata says. Any answer may
             be lost: it asks again.
    forger   records a deletion that the owner never meant.
    daemon   stages the begin of an attempt, which is applied when its slot is durable; verifies; asks whether it may
             delete; sends the delete; learns what came of it, or not. A new daemon may take over at any moment, while
             the former one goes on until it notices. A delete that was sent may be carried out at any later moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final, Literal

Record = Literal["none", "waiting", "begun", "held", "ended"]
Phase = Literal["uses", "recording", "recorded", "dropped", "forgetting", "done", "restarted"]
Worker = Literal["idle", "staged", "staged blind", "begun", "verified", "sent"]

BUGS: Final = {
    "answered_before_durable": "a record is answered when it is staged",
    "begin_not_durable": "an attempt goes on when its begin is staged",
    "in_use_asked_when_staged": "whether the ledger is in use is asked when the begin is staged, not when applied",
    "too_late_ignored": "a ledger whose deletion has begun can be in use",
    "begun_forgotten": "a takeover takes a begun attempt for one that waits",
    "former_attempt_forgotten": "a failed attempt that sent nothing hides that one before it may have",
    "lost_answer_forgotten": "an attempt whose answer is missing counts as one that sent nothing",
    "held_ends": "what was in use when its attempt was to begin does not come back",
    "forgotten_first": "the owner takes its statement back before its metadata is without the ledger",
    "dropped_unrecorded": "the owner drops the ledger before the record is answered",
}


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """`stated`: the owner's statement as the slots have it; `relied_on`: it was answered and not taken back; `always`:
    it was stated before the ledger was written. `workers`: one of each daemon, the last one owns the shard. `flying`: a
    delete was sent and may still be carried out. `broken`: what must never happen and did.
    """

    exists: bool = True
    in_metadata: bool = True
    phase: Phase = "uses"
    stated: bool = True
    relied_on: bool = True
    always: bool = True
    record: Record = "none"
    maybe_deleted: bool = False
    workers: tuple[Worker, ...] = ("idle",)
    flying: bool = False
    crashes: int = 2
    daemons: int = 2
    forged: bool = False
    broken: str | None = None


def check(state: State) -> str | None:
    """The invariant that does not hold."""
    if state.broken is not None:
        return state.broken
    deletable = state.exists and not state.in_metadata and not state.stated
    if deletable and state.record not in ("waiting", "begun"):
        return "a deletable ledger has no record"
    return None


def following(state: State, bugs: frozenset[str]) -> Iterator[State]:
    yield from _owner(state, bugs)
    if not state.forged and state.record in ("none", "ended"):
        yield dataclasses.replace(state, record="waiting", forged=True)
    for number in range(len(state.workers)):
        yield from _worker(state, number, bugs)
    if len(state.workers) <= state.daemons:
        yield _taken_over(state, bugs)
    if state.flying:
        yield _carried_out(state)


def _carried_out(state: State) -> State:
    """The store deletes."""
    broken = state.broken
    if state.exists and state.relied_on:
        broken = "a ledger in use was deleted"
    elif state.exists and state.always and state.in_metadata:
        broken = "a ledger was deleted that its owner has"
    return dataclasses.replace(state, exists=False, flying=False, broken=broken)


# ---- the owner


def _owner(state: State, bugs: frozenset[str]) -> Iterator[State]:
    if state.crashes and state.phase != "done":
        yield dataclasses.replace(state, phase="restarted", crashes=state.crashes - 1)
    match state.phase:
        case "uses":
            yield dataclasses.replace(state, phase="recording")
            if "forgotten_first" in bugs:
                yield dataclasses.replace(_forget(state), phase="recording", relied_on=False)
        case "recording":
            recorded = _recorded(state)
            # Durable, and the answer is lost: it asks again.
            yield recorded
            yield dataclasses.replace(recorded, phase="recorded")
            if "answered_before_durable" in bugs:
                yield dataclasses.replace(state, phase="recorded")
            if "dropped_unrecorded" in bugs:
                yield dataclasses.replace(state, phase="dropped", in_metadata=False)
        case "recorded":
            yield dataclasses.replace(state, phase="dropped", in_metadata=False)
        case "dropped":
            yield dataclasses.replace(state, phase="forgetting", relied_on=False)
        case "forgetting":
            forgotten = _forget(state, bugs)
            yield forgotten
            yield dataclasses.replace(forgotten, phase="done")
        case "restarted" if state.in_metadata:
            yield from _state(state, bugs)
        case "restarted":
            yield dataclasses.replace(state, phase="forgetting", relied_on=False)


def _recorded(state: State) -> State:
    return dataclasses.replace(state, record="waiting") if state.record in ("none", "ended") else state


def _forget(state: State, bugs: frozenset[str] = frozenset()) -> State:
    record: Record = state.record
    if record == "held":
        record = "ended" if "held_ends" in bugs else "waiting"
    return dataclasses.replace(state, stated=False, record=record)


def _state(state: State, bugs: frozenset[str]) -> Iterator[State]:
    """It says again what its metadata says, and is answered, or the answer is lost."""
    too_late = state.record == "begun" or (state.record == "waiting" and state.maybe_deleted)
    if too_late and not state.stated and "too_late_ignored" not in bugs:
        # It is told so, and gives the ledger up.
        yield dataclasses.replace(state, in_metadata=False, phase="done", relied_on=False)
        return
    if state.record == "ended" and not state.exists:
        # It finds out by itself: nothing is left to rely on.
        yield dataclasses.replace(state, in_metadata=False, phase="done", relied_on=False)
        return
    stated = dataclasses.replace(state, stated=True)
    yield stated
    yield dataclasses.replace(stated, phase="uses", relied_on=True)


# ---- daemons


def _with(state: State, number: int, worker: Worker) -> State:
    workers = (*state.workers[:number], worker, *state.workers[number + 1 :])
    return dataclasses.replace(state, workers=workers)


def _worker(state: State, number: int, bugs: frozenset[str]) -> Iterator[State]:
    owns = number == len(state.workers) - 1
    match state.workers[number]:
        case "idle":
            if owns and state.record in ("waiting", "begun"):
                if "in_use_asked_when_staged" not in bugs:
                    yield _with(state, number, "staged")
                elif not state.stated:
                    yield _with(state, number, "staged blind")
        case "staged" | "staged blind" as staged:
            if owns:
                yield _begin(state, number, asks=staged == "staged")
            else:
                yield _with(state, number, "idle")
            if "begin_not_durable" in bugs:
                yield _with(state, number, "begun")
        case "begun":
            yield from _failed(state, number, owns=owns, sent=False, bugs=bugs)
            if state.exists:
                yield _with(state, number, "verified")
            elif owns:
                yield _with(dataclasses.replace(state, record="ended", maybe_deleted=False), number, "idle")
        case "verified":
            # A former owner that has not noticed yet sends it all the same.
            yield dataclasses.replace(_with(state, number, "sent"), flying=True)
            yield from _failed(state, number, owns=owns, sent=False, bugs=bugs)
        case "sent":
            yield from _failed(state, number, owns=owns, sent=True, bugs=bugs)
            if not state.exists and owns:
                yield _with(dataclasses.replace(state, record="ended", maybe_deleted=False), number, "idle")


def _begin(state: State, number: int, *, asks: bool) -> State:
    """The begin is durable, and applied."""
    if state.record == "waiting" and asks and state.stated and not state.maybe_deleted:
        return _with(dataclasses.replace(state, record="held"), number, "idle")
    if state.record not in ("waiting", "begun"):
        return _with(state, number, "idle")
    # Of a former attempt nobody knows what became of it.
    maybe_deleted = state.maybe_deleted or state.record == "begun"
    return _with(dataclasses.replace(state, record="begun", maybe_deleted=maybe_deleted), number, "begun")


def _failed(state: State, number: int, *, owns: bool, sent: bool, bugs: frozenset[str]) -> Iterator[State]:
    """The attempt ends without an answer of the store."""
    if not owns:
        yield _with(state, number, "idle")
        return
    maybe_deleted = state.maybe_deleted or (sent and "lost_answer_forgotten" not in bugs)
    if "former_attempt_forgotten" in bugs and not sent:
        maybe_deleted = False
    if state.record == "begun":
        yield _with(dataclasses.replace(state, record="waiting", maybe_deleted=maybe_deleted), number, "idle")


def _taken_over(state: State, bugs: frozenset[str]) -> State:
    record: Record = "waiting" if state.record == "begun" and "begun_forgotten" in bugs else state.record
    return dataclasses.replace(state, workers=(*state.workers, "idle"), record=record)
