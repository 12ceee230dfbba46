"""`GetScheduledMessages`: leases due rows for a caller that is still there to receive them.

Owns: what a deadline and a caller that goes away mean for a lease.
Does not own: which rows are leased, for how long, and waiting for them (engine).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING

from daemon import call_values, errors
from daemon.grpc_services import records, wire_columns
from daemon.grpc_services.admission import Context
from daemon.topic import leases
from tarry.v1 import dispatch_pb2 as pb

if TYPE_CHECKING:
    from daemon.owner.requests import Requests

# Of the time to the deadline, this much is kept for the answer's way, or half of it when it is short.
ANSWER_MS = 200.0
# With less than this no row is leased.
DEADLINE_LEAST_MS = 5.0

log = logging.getLogger(__name__)


class Leasing:
    """The call, for all its callers."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._returning: set[asyncio.Task[None]] = set()

    async def get_scheduled(self, request: pb.GetScheduledMessagesRequest, context: Context) -> bytes:
        """The encoded answer. Cancel it when the caller has gone: what it leased is READY again at once."""
        leases.check_get(max_rows=request.max_rows, lease_ms=request.lease_ms, wait_ms=request.wait_ms)
        waiting = asyncio.ensure_future(
            self._requests.get_scheduled(
                request.topic,
                request.subscription,
                max_rows=request.max_rows,
                lease_ms=request.lease_ms,
                wait_ms=_within_deadline(request.wait_ms, context),
            )
        )
        try:
            leased = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(functools.partial(self._nobody_receives, request))
            waiting.cancel()
            raise
        if context.time_remaining() == 0:
            self._give_back(request, leased)
            raise errors.Unavailable("the deadline was over when rows were leased; they are due again")
        rest = pb.GetScheduledMessagesResponse(
            lease_ms=leased.lease_ms, rebuild_needed=records.rebuild_needed(leased.rebuild_needed)
        )
        return wire_columns.leased_response(leased, rest)

    def _nobody_receives(
        self, request: pb.GetScheduledMessagesRequest, waiting: asyncio.Future[call_values.Leased]
    ) -> None:
        if not waiting.cancelled() and waiting.exception() is None:
            self._give_back(request, waiting.result())

    def _give_back(self, request: pb.GetScheduledMessagesRequest, leased: call_values.Leased) -> None:
        if len(leased.handed_out.rows):
            held = leased.handed_out.held()
            task = asyncio.create_task(self._end_lease(request.topic, request.subscription, held))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _end_lease(self, topic: str, subscription: str, held: call_values.HeldPositions) -> None:
        try:
            await self._requests.extend_lease(topic, subscription, held, 0)
        except errors.TarryError as error:
            log.info("%d leased rows of topic %s are due again when their lease ends: %s", len(held), topic, error)


def _within_deadline(wait_ms: int, context: Context) -> int:
    """How long to wait so that the answer is there in time. Raises `Unavailable` when it cannot be."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return wait_ms
    remaining_ms = remaining_s * 1000
    if remaining_ms < DEADLINE_LEAST_MS:
        raise errors.Unavailable(f"deadline: {remaining_ms:.0f} ms are left, too few to lease rows; nothing was leased")
    return min(wait_ms, int(remaining_ms - min(ANSWER_MS, remaining_ms / 2)))
