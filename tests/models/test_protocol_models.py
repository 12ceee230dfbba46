"""The storage protocol in every order of its steps, within bounds, as its models have it.

Small budgets are exhausted, some in each run, by its part: what is found depends on the models alone, and a run of this
folder has all. The models' own, millions of states, are `long`. Each planted bug of a model is found, in the same
budget in which nothing is found without it. `-s` prints what was found after how many states.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.models import exploration
from tests.models.exploration import (
    COMMITS,
    IDS,
    LOGS,
    ROWS,
    SHARD,
    Explored,
    System,
    commits_system,
    ids_system,
    ids_system_in_one_step,
    log_system,
    rows_system,
    shard_system,
)
from tests.planted import registry

NO_BUGS: frozenset[str] = frozenset()
# What a small budget may have at most, and the most that a planted bug may take to be found.
SMALL_STATES_MAX = 200_000
BUG_STATES_MAX = 100_000
# The most that `long` explores of one budget; only some of them have more.
LONG_STATES_MAX = 6_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A budget of a model. `system`: with some planted bugs."""

    name: str
    system: Callable[[frozenset[str]], System]

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def commits(name: str, **budget: Any) -> Case:
    return Case(f"commits: {name}", lambda bugs: commits_system(bugs, **budget))


def rows(name: str, **budget: Any) -> Case:
    own = frozenset(budget.pop("mut", ()))
    return Case(f"rows: {name}", lambda bugs: rows_system(own | bugs, **budget))


def shard(*budget: int) -> Case:
    return Case(f"shard: {budget}", lambda bugs: shard_system(bugs, budget))


def logs(name: str, budget: dict[str, Any] | None = None) -> Case:
    """One of the model's own budgets by its name, unless another is given."""
    return Case(f"logs: {name}", lambda bugs: log_system(bugs, LOGS.RUNS[name] if budget is None else budget))


def ids(name: str, **budget: Any) -> Case:
    """A run of the model of schedule ids by its name: of `ids`, `load`, or of another of its functions.

    `budget` takes the place of parts of the model's own.
    """
    model, _, run = name.partition("/")
    function = getattr(IDS, model)

    def system(bugs: frozenset[str]) -> System:
        if model in ("requests", "waits"):
            return ids_system_in_one_step(function, bugs)
        if run:
            own, what, given, *others = getattr(IDS, f"{model.upper()}_RUNS")[run]
            return ids_system(function, bugs, (own, what, given | budget, *others))
        whole = ids_system(function, bugs)
        return dataclasses.replace(whole, first=whole.first._replace(**budget))

    return Case(f"ids: {name}{', small' if budget else ''}", system)


TAKEOVER = {
    "adds1": 2,
    "adds2": 1,
    "seals1": 1,
    "seals2": 1,
    "merges": 0,
    "gcman": 2,
    "gcwal": 1,
    "gcobj": 0,
    "gcfloor": 0,
}
SEAL_AND_MERGE = {
    "adds1": 1,
    "adds2": 0,
    "seals1": 1,
    "seals2": 0,
    "merges": 1,
    "gcman": 2,
    "gcwal": 0,
    "gcobj": 1,
    "gcfloor": 1,
    "start_two": True,
}
TWO_MERGERS = SEAL_AND_MERGE | {"adds1": 0, "seals1": 0, "merges": 2}

# Budgets of the model of logs that are too large for any search but a random one.
LOGS_FOR_WALKS = ("wide", "wide1")

# A run of the model of schedule ids that is too large for any search but a random one
IDS_FOR_WALKS = ("all at once",)

