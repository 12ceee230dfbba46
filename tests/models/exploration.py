"""The models of the storage protocol as tests run them.

Owns: loading the models by path, breadth-first search, and how each model's states are made, followed and checked.
Does not own: the protocol and its planted bugs (the models themselves, which are programs of their own and stay as they
are), and which configurations are explored (the tests).
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

# A state is a tuple of tuples and frozensets; what is in it only its model knows.
State: TypeAlias = Any

HERE = Path(__file__).parent


def load(name: str) -> Any:
    """A model as a module."""
    specification = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


COMMITS = load("protocol_model")
ROWS = load("protocol_model_rows")
SHARD = load("protocol_model_shard")
LOGS = load("protocol_model_log")
IDS = load("protocol_model_ids")


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One configuration of a model. `following`: the states that one step leads to. `broken`: which invariant does not
    hold in a state that follows another one, None when all do.
    """

    first: State
    following: Callable[[State], Iterable[State]]
    broken: Callable[[State, State], str | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Explored:
    """`violation`: the invariant that was found broken. `exhausted`: no state is left to look at."""

    states: int
    violation: str | None
    exhausted: bool


def explore(system: System, states_max: int) -> Explored:
    """Breadth-first, each state once, until an invariant is broken or there are `states_max` states.

    A state is remembered by its 64-bit hash.
    """
    seen = {hash(system.first)}
    waiting = collections.deque([system.first])
    while waiting and len(seen) < states_max:
        state = waiting.popleft()
        try:
            for following in system.following(state):
                remembered = hash(following)
                if remembered in seen:
                    continue
                seen.add(remembered)
                violation = system.broken(following, state)
                if violation is not None:
                    return Explored(len(seen), violation, exhausted=False)
                waiting.append(following)
        except (AssertionError, ROWS.Bad, LOGS.Violation, IDS.Bad) as violation_of_a_step:
            return Explored(len(seen), str(violation_of_a_step), exhausted=False)
    return Explored(len(seen), None, exhausted=not waiting)


def commits_system(bugs: frozenset[str], **budget: Any) -> System:
    """Owner, successor, mergers and collector of one topic; lost answers."""
    configuration = COMMITS.Cfg(mut=bugs, **budget)
    return System(
        COMMITS.initial(configuration),
        lambda state: (following for _, following in COMMITS.succs(state, configuration)),
        lambda state, _: COMMITS.check(state),
    )


def rows_system(bugs: frozenset[str], **budget: Any) -> System:
    """Rows of one topic: requests, acknowledgements, seals, checkpoints, truncation, merges, takeover."""
    configuration = ROWS.Cfg(mut=bugs, **budget)
    return System(
        ROWS.initial(configuration),
        lambda state: (following for _, following in ROWS.succs(state, configuration)),
        lambda state, before: ROWS.check(state, configuration, before),
    )


def shard_system(bugs: frozenset[str], budget: tuple[int, ...]) -> System:
    """A journal that two topics share."""
    return System(
        SHARD.init(*budget),
        lambda state: (following for _, following in SHARD.succs(state, bugs)),
        lambda state, _: SHARD.check(state),
    )


def log_system(bugs: frozenset[str], budget: dict[str, Any]) -> System:
    """Daemons with a log each, candidates, truncation and a collector; a budget is one of `LOGS.RUNS`. The model keeps
    bugs and budget as globals: one system at a time is explored.
    """
    LOGS.M, LOGS.R = bugs, budget
    LOGS.NS, LOGS.ND = LOGS.R["shards"], len(LOGS.R["p"])

    def following(state: State) -> Iterable[State]:
        for _, changes in LOGS.succs(state):
            after = list(state)
            for place, part in changes:
                after[place] = part
            yield tuple(after)

    return System(tuple(LOGS.init()), following, lambda state, _: _broken_log(state))


def _broken_log(state: State) -> str | None:
    """Which invariant of the model of logs a state breaks; the model raises some of them."""
    shards, daemons = LOGS.NS, LOGS.ND
    manifests, logs, answered = state[:shards], state[shards : shards + daemons], state[shards + daemons]
    damage = state[-2]
    checks = itertools.chain(
        (LOGS.check_shard(shard, manifests[shard], logs, answered, damage) for shard in range(shards)),
        (
            LOGS.check_daemon(state[shards + daemons + 1 + daemon], manifests, logs[daemon], answered, daemon, damage)
            for daemon in range(daemons)
        ),
    )
    found: str | None = next((violation for violation in checks if violation), None)
    return found or LOGS.check_fences(manifests, logs)


def ids_system(model: Callable[..., Any], bugs: frozenset[str], *configuration: Any) -> System:
    """Schedule ids: `model` is a function of the model, with one of its configurations if it has any.

    The function hands what it explores to the model's own search, of which this takes the place.
    """
    searches = IDS.explore, IDS.walk
    IDS.explore = IDS.walk = lambda _name, _bug, first, steps, wrong, _seconds: System(
        first, lambda state: (following for _, following in steps(state)), lambda state, _: wrong(state)
    )
    try:
        system: System = model(*configuration, *bugs)
    finally:
        IDS.explore, IDS.walk = searches
    return system


def ids_system_in_one_step(model: Callable[..., Any], bugs: frozenset[str]) -> System:
    """Schedule ids: what a function of the model goes through by itself, as one step."""
    return System(
        0,
        lambda state: [1] if state == 0 else [],
        lambda state, _: "what the model goes through breaks an invariant" if model(*bugs)[0] else None,
    )
