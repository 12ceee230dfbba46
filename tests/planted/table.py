"""The planted bugs that the simulation finds: what each breaks.

Owns: the list. Does not own: the search (`bug.search`), and planted bugs that other suites find (`registry`).
"""

from __future__ import annotations

from tests.planted import buckets, deletions, keys, redeliveries, rules, state
from tests.planted.bug import Bug

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
