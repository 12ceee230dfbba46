"""Kafka's client, as the adapter uses it: its properties, its blocking calls, what its failures mean, and what a
cluster says of its topics.

Owns: these. Does not own: what is read, fetched and published (`tarry_relay.kafka_broker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import confluent_kafka as kafka
from confluent_kafka import KafkaError, KafkaException, admin

from tarry_relay import port, relay_settings

Answer = TypeVar("Answer")
Properties: TypeAlias = dict[str, Any]
Event: TypeAlias = Any
"""A message of Kafka's client, or an error of a partition; by its types everything of it may be None."""

_admin: Any = admin
"""It does not export all that it has by its types."""
NO_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID, KafkaError._UNKNOWN_TOPIC)
_ID_LETTERS = str.maketrans("/+", "_-")
"""From those of the client to those of Kafka's own tools."""
_SHARED: Properties = {
    "client.id": "tarry-relay",
    "log_level": 2,  # Each call tells what it has failed with.
    "reconnect.backoff.max.ms": 1_000,
    "topic.metadata.refresh.interval.ms": 30_000,
}
_CONSUMER: Properties = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Where there is no position it is looked for, and told.
    "auto.offset.reset": "error",
    "fetch.queue.backoff.ms": 10,
}
_READER: Properties = {
    **_CONSUMER,
    "group.protocol": "classic",
    # What stays with a relay in a rebalance is not read again.
    "partition.assignment.strategy": "cooperative-sticky",
    "isolation.level": "read_committed",
}
_FETCHER: Properties = {
    **_CONSUMER,
    "enable.partition.eof": True,
    # A request that waits at the end of one partition keeps those of the others waiting.
    "fetch.wait.max.ms": 10,
    "queued.min.messages": 1_000,
    # What is asked for was committed when it was read.
    "isolation.level": "read_uncommitted",
}
_PRODUCER: Properties = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 0,
    # As Kafka's own producer chooses the partition of a key.
    "partitioner": "murmur2_random",
    # The limits of the topics count.
    "message.max.bytes": 500_000_000,
}
_CHANGEABLE = {
    "client.id",
    "fetch.queue.backoff.ms",
    "fetch.wait.max.ms",
    "linger.ms",
    "log_level",
    "partitioner",
    "queued.min.messages",
    "reconnect.backoff.max.ms",
    "topic.metadata.refresh.interval.ms",
}


class ClientProperties:
    """What clients of one cluster are made with."""

    def __init__(self, broker: relay_settings.Kafka, subscription: str, identity: str) -> None:
        """`identity`: of the relay. Raises SettingsError."""
        self._broker = broker
        self._subscription = subscription
        self._identity = identity
        self._reached_with = self._reach()
        self._more: Mapping[str, Any] = {}
        fixed = {*self.reader("", ""), *self.fetcher(""), *self.producer("")} - _CHANGEABLE
        self._more = broker.properties
        for name in self._more:
            if name in fixed:
                raise relay_settings.SettingsError(
                    f"broker.properties: {name!r} is set by the relay itself; take it out, or use the field of [broker]"
                )

    def shared(self) -> Properties:
        """The properties of every client."""
        return {**_SHARED, "error_cb": unsaid, **self._reached_with, **self._more}

    def reader(self, topic: str, generation: str) -> Properties:
        """The properties of a member of the group that reads a topic of this generation on."""
        session_ms = int(self._broker.session_s * 1_000)
        own = {
            "group.id": f"{self.group_of(topic)}@{generation}",
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": max(1, session_ms // 4),
            "max.poll.interval.ms": max(300_000, session_ms),
        }
        return {**_READER, **own, **self.shared()}

    def fetcher(self, topic: str) -> Properties:
        """The properties of a consumer that reads what it is assigned, and joins no group."""
        return {**_FETCHER, "group.id": self.group_of(topic), **self.shared()}

    def producer(self, topic: str) -> Properties:
        """The properties of the producer of a relay that reads a topic."""
        confirm_ms = int(self._broker.confirm_s * 1_000)
        own: Properties = {
            "message.timeout.ms": confirm_ms,
            # So long a topic may be unknown: one that was made a moment ago, or is not there.
            "topic.metadata.propagation.max.ms": int(self._broker.timeout_s * 1_000),
        }
        if self._broker.transactional:
            own |= {
                "transactional.id": f"{self.group_of(topic)}-{self._identity}",
                "transaction.timeout.ms": confirm_ms,
            }
        return {**_PRODUCER, **own, **self.shared()}

    def group_of(self, topic: str) -> str:
        """The name of the group of relays that read a topic."""
        return f"{self._subscription}-{topic}"

    def _reach(self) -> Properties:
        broker = self._broker
        files = {
            "ssl.ca.location": broker.ca_file,
            "ssl.certificate.location": broker.cert_file,
            "ssl.key.location": broker.key_file,
        }
        has_tls = broker.tls or any(files.values())
        reached: Properties = {
            "bootstrap.servers": broker.url,
            "security.protocol": ("sasl_" if broker.user else "") + ("ssl" if has_tls else "plaintext"),
            **{name: file for name, file in files.items() if file is not None},
        }
        if broker.user is not None:
            password = relay_settings.secret("broker.password_file", broker.password_file) or ""
            reached |= {"sasl.mechanism": broker.sasl, "sasl.username": broker.user, "sasl.password": password}
        return reached


