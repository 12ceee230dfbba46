"""The planted bugs that the simulation finds: what each breaks.

Owns: the list. Does not own: the search (`bug.search`), and planted bugs that other suites find (`registry`).
"""

from __future__ import annotations

from tests.planted import buckets, deletions, ids, keys, properties, redeliveries, rules, state
from tests.planted.bug import Bug

BUGS: tuple[Bug, ...] = (
    *rules.BUGS,
    *keys.BUGS,
    *state.BUGS,
    *buckets.BUGS,
    *properties.BUGS,
    *ids.BUGS,
    *redeliveries.BUGS,
    *deletions.BUGS,
)

# Rules whose bugs harm nobody whom the simulation sees, or hardly ever: who finds them.
BY_OTHERS = {
    "R3": "orders of two committers: WithoutVerify, no VERIFY_AFTER_S",
    "L2": "life of the own log: a_log_is_used_before_its_open_is_certain",
    "L6": "walks of daemons with a log each: a_stopped_shard_has_sections",
    "L8": "walks of daemons with a log each: a_shard_stops_while_its_section_is_under_way",
    "L9": "takeovers into a log: a_hole_is_damage_whoever_owns_the_shard",
    "L11": "life of the own log: a_log_that_is_lost_is_not_told",
    "L12": "collection of dead logs: test_manifests_that_are_read_before_the_ends_are_found",
    "entitlement at replay": "stories of a topic: who_came_later_is_asked_for_its_acknowledgement_too",
}
