"""Messages that no relay may fall over, through kills of relay, daemon and broker: each arrives or is a dead letter."""

from __future__ import annotations

import time

from tests.relay._support import hostile_messages
from tests.relay._support.raw_messages import Fields, Raw, fields_of
from tests.relay.brokers._support import raw_brokers
from tests.relay.brokers._support.two_brokers import SOURCE, AnyBroker

_CHANGED_BY_NATS = b"Nats-Trace-Dest"


def read_back(broker: str, raw: Raw) -> Fields:
    """Return the headers that a client finds."""
    fields = fields_of(raw)
    if broker == "kafka":
        if b"\xff\xfetag" in dict(fields):
            return ((raw_brokers.UNREADABLE, None),)
        fields = tuple((name.partition(b"\0")[0], value) for name, value in fields)
    return tuple(each for each in fields if each[0] != _CHANGED_BY_NATS)


async def test_a_broker_stores_every_hostile_message_as_it_was_published(broker: AnyBroker) -> None:
    messages = hostile_messages.generate(
        broker.kind, 0, 400, now_ms=time.time_ns() // 1_000_000, span_ms=1_000, share=0.8
    )
    async with raw_brokers.opened(broker) as raw:
        positions = await raw.publish(SOURCE, [each.raw for each in messages])
        stored = await raw.read(SOURCE)
    assert len(set(positions)) == len(stored) == len(messages)
    found = {(tuple(each for each in one.fields if each[0] != _CHANGED_BY_NATS), one.body) for one in stored}
    wrong = [each for each in messages if (read_back(broker.kind, each.raw), each.raw.body) not in found]
    assert [(each.kind, str(each.raw)[:200]) for each in wrong] == []
