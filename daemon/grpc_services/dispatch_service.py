"""Serves `tarry.v1.Dispatch`: delivers due positions, and takes acknowledgements and negative ones.

`subscribe` and `subscribe_many` serve its streams; this module gives a stream its final status. `LeaseCalls` handles
deadlines and departing callers of `GetScheduledMessages`.

The gRPC server alone imports it: a module for each service of the contract.
"""

from __future__ import annotations

import asyncio
import functools
import logging

import grpc

from daemon import call_values, config, errors
from daemon.core.decisions.claims import HeldPositions
from daemon.grpc_services import row_answers, row_requests, status, subscribe, subscribe_many, unary, value_messages
from daemon.grpc_services.admission import Context
from daemon.owner.engine import Engine
from daemon.owner.requests import Requests
from daemon.topic import leases
from tarry.v1 import dispatch_pb2 as pb

# Time before the deadline that is reserved for sending the answer (ms); half of the time left if that is less
ANSWER_MS = 200.0
# No row is leased with less time left than this (ms)
DEADLINE_LEAST_MS = 5.0
# Longest request for a lease, which is names and numbers (bytes)
LEASE_REQUEST_BYTES_MAX = 16 << 10

log = logging.getLogger(__name__)


class LeaseCalls:
    """The calls of `GetScheduledMessages`, which leases due rows to callers that are still there to receive them."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._returning: set[asyncio.Task[None]] = set()

    async def get_scheduled(self, request: pb.GetScheduledMessagesRequest, context: Context) -> bytes:
        """Lease rows; return the encoded answer.

        Cancel it when the caller has left: the rows that it leased are READY again at once.
        """
        if context.undecided_bytes > LEASE_REQUEST_BYTES_MAX:
            text = f"message: {context.undecided_bytes} bytes, the limit of this call is {LEASE_REQUEST_BYTES_MAX}"
            raise errors.InvalidArgument(text)
        # It may wait for long, and others must be received meanwhile.
        context.decided()
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
            lease_ms=leased.lease_ms, rebuild_needed=value_messages.rebuild_needed(leased.rebuild_needed)
        )
        return row_answers.leased_response(leased, rest)

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

    async def _end_lease(self, topic: str, subscription: str, held: HeldPositions) -> None:
        try:
            await self._requests.extend_lease(topic, subscription, held, 0)
        except errors.TarryError as error:
            log.info("%d leased rows of topic %s are due again when their lease ends: %s", len(held), topic, error)


def _within_deadline(wait_ms: int, context: Context) -> int:
    """Return how long to wait so that the answer arrives in time (ms). Raises `Unavailable` if it cannot."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return wait_ms
    remaining_ms = remaining_s * 1000
    if remaining_ms < DEADLINE_LEAST_MS:
        raise errors.Unavailable(f"deadline: {remaining_ms:.0f} ms are left, too few to lease rows; nothing was leased")
    return min(wait_ms, int(remaining_ms - min(ANSWER_MS, remaining_ms / 2)))


DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Dispatch"]


class Dispatch:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._engine = engine
        self._settings = settings
        self._frame = unary.Frame(settings)
        self._leasing = LeaseCalls(engine.requests)
        self._draining = asyncio.Event()

    def handlers(self) -> dict[str, unary.Handler]:
        handler = self._frame.handler
        settled = functools.partial(self._frame.settled_handler, alone_in_s=self._engine.requests.alone_in_s)
        return {
            "Subscribe": grpc.stream_stream_rpc_method_handler(self._subscribe),
            "SubscribeMany": grpc.stream_stream_rpc_method_handler(self._subscribe_many),
            "CreateSubscription": handler(pb.CreateSubscriptionRequest, self._create_subscription),
            "UpdateSubscription": handler(pb.UpdateSubscriptionRequest, self._update_subscription),
            "DeleteSubscription": settled(pb.DeleteSubscriptionRequest, self._delete_subscription),
            "GetScheduledMessages": self._frame.cancelled_handler(
                pb.GetScheduledMessagesRequest, self._leasing.get_scheduled
            ),
            "Acknowledge": settled(pb.AcknowledgeRequest, self._acknowledge),
            "NegativeAcknowledge": settled(pb.NegativeAcknowledgeRequest, self._negative_acknowledge),
            "ExtendLease": handler(pb.ExtendLeaseRequest, self._extend_lease),
        }

    def end_streams(self) -> None:
        """End streams of many lanes with UNAVAILABLE once the engine has ended their lanes; the daemon stops."""
        self._draining.set()

    async def _subscribe(self, _: object, context: Context) -> None:
        error = await subscribe.serve(self._engine, self._settings, context)
        if error is not None:
            await status.abort(context, error)

    async def _subscribe_many(self, _: object, context: Context) -> None:
        try:
            await subscribe_many.SubscribeManyStream(self._engine, self._settings, context, self._draining).run()
        except Exception as error:  # noqa: BLE001 - every error has a status
            await status.abort(context, error)

    async def _create_subscription(self, request: pb.CreateSubscriptionRequest) -> pb.CreateSubscriptionResponse:
        policy, properties = value_messages.subscription_policy(request.policy)
        created = await self._engine.requests.create_subscription(
            request.topic, request.subscription, policy, properties
        )
        return value_messages.as_message(pb.CreateSubscriptionResponse, created)

    async def _update_subscription(self, request: pb.UpdateSubscriptionRequest) -> pb.UpdateSubscriptionResponse:
        value_messages.require_given(request)
        policy, properties = value_messages.subscription_policy(request.policy)
        await self._engine.requests.update_subscription(request.topic, request.subscription, policy, properties)
        return pb.UpdateSubscriptionResponse(policy=value_messages.subscription_policy_message(policy, properties))

    async def _delete_subscription(self, request: pb.DeleteSubscriptionRequest) -> pb.DeleteSubscriptionResponse:
        dead_letters = await self._engine.requests.delete_subscription(request.topic, request.subscription)
        return pb.DeleteSubscriptionResponse(dead_letters=dead_letters)

    async def _acknowledge(self, request: pb.AcknowledgeRequest) -> pb.AcknowledgeResponse:
        positions = row_requests.acknowledged(request)
        ignored = await self._engine.requests.acknowledge(request.topic, request.subscription, positions)
        response = pb.AcknowledgeResponse()
        row_answers.fill_ignored(response, ignored)
        return response

    async def _negative_acknowledge(self, request: pb.NegativeAcknowledgeRequest) -> pb.NegativeAcknowledgeResponse:
        nack = row_requests.nack(request)
        outcome = await self._engine.requests.negative_acknowledge(request.topic, request.subscription, nack)
        response = pb.NegativeAcknowledgeResponse(dead_lettered=outcome.dead_lettered)
        row_answers.fill_ignored(response, outcome.ignored)
        return response

    async def _extend_lease(self, request: pb.ExtendLeaseRequest) -> pb.ExtendLeaseResponse:
        positions = row_requests.handed_out(request)
        ignored = await self._engine.requests.extend_lease(
            request.topic, request.subscription, positions, request.lease_ms
        )
        response = pb.ExtendLeaseResponse()
        row_answers.fill_ignored(response, ignored)
        return response
