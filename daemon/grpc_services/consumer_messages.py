"""What is shown of the consumers of a KEY_SHARED subscription, as messages.

Owns: the correspondence between the engine's records and `tarry.v1.ListConsumersResponse`.
Does not own: the numbers (engine), page tokens (`inspect_service`), and requests of consumers (`key_shared_messages`).
"""

from __future__ import annotations

from daemon import call_values
from daemon.core.key_shared.stats import ConsumerAfterMarkDelete
from daemon.grpc_services import policy_messages, records
from tarry.v1 import inspect_pb2 as pb
from tarry.v1 import policy_pb2


def response(page: call_values.ConsumerPage, next_page_token: str) -> pb.ListConsumersResponse:
    return pb.ListConsumersResponse(
        consumers=[_consumer(each) for each in page.consumers],
        next_page_token=next_page_token,
        as_of_ms=page.as_of_ms,
        key_shared=None if page.key_shared is None else _key_shared(page.key_shared),
    )


def _consumer(summary: call_values.ConsumerSummary) -> pb.ConsumerStats:
    stats = summary.stats
    return records.as_message(
        pb.ConsumerStats,
        stats,
        instance_id=stats.number,
        consumer_id=summary.consumer_id,
        hash_ranges=[policy_pb2.HashRange(first=each.first, last=each.last) for each in stats.hash_ranges],
        last_sent_position_when_joining=_position(stats.last_sent_position_when_joining),
        draining_hashes=[records.as_message(pb.DrainingHash, each) for each in stats.draining_hashes],
    )


def _key_shared(stats: call_values.KeySharedStats) -> pb.KeySharedStats:
    return records.as_message(
        pb.KeySharedStats,
        stats,
        policy=policy_messages.key_shared_message(stats.policy),
        last_sent_position=_position(stats.last_sent_position),
        individually_sent_positions=[
            pb.PositionRange(after=_position(after), up_to=_position(up_to))
            for after, up_to in stats.individually_sent_positions
        ],
        consumers_after_mark_delete_position=[_after(each) for each in stats.consumers_after_mark_delete_position],
    )


def _after(consumer: ConsumerAfterMarkDelete) -> pb.ConsumerAfterMarkDelete:
    return records.as_message(
        pb.ConsumerAfterMarkDelete,
        consumer,
        instance_id=consumer.number,
        last_sent_position_when_joining=_position(consumer.last_sent_position_when_joining),
    )


def _position(position: tuple[int, int] | None) -> pb.Position | None:
    return None if position is None else pb.Position(ledger_id=position[0], entry_id=position[1])
