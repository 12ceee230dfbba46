"""What a daemon has in memory of deletions of ledgers, against the truth.

Owns: the comparison: the same deletions in the same states, the same ledgers in use, and counts that are right.
Does not own: the truth (`deletion_truth`), and when it is compared (`run`).
"""

from __future__ import annotations

from collections import Counter

from daemon.core.deletions.ledger_deletions import ALL, ListedState
from daemon.ledger_deletion.shard_deletions import ShardDeletions as Served
from storage_backends.formats.deletion_format import Deletion, PendingDelete
from tests._support.engine_fixture import Daemon
from tests.simulation.deletion_truth import Recorded, ShardDeletions, Standing, ledger_of
from tests.simulation.history import History
from tests.simulation.oracle import Oracle

# More than there ever are.
PAGE = 10_000
LISTED = {
    Standing.WAITING: ListedState.PENDING,
    Standing.BEGUN: ListedState.PENDING,
    Standing.DEAD: ListedState.DEAD,
    Standing.HELD: ListedState.ENDED,
    Standing.ENDED: ListedState.ENDED,
}


async def compare(daemon: Daemon, oracle: Oracle, history: History) -> None:
    """Breaches whatever differs, at a moment when everything that has landed is applied."""
    for number, shard in daemon.shards.items():
        try:
            await daemon.until(lambda: oracle.last_slot(number) <= shard.applied_slot)  # noqa: B023
        except TimeoutError:
            landed, applied = oracle.last_slot(number), shard.applied_slot
            history.breach(f"shard {number}: slot {landed} has landed, and {daemon.name} has applied {applied}")
            return
        _compare(f"shard {number}", shard.deletions, oracle.deletions(number), history)


def _compare(shard: str, served: Served, truth: ShardDeletions, history: History) -> None:
    state = served.state
    for listed in ListedState:
        found, after = state.page(listed, ALL, 0, PAGE)
        expected = [_as_told(one) for one in truth.recorded.values() if LISTED.get(one.standing) is listed]
        told = [_told(deletion) for deletion in found]
        if told != expected or after is not None:
            extra, lacking = set(told) - set(expected), set(expected) - set(told)
            history.breach(f"{shard}: {sorted(extra)} are listed as {listed.name}, and {sorted(lacking)} are not")
    standings = Counter(one.standing for one in truth.recorded.values())
    counted = (state.counts.in_flight, state.counts.begun, state.counts.dead, state.counts.held)
    counts = (
        standings[Standing.WAITING] + standings[Standing.BEGUN],
        standings[Standing.BEGUN],
        standings[Standing.DEAD],
        standings[Standing.HELD],
    )
    if counted != counts:
        history.breach(f"{shard}: {counted} deletions are in flight, begun, dead and held, there are {counts}")
    in_use = sum(map(len, truth.in_use.values()))
    if state.in_use.ledgers != in_use:
        history.breach(f"{shard}: {state.in_use.ledgers} ledgers are counted as in use, there are {in_use}")
    for one in truth.recorded.values():
        if state.in_use.is_in_use(one.topic, one.delete) is not truth.is_in_use(one):
            history.breach(f"{shard}: whether the ledger of deletion {one.number} is in use is not what it was said")


# Number, what it is of, outcome, failures, whether it is begun and may be deleted, and when it is attempted next.
Told = tuple[int, str, str, int, bool, bool, int]


def _told(deletion: Deletion) -> Told:
    return (
        deletion.deletion_id,
        _what(deletion.topic, deletion.pending_delete),
        deletion.outcome.name,
        deletion.failures,
        deletion.begun,
        deletion.maybe_deleted,
        deletion.next_attempt_at_ms if not deletion.begun else 0,
    )


def _what(topic: str, delete: PendingDelete) -> str:
    return f"{topic} {delete.component.name} {delete.cursor_name} {delete.schema_id} {ledger_of(delete)}"


def _as_told(one: Recorded) -> Told:
    return (
        one.number,
        _what(one.topic, one.delete),
        one.outcome.name,
        one.failures,
        one.standing is Standing.BEGUN,
        one.maybe_deleted,
        one.next_attempt_at_ms if one.standing is Standing.WAITING else 0,
    )
