"""Decisions on deletions in an order that a seed gives, compared with a plain list at each step.

Owns: the choice of steps: fewer of them go nowhere than in `machine`, and none is made smaller, so that a bug is found
in a moment.
"""

from __future__ import annotations

import random

from storage_backends.formats.deletion_format import (
    DeletionOutcome,
    InUseChange,
    LedgerComponent,
    LedgerType,
    OffloadContext,
    PendingDelete,
)
from tests.daemon.core.deletions._support.machine import DRIVERS, LEDGERS, TOPICS, UUIDS, DeletionsMachine
from tests.daemon.core.deletions._support.oracle import BEGUN, DEAD, ENDED, HELD, WAITING

LATEST_MS = 40


def wander(seed: int, steps: int) -> None:
    """Raises what is found."""
    draw = random.Random(seed)
    machine = DeletionsMachine()
    for _ in range(steps):
        _step(machine, draw)
        machine.the_state_is_the_one_that_was_told()
        machine.counts_are_right()
        machine.what_waits_is_found_and_what_has_begun()
        machine.ledgers_are_found()
        machine.topics_are_known()


def _step(machine: DeletionsMachine, draw: random.Random) -> None:
    at_ms = draw.randint(0, LATEST_MS)
    some = [draw.randint(0, 1 << 8) for _ in range(draw.randint(1, 3))]
    any_ids = tuple(draw.choices(machine.in_state(WAITING, BEGUN, DEAD, HELD, ENDED) or [1], k=2))
    match draw.choice(_STEPS):
        case "record":
            deletes = [_delete(draw) for _ in range(draw.randint(1, 3))]
            machine.record(draw.choice(TOPICS), deletes, at_ms, draw.random() < 0.5)
        case "begin" if machine.in_state(WAITING):
            machine.begin(some, at_ms)
        case "begin any":
            machine.begin_any(any_ids, at_ms)
        case "answer" if machine.in_state(BEGUN):
            outcome = draw.choice([*DeletionOutcome, DeletionOutcome.FAILED, DeletionOutcome.GIVEN_UP])
            machine.answer(
                some, outcome, at_ms, draw.randint(0, LATEST_MS), draw.random() < 0.5, draw.choice(["", "no"])
            )
        case "answer any":
            machine.answer_any(any_ids, draw.choice(list(DeletionOutcome)), at_ms)
        case "retry" if machine.in_state(DEAD):
            machine.retry(some, at_ms)
        case "retry any":
            machine.retry_any(any_ids, at_ms)
        case "purge" if machine.in_state(DEAD):
            machine.purge(some)
        case "purge any":
            machine.purge_any(any_ids)
        case "say":
            rows = [(draw.choice(LEDGERS), draw.choice([(0, 0), *UUIDS])) for _ in range(draw.randint(0, 3))]
            machine.say(draw.choice(TOPICS), draw.choice(list(InUseChange)), draw.choice(list(LedgerType)), rows)
        case "due":
            machine.due(at_ms, draw.randint(0, 3))
        case "take back":
            machine.take_back(any_ids)
        case "cut":
            machine.take_a_cut()
        case "restart":
            machine.restart()


_STEPS = (
    *["record", "begin", "answer", "say"] * 4,
    *[
        "begin any",
        "answer any",
        "retry",
        "retry any",
        "purge",
        "purge any",
        "due",
        "due",
        "take back",
        "cut",
        "restart",
    ],
)


def _delete(draw: random.Random) -> PendingDelete:
    component, ledger_id = draw.choice(list(LedgerComponent)), draw.choice(LEDGERS)
    if draw.random() < 0.5:
        return PendingDelete(component, LedgerType.LEDGER, ledger_id)
    context = OffloadContext(*draw.choice(UUIDS), *draw.choice(DRIVERS))
    cursor_name = draw.choice([None, "cursor"])
    return PendingDelete(
        component, LedgerType.OFFLOADED_LEDGER, ledger_id, cursor_name=cursor_name, offload_context=context
    )
