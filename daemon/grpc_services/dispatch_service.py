"""`tarry.v1.Dispatch`: due positions come out and are acknowledged, or come back later.

Owns: the requests and answers of the calls without a stream, and the status with which a stream ends.
Does not own: streams (`subscribe`, `subscribe_many`), what the calls do (engine), the form of columns and errors
(`wire_columns`, `status`), and callers that wait for a lease (`leasing`).
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import grpc

from daemon import config
from daemon.grpc_services import (
    leasing,
    policy_messages,
    records,
    status,
    subscribe,
    subscribe_many,
    unary,
    wire_columns,
)
from daemon.grpc_services.admission import Context
from tarry.v1 import dispatch_pb2 as pb

if TYPE_CHECKING:
    from daemon.owner.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Dispatch"]


class Dispatch:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._engine = engine
        self._settings = settings
        self._frame = unary.Frame(settings)
        self._leasing = leasing.Leasing(engine.requests)
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
        """The daemon stops: streams of many lanes end with UNAVAILABLE when their lanes have ended with the engine."""
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
        policy, properties = policy_messages.subscription_policy(request.policy)
        created = await self._engine.requests.create_subscription(
            request.topic, request.subscription, policy, properties
        )
        return records.as_message(pb.CreateSubscriptionResponse, created)

    async def _update_subscription(self, request: pb.UpdateSubscriptionRequest) -> pb.UpdateSubscriptionResponse:
        policy_messages.require_given(request)
        policy, properties = policy_messages.subscription_policy(request.policy)
        await self._engine.requests.update_subscription(request.topic, request.subscription, policy, properties)
        return pb.UpdateSubscriptionResponse(policy=policy_messages.subscription_policy_message(policy, properties))

    async def _delete_subscription(self, request: pb.DeleteSubscriptionRequest) -> pb.DeleteSubscriptionResponse:
        dead_letters = await self._engine.requests.delete_subscription(request.topic, request.subscription)
        return pb.DeleteSubscriptionResponse(dead_letters=dead_letters)

    async def _acknowledge(self, request: pb.AcknowledgeRequest) -> pb.AcknowledgeResponse:
        positions = wire_columns.acknowledged(request)
        ignored = await self._engine.requests.acknowledge(request.topic, request.subscription, positions)
        response = pb.AcknowledgeResponse()
        wire_columns.fill_ignored(response, ignored)
        return response

    async def _negative_acknowledge(self, request: pb.NegativeAcknowledgeRequest) -> pb.NegativeAcknowledgeResponse:
        nack = wire_columns.nack(request)
        outcome = await self._engine.requests.negative_acknowledge(request.topic, request.subscription, nack)
        response = pb.NegativeAcknowledgeResponse(dead_lettered=outcome.dead_lettered)
        wire_columns.fill_ignored(response, outcome.ignored)
        return response

    async def _extend_lease(self, request: pb.ExtendLeaseRequest) -> pb.ExtendLeaseResponse:
        positions = wire_columns.handed_out(request)
        ignored = await self._engine.requests.extend_lease(
            request.topic, request.subscription, positions, request.lease_ms
        )
        response = pb.ExtendLeaseResponse()
        wire_columns.fill_ignored(response, ignored)
        return response