class Thread:
    """A thread in which blocking calls of one client are made, one after the other."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, f"kafka-{name}")

    async def call(self, blocking: Callable[..., Answer], *arguments: object) -> Answer:
        """What the call returns. Raises NotThere or Unreachable for what Kafka's client raises, and what it raises."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, blocking, *arguments)
        except KafkaException as error:
            raise failure(error.args[0]) from error

    async def end(self, last: Callable[[], object] = lambda: None) -> None:
        """Waits for the call that is under way, and makes a last one."""
        with contextlib.suppress(KafkaException):
            await asyncio.get_running_loop().run_in_executor(self._executor, last)
        self._executor.shutdown(wait=False)


class ClusterTopics:
    """What the cluster says of its topics."""

    def __init__(self, client: admin.AdminClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._seen: dict[str, tuple[str, float]] = {}
        """The last id of each topic, and when it was asked for."""

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises NotThere, Unreachable."""
        return len((await self._described(topic)).partitions)

    async def generation(self, topic: str) -> str:
        """The id of a topic, which another one of its name does not have. Raises NotThere, Unreachable."""
        asked_at_s = time.monotonic()
        found = str((await self._described(topic)).topic_id).translate(_ID_LETTERS)
        self._seen[topic] = found, asked_at_s
        return found

    async def confirm(self, topic: str, generation: str, read_until_s: float) -> None:
        """Makes sure that what was read of a topic until then, by `time.monotonic`, is of this generation: an id does
        not come back. The cluster is asked unless it was since then. Raises NotThere, Unreachable.
        """
        now, asked_at_s = self._seen.get(topic, ("", 0.0))
        if now != generation or asked_at_s < read_until_s:
            now = await self.generation(topic)
        port.must_be_same(f"topic {topic}", generation, now)

    async def first_offsets(self, topic: str, partitions: Iterable[int]) -> Mapping[int, int]:
        """The first offset that each partition still has; none of one that is not there. Raises NotThere,
        Unreachable.
        """
        there = range(await self.partitions(topic))
        wanted = {
            kafka.TopicPartition(topic, each): _admin.OffsetSpec.earliest() for each in partitions if each in there
        }
        asked = self._client.list_offsets(wanted, request_timeout=self._timeout_s) if wanted else {}
        return {partition.partition: int((await _asked(topic, answer)).offset) for partition, answer in asked.items()}

    async def settings(self, topic: str) -> Mapping[str, str]:
        """The settings of a topic, by name. Raises NotThere, Unreachable."""
        resource = _admin.ConfigResource(_admin.ConfigResource.Type.TOPIC, topic)
        (asked,) = self._client.describe_configs([resource], request_timeout=self._timeout_s).values()
        return {name: each.value or "" for name, each in (await _asked(topic, asked)).items()}

    async def _described(self, topic: str) -> Any:
        asked = self._client.describe_topics(kafka.TopicCollection([topic]), request_timeout=self._timeout_s)
        return await _asked(topic, asked[topic])


def unsaid(error: KafkaError) -> None:
    """Each call tells what it has failed with."""


def failure(error: KafkaError, of: str = "") -> Exception:
    """What the port calls a failure of Kafka's client. `of`: what its message begins with."""
    text = f"{of}{error.name()}: {error.str()}"
    return port.NotThere(text) if error.code() in NO_TOPIC else port.Unreachable(text)


async def _asked(topic: str, answer: Any) -> Any:
    try:
        return await asyncio.wrap_future(answer)
    except KafkaException as error:
        raise failure(error.args[0], f"topic {topic}: ") from error
