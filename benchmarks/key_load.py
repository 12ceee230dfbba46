"""Rows with keys at a steady rate, the same in every process: who is to be acknowledged, who negatively so.

Owns: the plan as numbers, the columns that follow from it, and the process that adds. Does not own: receiving
(`key_dispatcher`) and the account (`key_account`).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

import tarry
from benchmarks import load

ROWS_PER_LEDGER = 10_000
STEP_MS = 10
SLOT_BITS = np.uint32(0xFFFF)


@dataclasses.dataclass(frozen=True)
class Plan:
    """`in_order`: each key has one delay, so that its rows are due in the order of their positions; else each row has
    its own. `nacked_share`: of the rows, each once, when it comes for the first time.
    """

    start_ms: int
    seconds: int
    rows_per_s: int
    keys: int
    delay_from_ms: int
    delay_until_ms: int
    in_order: bool
    nacked_share: float
    nack_delay_ms: int
    seed: int

    @property
    def rows(self) -> int:
        return self.rows_per_s * self.seconds

    @property
    def end_ms(self) -> int:
        """When the last row is due at the latest, if none is nacked."""
        return self.start_ms + 1000 * self.seconds + self.delay_until_ms

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_s * STEP_MS // 1000


class Load:
    """The columns of a plan; a row is named by its number, in the order of adding."""

    def __init__(self, plan: Plan) -> None:
        random = np.random.default_rng(plan.seed)
        hashes = random.choice(1 << 32, plan.keys, replace=False).astype(np.uint32)
        key = random.integers(0, plan.keys, plan.rows)
        delays = random.integers(
            plan.delay_from_ms, plan.delay_until_ms, plan.keys if plan.in_order else plan.rows, endpoint=True
        )
        if plan.in_order:
            # Keys of one slot have one delay: the slot is what is in order.
            first_of_slot = np.zeros(int(SLOT_BITS) + 1, np.int64)
            first_of_slot[hashes & SLOT_BITS] = delays
            delays = first_of_slot[hashes & SLOT_BITS][key]
        numbers = np.arange(plan.rows, dtype=np.uint64)
        sent_ms = plan.start_ms + numbers.astype(np.int64) // plan.rows_per_step * STEP_MS
        self.plan = plan
        self.key_hash: NDArray[np.uint32] = hashes[key]
        self.slot: NDArray[np.uint16] = (self.key_hash & SLOT_BITS).astype(np.uint16)
        self.is_nacked: NDArray[np.bool_] = random.random(plan.rows) < plan.nacked_share
        self.rows = load.Rows(
            numbers // ROWS_PER_LEDGER, numbers % ROWS_PER_LEDGER, (sent_ms + delays).astype(np.uint64)
        )

    def __len__(self) -> int:
        return len(self.rows)


def numbers_of(ledger_id: load.U64, entry_id: load.U64) -> NDArray[np.int64]:
    """The rows at these positions."""
    numbers: NDArray[np.int64] = (ledger_id * np.uint64(ROWS_PER_LEDGER) + entry_id).astype(np.int64)
    return numbers


def add(address: str, topic: str, plan: Plan, parent: Connection) -> None:
    """Runs in a process of its own: one batch a step, each at its moment. Sends that it is ready, and is sent when the
    load begins (`start_ms`); sends when each row was answered to be added (ms), never where it was refused.
    """
    firsts = range(0, plan.rows, plan.rows_per_step)
    answered_at_ms = np.full(len(firsts), np.iinfo(np.int64).max)
    clock = threading.Event()

    def note(step: int, answer: Future[tarry.AddResult]) -> None:
        if answer.exception() is None:
            answered_at_ms[step] = load.now_ms()

    with tarry.Client(address) as client, client.add_stream(topic, in_flight=1_000) as stream:
        parent.send("ready")
        of = Load(dataclasses.replace(plan, start_ms=parent.recv()))
        for step, first in enumerate(firsts):
            remaining_s = (of.plan.start_ms + step * STEP_MS) / 1000 - time.time()
            if remaining_s > 0:
                clock.wait(remaining_s)
            batch = slice(first, first + plan.rows_per_step)
            stream.add(
                of.rows.ledger_id[batch],
                of.rows.entry_id[batch],
                deliver_at_ms=of.rows.deliver_at_ms[batch],
                key_hash=of.key_hash[batch],
            ).add_done_callback(functools.partial(note, step))
    parent.send(np.repeat(answered_at_ms, plan.rows_per_step)[: plan.rows])
