"""Measures how evenly selectors share keys, how many keys a change moves, and how long joining takes.

The selectors alone are measured, in this process. STICKY has equal ranges: it only does what consumers ask for.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import tarry
from benchmarks import report, workbench
from daemon.core.key_shared import hash_selectors, hash_slots
from daemon.core.key_shared.hash_selectors import HashSelector, Joiner
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, HashRange
from storage_backends.formats.manifest import HashSelector as Kind

NAME = "selectors"
KEYS = 10_000
POINTS = 100
# Changes whose mean is shown: one moves only a few of the keys.
CHANGES = 20
ONE_BY_ONE, TOGETHER = "joining one by one", "joining together"
JOIN, LEAVE = "moved by one more join", "moved by one leave"
WITHOUT = "consumers without a slot"
ADD_S = 2.0


def run(bench: workbench.Workbench) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    draw = np.random.default_rng(bench.seed)
    counts = (bench.size(100, 10), bench.size(1_000, 50))
    most = bench.size(10_000, 200)
    turns = {
        f"{kind.name}, {count:,}": functools.partial(_turn, rounds, draw, kind, count)
        for count in counts
        for kind in Kind
    }
    rounds.run(turns | {f"{most:,} consumers": functools.partial(_without_slots, draw, most)})
    goals = {f"{kind.name}, 1,000: {ONE_BY_ONE}": report.Goal(most=ADD_S) for kind in Kind}
    figures = [rounds.figure(name, _unit(name), goals.get(name)) for name in rounds.names]
    parameters: dict[str, report.Value] = {"keys": KEYS, "points_per_consumer": POINTS, "rounds": bench.rounds}
    notes = [
        "Moved, at best: " + ", ".join(f"{100 / count:.3g} % of {count:,} consumers" for count in counts) + ".",
        "Each round has other names and other keys; AUTO_SPLIT and STICKY do not look at names.",
    ]
    return report.Result(NAME, parameters, figures, rounds.problems, notes)


def _unit(figure: str) -> str:
    if "joining" in figure:
        return "s"
    if "moved" in figure:
        return "% of keys"
    return "" if WITHOUT in figure else "x"


def _turn(rounds: workbench.Rounds, draw: np.random.Generator, kind: Kind, count: int) -> Mapping[str, float]:
    who = f"{kind.name}, {count:,}"
    joiners = _joiners(draw, kind, count)
    selector, adding_s = _joined(kind, [[each] for each in joiners])
    together, together_s = _joined(kind, [joiners])
    same = np.array_equal(selector.owners, together.owners)
    rounds.check(who, None if same else "consumers that join together have other slots than one by one")
    rounds.check_count(f"{who}: slots", int(np.count_nonzero(selector.owners)), HASH_SLOTS)
    slots = hash_slots.slots_of(tarry.key_hash([f"key-{each}" for each in draw.integers(0, 1 << 62, KEYS).tolist()]))
    figures = {
        **_spread("slots", np.array([selector.slots_of_consumer(each.ordinal) for each in joiners])),
        **_spread("keys", np.bincount(selector.owners[slots], minlength=count + 1)[1:]),
    }
    leaving = draw.choice(count, CHANGES, replace=count < CHANGES) + 1
    figures[LEAVE] = _moved(selector, slots, (_without_one(selector, ordinal) for ordinal in leaving.tolist()))
    if kind is not Kind.STICKY:
        more = (Joiner(count + 1, name) for name in _names(draw, CHANGES))
        figures[JOIN] = _moved(selector, slots, (_with_one(selector, joiner) for joiner in more))
    figures |= {ONE_BY_ONE: adding_s, TOGETHER: together_s}
    if kind is Kind.CONSISTENT_HASHING:
        figures[WITHOUT] = _without(selector, joiners)
    return {f"{who}: {name}": value for name, value in figures.items()}


def _without_slots(draw: np.random.Generator, count: int) -> Mapping[str, float]:
    """Measure so many consumers that some have no slot."""
    joiners = _joiners(draw, Kind.CONSISTENT_HASHING, count)
    selector, adding_s = _joined(Kind.CONSISTENT_HASHING, [joiners])
    figures = {TOGETHER: adding_s, WITHOUT: _without(selector, joiners)}
    return {f"{Kind.CONSISTENT_HASHING.name}, {count:,}: {name}": value for name, value in figures.items()}


def _joiners(draw: np.random.Generator, kind: Kind, count: int) -> list[Joiner]:
    bounds = np.linspace(0, HASH_SLOTS, count + 1).astype(int).tolist()
    ranges = [(HashRange(first, end - 1),) if kind is Kind.STICKY else () for first, end in itertools.pairwise(bounds)]
    return [Joiner(number + 1, name, ranges[number]) for number, name in enumerate(_names(draw, count))]


def _names(draw: np.random.Generator, count: int) -> list[str]:
    return [f"consumer-{each:016x}" for each in draw.integers(0, 1 << 62, count).tolist()]


def _joined(kind: Kind, batches: Sequence[Sequence[Joiner]]) -> tuple[HashSelector, float]:
    """Return a selector of these consumers, and the time that their joining took (seconds)."""
    selector = hash_selectors.selector_of(kind, POINTS)
    began_s = time.perf_counter()
    for joiners in batches:
        selector.join(joiners)
    return selector, time.perf_counter() - began_s


def _spread(of: str, counts: npt.NDArray[np.integer[Any]]) -> dict[str, float]:
    return {f"{of}, max/mean": counts.max() / counts.mean(), f"{of}, min/mean": counts.min() / counts.mean()}


def _moved(before: HashSelector, slots: U16, after: Iterable[HashSelector]) -> float:
    """Return the part of the keys that has another consumer after a change: the mean of several changes (%)."""
    return statistics.fmean(100 * float((each.owners[slots] != before.owners[slots]).mean()) for each in after)


def _with_one(selector: HashSelector, joiner: Joiner) -> HashSelector:
    changed = copy.deepcopy(selector)
    changed.join([joiner])
    return changed


def _without_one(selector: HashSelector, ordinal: int) -> HashSelector:
    changed = copy.deepcopy(selector)
    changed.leave([ordinal])
    return changed


def _without(selector: HashSelector, joiners: Sequence[Joiner]) -> float:
    return float(sum(not selector.slots_of_consumer(each.ordinal) for each in joiners))
