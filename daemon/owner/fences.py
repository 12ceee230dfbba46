"""The fences of one attempt to take shards over: each log is fenced once, for all shards that it has.

Owns: that, and how long it is tried. Does not own: the steps of fencing (`storage_backends.log_fence`), and which logs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from storage_backends import log_fence
from storage_backends.crash_points import crash_point
from storage_backends.formats.log_slot_format import Writer
from storage_backends.log_fence import Fence
from storage_backends.slot_log import SlotLogs

# So long is a fence tried before the store counts as unreachable.
DEADLINE_S = 30.0


class Fences:
    """Used on one event loop, for one attempt: a fence that stops nobody is not kept for the next.

    `told`: which slot of a log was certain to its daemon, by the heartbeats that were read; 0: none told.
    """

    def __init__(
        self, logs: SlotLogs, environment: Environment, *, told: Callable[[str], int] = lambda log_id: 0
    ) -> None:
        self._logs = logs
        self._environment = environment
        self._told = told
        self._fences: dict[str, asyncio.Task[Fence]] = {}

    async def of(self, log_id: str) -> Fence:
        """Where the log ends; whoever asks first fences it. One that failed is tried again by whoever asks next.

        Raises LogHeld while a process lives that may write to it, Damaged when nobody can know where it ends, or when
        it is shorter than its daemon has told, and the store's errors.
        """
        fencing = self._fences.get(log_id)
        if fencing is None or (fencing.done() and (fencing.cancelled() or fencing.exception() is not None)):
            fencing = self._fences[log_id] = asyncio.ensure_future(self._fence(log_id))
            # Nobody may be waiting when it fails.
            fencing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(fencing)

    async def _fence(self, log_id: str) -> Fence:
        environment, config = self._environment, self._environment.config
        writer = Writer(config.daemon_id, config.daemon.address or "", environment.version)
        told = self._told(log_id)

        def fence() -> Fence:
            slots = self._logs.log(log_id)
            deadline_s = environment.clock.elapsed_s() + DEADLINE_S
            delays_s = itertools.takewhile(
                lambda delay_s: environment.clock.elapsed_s() + delay_s < deadline_s,
                backoff.delays_s(environment.jitter),
            )
            try:
                fenced = log_fence.fence_log(
                    slots, writer, told=told, delays_s=delays_s, sleep=environment.blocking_sleep
                )
            finally:
                slots.close()
            crash_point("takeover.after_fence")
            return fenced

        fenced = await environment.run(fence)
        environment.metrics.log_fenced()
        return fenced
