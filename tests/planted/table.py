"""Every planted bug of the repository: what it breaks, and who finds it.

Owns: the list. Does not own: the searches (`bug.search`, the suites' own tests).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from tests.daemon.core import test_fifo_runs as fifo
from tests.daemon.core import test_merging_states as merging
from tests.daemon.core import test_planted_bugs as core
from tests.daemon.core import test_planted_bugs_of_departures as departures
from tests.daemon.core import test_planted_bugs_of_own_indexes as own_indexes
from tests.daemon.core import test_planted_bugs_of_withdrawals as withdrawals
from tests.daemon.core.deletions import test_planted_bugs_of_deletions as shard_deletions
from tests.daemon.engine import test_partial_recovery as loading
from tests.daemon.engine import test_planted_bugs_of_buckets as lives
from tests.daemon.engine import test_planted_bugs_of_deletions as attempts
from tests.daemon.engine import test_planted_bugs_of_withdrawals as races
from tests.daemon.owner import test_takeover as takeovers
from tests.daemon.shard import test_garbage_interleavings as collectors
from tests.models import deletion_model
from tests.models import test_protocol_models as models
from tests.planted import buckets, deletions, keys, redeliveries, rules, state
from tests.planted.bug import Bug
from tests.storage_backends import test_commit_interleavings as commits
from tests.storage_backends import test_topic_manifest_interleavings as owners
from tests.storage_backends import test_topic_merge_interleavings as mergers

BUGS: tuple[Bug, ...] = (
    *rules.BUGS,
    *keys.BUGS,
    *state.BUGS,
    *buckets.BUGS,
    *redeliveries.BUGS,
    *deletions.BUGS,
)

# Rules whose bugs harm nobody whom the simulation sees, or hardly ever: who finds them.
BY_OTHERS = {
    "R3": "orders of two committers: WithoutVerify, no VERIFY_AFTER_S",
    "entitlement at replay": "stories of a topic: who_came_later_is_asked_for_its_acknowledgement_too",
}

TOPIC = (core, departures, own_indexes, withdrawals, merging)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A planted bug whose own suite proves that it is found."""

    suite: str
    name: str


def of_other_suites() -> tuple[Row, ...]:
    """The planted bugs of the other suites."""
    return (
        *_rows("state machine of a topic", _names(plant for suite in TOPIC for plant in suite.BY_ANY_ORDER)),
        *_rows("stories of a topic", _names(plant for suite in TOPIC for plant, _ in suite.BY_A_STORY)),
        *_rows("rows of a bucket by the order in which they come", _names(fifo.PLANTED)),
        *_rows("orders of two committers", _names(commits.BUGS)),
        *_rows("orders of an owner and its successor", owners.BUGS),
        *_rows("orders of an owner, mergers and a collector", mergers.BUGS),
        *_rows("orders of an owner and a collector", _names(collectors.BUGS)),
        *_rows("orders of a takeover", (name for name in vars(takeovers) if name.endswith("_is_found_out"))),
        *_rows("races of cancellations and reschedules", _names(plant for plant, _ in races.PLANTED)),
        *_rows("own indexes, and merges by others", _names(plant for plant, _ in lives.PLANTED)),
        *_rows("lives of a topic that is not loaded", (planted.__name__ for _, planted, *_ in loading.PLANTED)),
        *_rows("deletions of a shard", _names(shard_deletions.BY_ANY_ORDER)),
        *_rows("attempts to delete ledgers", _names(plant for plant, _ in attempts.PLANTED)),
        *_rows("model of two-phase deletion", deletion_model.BUGS),
        *_rows("model of commits", models.COMMITS_BUGS),
        *_rows("model of shards", models.SHARD_BUGS),
        *_rows("model of rows", models.ROWS_BUGS),
    )


def _names(planted: Iterable[Callable[..., object]]) -> Iterator[str]:
    return (each.__name__ for each in planted)


def _rows(suite: str, names: Iterable[str]) -> Iterator[Row]:
    return (Row(suite, name) for name in dict.fromkeys(names))
