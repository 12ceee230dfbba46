"""Serves `tarry.v1.Admin`: policies, delay levels, dead letters, whole topics and garbage collection.

The gRPC server alone imports it: a module for each service of the contract.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from daemon import config
from daemon.core.index import delay_levels
from daemon.core.index.delay_levels import DelayLevels
from daemon.grpc_services import row_requests, unary, value_messages
from daemon.owner.engine import Engine
from storage_backends.formats.manifest import TopicDelayLevels
from tarry.v1 import admin_pb2 as pb

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Admin"]


class Admin:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._requests = engine.requests
        self._frame = unary.Frame(settings)
        self._handler = self._frame.handler

    def handlers(self) -> dict[str, unary.Handler]:
        return {
            "SetTopicPolicy": self._handler(pb.SetTopicPolicyRequest, self._set_topic_policy),
            "GetTopicPolicy": self._handler(pb.GetTopicPolicyRequest, self._get_topic_policy),
            "SetDelayLevels": self._handler(pb.SetDelayLevelsRequest, self._set_delay_levels),
            "GetDelayLevels": self._handler(pb.GetDelayLevelsRequest, self._get_delay_levels),
            "ReplayDeadLetters": self._handler(pb.ReplayDeadLettersRequest, self._replay_dead_letters),
            "PurgeDeadLetters": self._handler(pb.PurgeDeadLettersRequest, self._purge_dead_letters),
            "SealBucket": self._handler(pb.SealBucketRequest, self._seal_bucket),
            "MergeBuckets": self._handler(pb.MergeBucketsRequest, self._merge_buckets),
            "DeleteTopic": self._frame.settled_handler(
                pb.DeleteTopicRequest, self._delete_topic, self._requests.alone_in_s
            ),
            "CollectGarbage": self._frame.streaming_handler(pb.CollectGarbageRequest, self._collect_garbage),
        }

    async def _set_topic_policy(self, request: pb.SetTopicPolicyRequest) -> pb.SetTopicPolicyResponse:
        value_messages.require_given(request)
        effective = await self._requests.set_topic_policy(request.topic, value_messages.topic_policy(request.policy))
        return pb.SetTopicPolicyResponse(effective=value_messages.topic_policy_message(effective))

    async def _get_topic_policy(self, request: pb.GetTopicPolicyRequest) -> pb.GetTopicPolicyResponse:
        found = await self._requests.topic_policy(request.topic)
        return pb.GetTopicPolicyResponse(
            policy=value_messages.topic_policy_message(found.stored),
            effective=value_messages.topic_policy_message(found.effective),
        )

    async def _set_delay_levels(self, request: pb.SetDelayLevelsRequest) -> pb.SetDelayLevelsResponse:
        given = request.levels
        table = None
        if request.HasField("levels"):
            clamp = given.clamp if given.HasField("clamp") else True
            table = TopicDelayLevels(table=given.table, clamp=clamp)
        levels = await self._requests.set_delay_levels(request.topic, table)
        return pb.SetDelayLevelsResponse(levels=_levels(levels), warnings=delay_levels.warnings(levels))

    async def _get_delay_levels(self, request: pb.GetDelayLevelsRequest) -> pb.GetDelayLevelsResponse:
        found = await self._requests.delay_levels(request.topic)
        return pb.GetDelayLevelsResponse(
            levels=_levels(found.levels),
            delay_ms=found.levels.delays_ms,
            of_topic=found.of_topic,
            pending=found.pending,
        )

    async def _replay_dead_letters(self, request: pb.ReplayDeadLettersRequest) -> pb.ReplayDeadLettersResponse:
        replayed = await self._requests.replay_dead_letters(
            request.topic, request.subscription, row_requests.dead_letter_filter(request.filter), request.delay_ms
        )
        return value_messages.as_message(pb.ReplayDeadLettersResponse, replayed)

    async def _purge_dead_letters(self, request: pb.PurgeDeadLettersRequest) -> pb.PurgeDeadLettersResponse:
        purged = await self._requests.purge_dead_letters(
            request.topic, request.subscription, row_requests.dead_letter_filter(request.filter)
        )
        return pb.PurgeDeadLettersResponse(purged=purged)

    async def _seal_bucket(self, request: pb.SealBucketRequest) -> pb.SealBucketResponse:
        return value_messages.as_message(pb.SealBucketResponse, await self._requests.seal(request.topic))

    async def _merge_buckets(self, request: pb.MergeBucketsRequest) -> pb.MergeBucketsResponse:
        merged = await self._requests.merge(request.topic, request.buckets_max)
        return value_messages.as_message(pb.MergeBucketsResponse, merged)

    async def _delete_topic(self, request: pb.DeleteTopicRequest) -> pb.DeleteTopicResponse:
        return value_messages.as_message(pb.DeleteTopicResponse, await self._requests.delete_topic(request.topic))

    async def _collect_garbage(self, request: pb.CollectGarbageRequest) -> AsyncGenerator[pb.CollectGarbageResponse]:
        passes = self._requests.collect(
            dry_run=request.dry_run, force=request.force, retry_dead=request.retry_dead_objects
        )
        async with contextlib.aclosing(passes):
            async for progress in passes:
                counts = {
                    field.name: value_messages.as_message(pb.GarbageCount, getattr(progress.summary, field.name))
                    for field in pb.GarbageSummary.DESCRIPTOR.fields
                }
                summary = pb.GarbageSummary(**counts)
                yield value_messages.as_message(pb.CollectGarbageResponse, progress, summary=summary)


def _levels(levels: DelayLevels) -> pb.DelayLevels:
    return pb.DelayLevels(table=levels.table, clamp=levels.clamp)