SMALL = [
    commits("takeover", **TAKEOVER),
    commits("takeover, two seals of the first owner", **TAKEOVER | {"seals1": 2}),
    commits("seal, merge, collector, one owner", **SEAL_AND_MERGE, takeover=False),
    commits("seal, merge, collector, takeover", **SEAL_AND_MERGE | {"gcman": 1, "gcfloor": 0}),
    commits("merge, collector and floor, takeover", **SEAL_AND_MERGE | {"gcman": 1, "adds1": 0}),
    commits("two mergers, collector, one owner", **TWO_MERGERS, takeover=False),
    commits("two mergers, floor, takeover", **TWO_MERGERS | {"gcman": 0}),
    shard(2, 1, 1, 1, 1, 1, 1),
    rows("nested merge, collector, checkpoint", n=3, init="three", ops=1, seals=0, cks=1, merges=2, gcs=1, hands=0),
    rows("nested merge, collector, seal", n=3, init="three", ops=1, seals=1, cks=0, merges=2, gcs=1, hands=0),
    rows(
        "two subscriptions, seal, checkpoint, merge",
        init="readded",
        subs=2,
        ops=1,
        seals=1,
        cks=1,
        merges=1,
        hands=2,
        kinds="RK",
    ),
    rows("two subscriptions, seal, checkpoint", init="mutable", subs=2, ops=2, seals=1, cks=1, hands=2, kinds="RK"),
    rows("added again, seal, merge", init="readded", ops=2, seals=1, cks=0, merges=1),
    rows("added again, checkpoint, merge", init="readded", ops=2, seals=0, cks=1, merges=1),
    rows("two positions, seal, checkpoint, merge", n=2, opos=(0, 1), init="two", ops=1, seals=1, cks=1, merges=1),
    rows("three requests, seal, checkpoint", ops=3, seals=1, cks=1),
    rows("two seals, two checkpoints", ops=2, seals=2, cks=2),
    rows("two requests in a slot", ops=2, batch=2, seals=1, cks=1),
    rows("drop, merge, seal, checkpoint", n=2, init="two", ops=1, seals=1, cks=1, merges=1, drops=1),
    rows("open and late acknowledgements over a takeover", init="mutable", ops=3, seals=1, cks=0, hands=2, opens=True),
    rows("lazy truncation", ops=1, seals=2, cks=2, eager=False),
    logs("tiny"),
    logs("again"),
    logs("false"),
    logs("backrc"),
    logs("end1"),
    logs("lost"),
    logs("still"),
    logs("untold"),
    logs("endrc"),
    logs("end2s"),
    logs(
        "a damaged slot of two shards",
        LOGS.R_(2, (1, 0, 0, 1, 0, 0, 0, 0, 0), (0, 1, 2, 0, 0, 0, 0, 0), both=True, hit=("damage",), mid=True),
    ),
    logs(
        "old lists, two candidates",
        LOGS.R_(1, (2, 0, 0, 1, 0, 0, 1, 0), (1, 1, 1, 0, 0, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0)),
    ),
    logs("copies, collector", LOGS.R_(1, (1, 0, 0, 1, 0, 0, 1, 1), (1, 1, 1, 1, 0, 0, 0, 0), gc=1)),
    logs("slots of two shards", LOGS.R_(2, (2, 0, 0, 1, 0, 0, 1, 0), (0, 1, 1, 0, 0, 0, 0, 0), both=True)),
    logs("release and reclaim", LOGS.R_(2, (1, 0, 1, 0, 1, 1, 1, 0), (0, 1, 1, 0, 0, 0, 0, 0))),
    logs(
        "giving back",
        LOGS.R_(1, (1, 0, 0, 0, 0, 0, 1, 0), (1, 1, 1, 0, 1, 0, 1, 0), (0, 1, 1, 0, 0, 0, 0, 0), gc=1, back=True),
    ),
    ids("ids/adds", ops=3),
    ids("ids/positions", ops=4),
    ids("ids/replace", ops=2),
    ids("ids/reschedule", ops=2),
    ids("ids/takeover", ops=2, crash=1),
    ids("ids/backlog", back=2, hand=2, crash=0),
    ids("ids/storage", ops=2, sweep=0),
    ids("ids/damage", ops=2),
    ids("ids/numbers", ops=3, crash=0),
    ids("ids/two ids", ops=3),
    ids("ids/dead letters", back=2, hand=1),
    ids("ids/taken"),
    ids("load/merges", ops=1, merge=1),
    ids("load/sweeps", ops=2, merge=0),
    ids("load/damage", ops=1, quar=1),
    ids("load/adds", ops=1),
    ids("numbers", bud=(3, 3)),
    ids("copies", ops=2),
    ids("requests"),
    ids("waits"),
]

LARGE = [
    commits("takeover, more adds", **TAKEOVER | {"adds2": 2, "seals1": 2, "gcwal": 2}),
    commits("seal, merge, collector, floor, takeover", **SEAL_AND_MERGE | {"gcman": 1}),
    commits("two mergers, collector, floor, takeover", **TWO_MERGERS | {"gcman": 1}),
    shard(3, 1, 2, 1, 1, 1, 2),
    *(rows(name, **budget) for name, budget in ROWS.CORRECT),
    *(logs(name) for name in LOGS.RUNS if name not in LOGS_FOR_WALKS),
    *(ids(f"ids/{name}") for name in IDS.IDS_RUNS if name not in IDS_FOR_WALKS),
    *(ids(f"load/{name}") for name in IDS.LOAD_RUNS),
    ids("numbers"),
    ids("copies"),
]


@pytest.mark.rotating
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_in_no_order_of_steps_an_invariant_is_broken(case: Case) -> None:
    explored = exploration.explore(case.system(NO_BUGS), SMALL_STATES_MAX)
    assert explored.violation is None
    assert explored.exhausted, f"{explored.states} states are not all: the budget is not a small one"


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_in_no_order_of_steps_within_wider_bounds_an_invariant_is_broken(case: Case) -> None:
    explored = exploration.explore(case.system(NO_BUGS), LONG_STATES_MAX)
    assert explored.violation is None
    print(f"\n{case.name}: {explored.states} states{'' if explored.exhausted else ', not all'}")  # noqa: T201


# ---- planted bugs

COMMITS_BUGS = {
    "gc_fence": commits("takeover", **TAKEOVER),
    "skip_slot": commits("takeover", **TAKEOVER),
    "no_epoch_check": commits("takeover", **TAKEOVER),
    "probe_before_claim": commits("takeover", **TAKEOVER),
    "no_verify": commits("two mergers", **TWO_MERGERS),
    "no_floor_check": commits("seal and merge", **SEAL_AND_MERGE),
    "gc_no_floor": commits("seal and merge", **SEAL_AND_MERGE),
    "no_src_check": commits("two mergers", **TWO_MERGERS),
}
SHARD_BUGS = {bug: shard(2, 1, 1, 1, 1, 1, 1) for bug in ("no_topic_claim", "trim_all", "trim_no_epoch")}
ROWS_BUGS = {bug: rows(bug, **budget) for bug, budget in ROWS.MUTANTS}
# Sentences that may be misread so that the protocol fails; the models call them the design as written.
ROWS_MISREADINGS = {bug: rows(bug, **budget) for bug, budget in ROWS.WRITTEN}
# Switches of the model that are no bugs: another correct rule, and a check that is left out.
ROWS_NO_BUGS = {"fix_no_checkpoint_while_sealing", "absent_bucket_from_manifest", "no_truth_check"}
LOGS_BUGS = {bugs: logs(run) for bugs, (run, _) in LOGS.MUTANTS.items() if bugs not in ("any_epoch", "bound_owned")}
# Switches of that model that are no bugs: a check that is left out, what harms nobody, and a wording of a rule.
# `bound_owned` is one together with `fast_release`.
LOGS_NO_BUGS = {"no_probe", "any_epoch", "gc_below"}
# Those that take more states than the others: `long` looks for them.
LOGS_BUGS_STATES_MAX = 300_000
LOGS_BUGS_FOUND_LATE = (
    "bound_claims",
    "bound_open",
    "end_below",
    "fast_release,bound_owned",
    "fence_counts",
    "gc_early",
    "gc_unfenced",
    "no_from",
    "no_heads",
    "no_look",
)
IDS_BUGS = {
    **{f"ids/{bug}": ids(f"ids/{run}") for bug, (run, _) in IDS.IDS_BUGS.items()},
    **{f"load/{bug}": ids(f"load/{run}") for bug, (run, _) in IDS.LOAD_BUGS.items()},
    **{f"numbers/{bug}": ids("numbers") for bug in IDS.NUMBERS_BUGS},
    **{f"copies/{bug}": ids("copies") for bug in IDS.COPIES_BUGS},
    **{f"requests/{bug}": ids("requests") for bug in IDS.REQUEST_BUGS},
    **{f"waits/{bug}": ids("waits") for bug in IDS.WAITS_BUGS},
}
# Those that take seconds: `long` looks for them.
IDS_BUGS_FOUND_LATE = (
    "ids/handout_ignores_staged_replace",
    "ids/passes_before_alone",
    "load/missing_once",
    "load/reads_are_newest",
    "load/sweep_by_value",
    "load/sweep_loses_later",
)
PLANTED = [
    *(pytest.param(bug, case, id=f"commits-{bug}") for bug, case in COMMITS_BUGS.items()),
    *(pytest.param(bug, case, id=f"shard-{bug}") for bug, case in SHARD_BUGS.items()),
    *(pytest.param(bug, case, id=f"rows-{bug}") for bug, case in (ROWS_BUGS | ROWS_MISREADINGS).items()),
    *(
        pytest.param(bugs, case, id=f"logs-{bugs}", marks=[pytest.mark.long] if bugs in LOGS_BUGS_FOUND_LATE else [])
        for bugs, case in LOGS_BUGS.items()
    ),
    *(
        pytest.param(bug, case, id=f"ids-{bug}", marks=[pytest.mark.long] if bug in IDS_BUGS_FOUND_LATE else [])
        for bug, case in IDS_BUGS.items()
    ),
]


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, Explored]]]:
    """What was found; printed after the last test."""
    found: list[tuple[str, Explored]] = []
    yield found
    print("\n")  # noqa: T201
    for bug, explored in found:
        print(f"{bug:<34} found after {explored.states:>6} states: {explored.violation}")  # noqa: T201


@pytest.mark.rotating
@pytest.mark.parametrize(("bug", "case"), PLANTED)
def test_a_planted_bug_is_found_and_nothing_without_it(bug: str, case: Case, table: list[tuple[str, Explored]]) -> None:
    states_max = LOGS_BUGS_STATES_MAX if bug in LOGS_BUGS_FOUND_LATE else BUG_STATES_MAX
    # Two functions of the model of schedule ids have a bug of one name: the function stands before it.
    found = exploration.explore(case.system(frozenset(bug.split("/")[-1].split(","))), states_max)
    table.append((bug, found))
    assert found.violation is not None, f"{found.states} states without a violation"
    without = exploration.explore(case.system(NO_BUGS), max(1_000, found.states))
    assert without.violation is None


def test_every_planted_bug_of_the_models_is_one_of_these() -> None:
    assert len(COMMITS_BUGS | SHARD_BUGS | ROWS_BUGS) == 41
    assert len(LOGS_BUGS) == 49
    assert len(IDS_BUGS) == 62
    named = re.compile(r"'(\w+)'(?: not)? in (?:cfg\.)?mut\b")
    for model, bugs in ((COMMITS, COMMITS_BUGS), (SHARD, SHARD_BUGS), (ROWS, ROWS_BUGS | ROWS_MISREADINGS)):
        source = (exploration.HERE / f"{model.__name__}.py").read_text(encoding="utf-8")
        assert set(named.findall(source)) - ROWS_NO_BUGS == set(bugs)
    source = (exploration.HERE / f"{LOGS.__name__}.py").read_text(encoding="utf-8")
    planted = {bug for bugs in LOGS_BUGS for bug in bugs.split(",")}
    assert set(re.findall(r"'(\w+)'(?: not)? in M\b", source)) - LOGS_NO_BUGS == planted
    source = (exploration.HERE / f"{IDS.__name__}.py").read_text(encoding="utf-8")
    assert set(re.findall(r"bug (?:==|!=) '(\w+)'", source)) <= {bug.split("/")[1] for bug in IDS_BUGS}


registry.register("model of commits", COMMITS_BUGS)
registry.register("model of shards", SHARD_BUGS)
registry.register("model of rows", ROWS_BUGS)
registry.register("model of logs", LOGS_BUGS)
registry.register("model of schedule ids", IDS_BUGS)
