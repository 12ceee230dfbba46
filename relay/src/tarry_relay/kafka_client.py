"""Wraps Kafka's client: its properties, blocking calls, admin calls, and publishing.

Clients: `ClientProperties`, `ClientErrors`, `Thread`, `Turns`, `ended_within`. Reading messages: `Record`. The cluster:
`ClusterTopics`. Publishing: `KafkaOutput`. Meanings of answers: `kafka_answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias, TypeVar

import confluent_kafka as kafka
from confluent_kafka import KafkaError, KafkaException, admin

from tarry_relay import kafka_answers, kafka_judgement, port, relay_settings

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Properties: TypeAlias = dict[str, Any]
Event: TypeAlias = Any
"""A message of Kafka's client, or an error of a partition; by its types every part may be None"""

CLOSE_S = 3.0
"""Time for the end of a session (seconds); the process has five after `drain_s`"""
_admin: Any = admin
"""Any, because its types do not export all that it has"""
_raised_bare: Any = KafkaError
"""Class as which the client raises some fatal errors, although it is no BaseException"""
_ID_LETTERS = str.maketrans("/+", "_-")
"""From the letters of the client to those of Kafka's own tools"""
_OWN = "tarry-"
"""Prefix of the names of Tarry's own headers"""
_MISSING_MAX = 10_000
"""Messages for missing topics after which the producer is replaced, because it keeps 3 KB for each such topic"""
_MESSAGE_BYTES = 500
"""Memory of a message besides its key, value and headers (bytes)"""
_SHARED: Properties = {
    "client.id": "tarry-relay",
    "log_level": 2,  # Each call reports its failure.
    "reconnect.backoff.max.ms": 1_000,
    "topic.metadata.refresh.interval.ms": 30_000,
}
_CONSUMER: Properties = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # A partition without a position is reported, and the relay begins it.
    "auto.offset.reset": "error",
    "fetch.queue.backoff.ms": 10,
    # A message larger than all this arrives alone, and must not close the connection.
    "receive.message.max.bytes": 2_147_483_647,
}
_READ_AHEAD_BYTES_MIN = 2 * 2**20
"""Twice what a fetch asks for at least: the client's limit of a message, a million bytes"""
_READER: Properties = {
    **_CONSUMER,
    "group.protocol": "classic",
    # Partitions that stay with a relay in a rebalance are not read again.
    "partition.assignment.strategy": "cooperative-sticky",
    "isolation.level": "read_committed",
}
_FETCHER: Properties = {
    **_CONSUMER,
    "enable.partition.eof": True,
    # A request that waits at the end of one partition blocks those of the others.
    "fetch.wait.max.ms": 10,
    "queued.min.messages": 1_000,
    # A fetched message was committed when it was read.
    "isolation.level": "read_uncommitted",
}
_PRODUCER: Properties = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 0,
    # Kafka's own producer chooses the partition of a key this way.
    "partitioner": "murmur2_random",
    # The limits of the topics apply.
    "message.max.bytes": kafka_judgement.MESSAGE_BYTES_MAX,
}
_CHANGEABLE = {
    "client.id",
    "fetch.max.bytes",
    "fetch.queue.backoff.ms",
    "fetch.wait.max.ms",
    "linger.ms",
    "log_level",
    "partitioner",
    "queued.max.messages.kbytes",
    "queued.min.messages",
    "receive.message.max.bytes",
    "reconnect.backoff.max.ms",
    "topic.metadata.refresh.interval.ms",
}


class ClientErrors:
    """The errors that Kafka reports to the clients of a session outside any call."""

    def __init__(self) -> None:
        self._refusal = ""

    def heard(self, error: KafkaError) -> None:
        """Record an error. Every client of the session calls this, each in its own thread."""
        if error.code() in kafka_answers.REFUSED_CREDENTIALS:
            self._refusal = kafka_answers.told(error)

    @property
    def refusal(self) -> str:
        """The reason why a broker refuses the credentials; empty if none does."""
        return self._refusal

    def check(self) -> None:
        """Raise SessionOver if a broker refuses the credentials: a new session reads them again."""
        if self._refusal:
            raise port.SessionOver(f"Kafka refuses the relay: {self._refusal}")


class ClientProperties:
    """The properties of the clients of one session."""

    def __init__(
        self,
        broker: relay_settings.Kafka,
        subscription: str,
        identity: str,
        read_ahead_bytes: int = 16 * 2**20,
    ) -> None:
        """Read the password.

        `identity` is that of the relay; a consumer reads ahead `read_ahead_bytes`. Raises SettingsError.
        """
        # The client fetches as long as it has queued less than its limit, so a whole fetch comes on top.
        half_bytes = max(_READ_AHEAD_BYTES_MIN, read_ahead_bytes) // 2
        self._queues: Properties = {
            "queued.max.messages.kbytes": half_bytes // 1_024,
            "fetch.max.bytes": half_bytes,
        }
        self.errors = ClientErrors()
        self.identity = identity
        self._broker = broker
        self._subscription = subscription
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
        """Return the properties of every client."""
        return {**_SHARED, "error_cb": self.errors.heard, **self._reached_with, **self._more}

    def reader(self, topic: str, generation: str) -> Properties:
        """Return the properties of a member of the group that reads a topic of this generation."""
        session_ms = int(self._broker.session_s * 1_000)
        own = {
            "group.id": self.reader_group(topic, generation),
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": max(1, session_ms // 4),
            "max.poll.interval.ms": max(300_000, session_ms),
        }
        return {**_READER, **self._queues, **own, **self.shared()}

    def fetcher(self, topic: str) -> Properties:
        """Return the properties of a consumer that is assigned its partitions and joins no group."""
        return {**_FETCHER, **self._queues, "group.id": self.group_of(topic), **self.shared()}

    def producer(self, topic: str) -> Properties:
        """Return the properties of the producer of a relay that reads a topic."""
        confirm_ms = int(self._broker.confirm_s * 1_000)
        own: Properties = {
            "message.timeout.ms": confirm_ms,
            # Time for which a topic may be unknown, because it was just created or does not exist
            "topic.metadata.propagation.max.ms": int(self._broker.timeout_s * 1_000),
        }
        if self._broker.transactional:
            own |= {
                "transactional.id": f"{self.group_of(topic)}-{self.identity}",
                "transaction.timeout.ms": confirm_ms,
            }
        return {**_PRODUCER, **own, **self.shared()}

    def group_of(self, topic: str) -> str:
        """Return the beginning of the name of the group of relays that read a topic."""
        return f"{self._subscription}-{topic}"

    def reader_group(self, topic: str, generation: str) -> str:
        """Return the name of the group of relays that read a topic of this generation."""
        return f"{self.group_of(topic)}@{generation}"

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
    """A daemon thread that makes the blocking calls of one client, one after the other.

    It is no executor: the interpreter would wait at its end for a call that a silent broker blocks.
    """

    def __init__(self, name: str, errors: ClientErrors) -> None:
        self._errors = errors
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kafka-{name}", daemon=True)
        self._has_ended = False
        self._thread.start()

    async def call(self, blocking: Callable[..., Answer], *arguments: object) -> Answer:
        """Make a call and return its answer.

        Raises what the call raises, but NotThere, Unreachable or SessionOver for KafkaException; SessionOver also once
        Kafka has refused the credentials.
        """
        self._errors.check()
        if self._has_ended:
            raise port.SessionOver("the session with Kafka is closed")
        future: Future[Answer] = Future()
        self._calls.put((future, functools.partial(blocking, *arguments)))
        try:
            return await asyncio.wrap_future(future)
        except KafkaException as error:
            # A call that timed out does not report why.
            self._errors.check()
            raise kafka_answers.failure(error.args[0]) from error

    def end(self) -> None:
        """Make no further calls after those that have begun."""
        self._has_ended = True
        self._calls.put(None)

    def join(self) -> None:
        """Block until the last call has returned."""
        self._thread.join()

    def _run(self) -> None:
        while (task := self._calls.get()) is not None:
            future, blocking = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with kafka_errors():
                    answer = blocking()
            except BaseException as error:  # noqa: BLE001 - it is raised to the caller
                future.set_exception(error)
            else:
                future.set_result(answer)
            # A client dropped meanwhile must end here, not while waiting for the next call.
            del task, future, blocking


class Turns:
    """The turns at a consumer that one thread polls and others call.

    The client admits one call at a time, and a call that has to wait tries again each millisecond: without turns, it
    finds the consumer polled again for many seconds.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._ended = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Make the calls of the block before the next poll."""
        with self._changed:
            self._begun += 1
        try:
            yield
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def give(self, limit_s: float) -> None:
        """Block until as many calls have ended as have begun by now, at most this long (seconds)."""
        with self._changed:
            begun = self._begun
            self._changed.wait_for(lambda: self._ended >= begun, limit_s)


@contextlib.contextmanager
def kafka_errors() -> Iterator[None]:
    """Raise every error of Kafka's client as KafkaException, in whichever form the client raises it."""
    try:
        yield
    except _raised_bare as error:
        raise KafkaException(error) from None
    except SystemError as error:
        # The client calls back with an error already raised, which Python takes for an error of the callback.
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from error
        if isinstance(error.__cause__, KafkaError):
            raise KafkaException(error.__cause__) from error
        raise


async def ended_within(closing: Mapping[str, Callable[[], object]], limit_s: float = CLOSE_S) -> None:
    """End clients, by name and all at once; leave behind those that take longer than the limit (seconds).

    Each ends in its own daemon thread, which keeps what it needs.
    """
    ended: dict[str, Future[None]] = {name: Future() for name in closing}
    for name, blocking in closing.items():
        # It can no longer be cancelled, only left behind.
        ended[name].set_running_or_notify_cancel()
        threading.Thread(target=_end, args=(blocking, ended[name]), name=f"kafka-end-{name}", daemon=True).start()
    if not ended:
        return
    waiting = {asyncio.wrap_future(future): name for name, future in ended.items()}
    _, left = await asyncio.wait(waiting, timeout=limit_s)
    for each in left:
        each.cancel()
        log.warning("a client of Kafka is left behind", extra={"client": waiting[each], "waited_s": limit_s})


def _end(blocking: Callable[[], object], ended: Future[None]) -> None:
    try:
        with kafka_errors():
            blocking()
    except (KafkaException, RuntimeError) as error:
        log.warning("a client of Kafka did not end cleanly", extra={"error": str(error)})
    finally:
        ended.set_result(None)


class Body(NamedTuple):
    """The parts of a message that are published again."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] | None
    """None if the client cannot read them"""

    @property
    def size(self) -> int:
        """The size of key, value and headers (bytes)."""
        headers = sum(len(name) + len(value or b"") for name, value in self.headers or ())
        return len(self.key or b"") + len(self.value or b"") + headers


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A message that was read, unpacked once: the client cannot be asked for its headers a second time."""

    body: Body
    sent_at_ms: int
    """Unix time (ms) from its producer or the broker; -1 if there is none"""
    leader_epoch: int | None

    @classmethod
    def of(cls, event: Event) -> Record:
        """Unpack a message of the client."""
        _, sent_at_ms = event.timestamp()
        return cls(Body(event.key(), event.value(), _headers(event)), sent_at_ms, event.leader_epoch())

    @property
    def memory_bytes(self) -> int:
        """The approximate memory of the message (bytes)."""
        return _MESSAGE_BYTES + self.body.size

    def message(self) -> port.Message:
        """Return it in the port's form: of equal headers the last is read, and all are published again."""
        told: dict[str, str] = {}
        seen: set[str] = set()
        repeated: list[str] = []
        for name, value in self.body.headers or ():
            key = kafka_judgement.header_key(name)
            if key in seen:
                repeated.append(key)
            seen.add(key)
            if value is not None:
                told[key] = value.decode(errors="replace")
        return port.Message(told, self.body, tuple(dict.fromkeys(repeated)), self.sent_at_ms, self.memory_bytes)


def _headers(event: Event) -> Sequence[tuple[str, bytes | None]] | None:
    """Return the headers, or None if the name of one is no UTF-8.

    The client then returns a list with an empty place and also raises. Called through `partial`, Python notices the
    exception; called directly, it may not, and touching the list crashes. A second such name is decoded while the first
    one's exception is set, which raises more SystemErrors, each caused by the one before.
    """
    try:
        return tuple(functools.partial(event.headers)() or ())
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if isinstance(cause, UnicodeDecodeError):
            return None
        raise


class Untold(port.Unreachable):
    """An answer that the broker withholds for lack of permission."""


class ClusterTopics:
    """The topics of a cluster, as it describes them."""

    def __init__(self, client: admin.AdminClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._seen: dict[str, tuple[str, float]] = {}
        """Topic -> its last id, and when it was requested"""

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic. Raises NotThere, Unreachable."""
        return len((await self._described(topic)).partitions)

    async def generation(self, topic: str) -> str:
        """Return the id of a topic, which no other topic of that name has. Raises NotThere, Unreachable."""
        asked_at_s = time.monotonic()
        found = str((await self._described(topic)).topic_id).translate(_ID_LETTERS)
        self._seen[topic] = found, asked_at_s
        return found

    async def confirm(self, topic: str, generation: str, read_until_s: float) -> None:
        """Make sure that messages read until then, by `time.monotonic`, are of this generation of the topic.

        An id never returns, so the cluster is asked unless it was since then. Raises NotThere, Unreachable.
        """
        now, asked_at_s = self._seen.get(topic, ("", 0.0))
        if now != generation or asked_at_s < read_until_s:
            now = await self.generation(topic)
        port.must_be_same(f"topic {topic}", generation, now)

    async def first_offsets(self, topic: str, partitions: Iterable[int]) -> Mapping[int, int]:
        """Return the first offset that each partition still has; leave out partitions that do not exist.

        Raises NotThere, Unreachable.
        """
        there = range(await self.partitions(topic))
        wanted = {
            kafka.TopicPartition(topic, each): _admin.OffsetSpec.earliest() for each in partitions if each in there
        }
        asked = self._client.list_offsets(wanted, request_timeout=self._timeout_s) if wanted else {}
        return {partition.partition: int((await _asked(topic, answer)).offset) for partition, answer in asked.items()}

    async def settings(self, topic: str) -> Mapping[str, str]:
        """Return the settings of a topic by name. Raises NotThere, Unreachable; Untold for lack of permission."""
        self._prepare(topic)
        resource = _admin.ConfigResource(_admin.ConfigResource.Type.TOPIC, topic)
        (asked,) = self._client.describe_configs([resource], request_timeout=self._timeout_s).values()
        return {name: each.value or "" for name, each in (await _asked(topic, asked)).items()}

    async def committed_metadata(self, topic: str, generation: str) -> Mapping[str, Collection[str]]:
        """Return the metadata that groups of relays have committed for a topic of this generation, by group.

        Groups that the broker hides are left out. Raises Unreachable.
        """
        self._prepare(topic)
        told = await _asked(topic, self._client.list_consumer_groups(request_timeout=self._timeout_s))
        groups = [each.group_id for each in told.valid if each.group_id.endswith(f"-{topic}@{generation}")]
        found: dict[str, Collection[str]] = {}
        for group in groups:
            asked = [kafka.ConsumerGroupTopicPartitions(group)]
            (answer,) = self._client.list_consumer_group_offsets(asked, request_timeout=self._timeout_s).values()
            partitions = (await _asked(topic, answer)).topic_partitions
            found[group] = {each.metadata or "" for each in partitions if each.topic == topic}
        return found

    async def _described(self, topic: str) -> Any:
        self._prepare(topic)
        asked = self._client.describe_topics(kafka.TopicCollection([topic]), request_timeout=self._timeout_s)
        return await _asked(topic, asked[topic])

    def _prepare(self, topic: str) -> None:
        """Refuse names that the client would cut at a NUL, or on which it would hang. Raises NotThere."""
        if fault := kafka_judgement.topic_fault(topic):
            raise port.NotThere(f"topic {topic[:250]!r} cannot exist: {fault}")
        # Errors that are not polled pile up in the client.
        self._client.poll(0)


async def _asked(topic: str, answer: Any) -> Any:
    try:
        return await asyncio.wrap_future(answer)
    except KafkaException as error:
        text = f"topic {topic}: "
        if error.args[0].code() in kafka_answers.NO_RIGHT:
            raise Untold(f"{text}{kafka_answers.told(error.args[0])}") from error
        raise kafka_answers.failure(error.args[0], text) from error


class KafkaOutput:
    """The topics of a cluster. Repeats are published again; with transactions a call publishes all or nothing."""

    def __init__(self, source: str, properties: ClientProperties, broker: relay_settings.Kafka) -> None:
        self._properties = properties.producer(source)
        self._identity = properties.identity
        self._is_transactional = broker.transactional
        # A message fails on its own before that.
        self._timeout_s = broker.confirm_s + broker.timeout_s
        self._producer: kafka.Producer | None = None
        self._missing = 0
        """Messages of this producer for topics that do not exist"""
        self._thread = Thread("publish", properties.errors)

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[port.Produced]:
        """Publish messages and return the result of each; taken ones are at all in-sync replicas.

        Raises Unreachable if all may be repeated; SessionOver if another relay has the same id.
        """
        return await self._thread.call(self._produce, messages)

    async def close(self) -> None:
        """End, or leave the client behind."""
        await ended_within({"publish": self.end})

    def end(self) -> None:
        """Block until the last call has returned, and drop the client."""
        self._thread.end()
        self._thread.join()
        self._producer = None

    # In the thread

    def _produce(self, messages: Sequence[port.Outgoing]) -> list[port.Produced]:
        answers: dict[int, port.Produced] = {}
        for row, each in enumerate(messages):
            if fault := kafka_judgement.target_fault(each.target):
                answers[row] = kafka_answers.refused(each.target, fault)
        rounds = deque([[row for row in range(len(messages)) if row not in answers]])
        while rounds:
            if not (rows := rounds.popleft()):
                continue
            try:
                came = self._round([messages[row] for row in rows])
            except KafkaException as failed:
                error = failed.args[0]
                is_known = kafka_answers.meant(error.code()).meaning is not port.Meaning.UNKNOWN
                if not is_known and not any(each.is_taken for each in answers.values()):
                    raise
                # A message taken in this call must not be published again.
                came = _Round([error] * len(rows))
            rounds += _settle(messages, rows, came, answers)
        self._missing += sum(each.meant.cause is port.Cause.MISSING for each in answers.values())
        if self._missing > _MISSING_MAX:
            self._missing, self._producer = 0, None
        return [answers[row] for row in range(len(messages))]

    def _round(self, messages: Sequence[port.Outgoing]) -> _Round:
        """Publish once, in one transaction if there are any. Raises KafkaException, SessionOver."""
        try:
            with kafka_errors():
                producer = self._ready()
                if self._is_transactional:
                    return self._in_transaction(producer, messages)
                came = self._send(producer, messages)
                if came.broken is not None:
                    self._producer = None
                return came
        except KafkaException as failed:
            # The next producer begins by ending what this one may have left open.
            self._producer = None
            if self._is_transactional and failed.args[0].code() in kafka_answers.FENCED:
                raise port.SessionOver(
                    f"another relay publishes with relay.id {self._identity!r}, or this one was suspended for longer "
                    "than broker.confirm_s; each relay needs an id of its own"
                ) from failed
            raise
        except BaseException:
            self._producer = None
            raise

    def _in_transaction(self, producer: kafka.Producer, messages: Sequence[port.Outgoing]) -> _Round:
        """Commit all of the messages or abort all. Raises KafkaException if it is unknown which."""
        producer.begin_transaction()
        came = self._send(producer, messages)
        if came.broken is not None and _ends_producer(came.broken):
            raise KafkaException(came.broken)
        errors = came.errors
        is_whole_at_fault = all(
            isinstance(each, KafkaError) and each.code() in kafka_answers.OF_A_TRANSACTION
            for each in errors
            if each is not None
        )
        whole: KafkaError | None = None
        if is_whole_at_fault:
            try:
                producer.commit_transaction(self._timeout_s)
            except KafkaException as failed:
                whole = failed.args[0]
                if whole.fatal() or not whole.txn_requires_abort():
                    raise
            else:
                return _Round(errors)
        self._abort(producer)
        return _Round(errors, whole, is_aborted=True)

    def _abort(self, producer: kafka.Producer) -> None:
        """End the transaction with nothing published, at the latest by the next producer of this id."""
        # This producer would continue with message numbers that the broker has not seen, and be refused.
        self._producer = None
        try:
            producer.abort_transaction(self._timeout_s)
        except KafkaException as failed:
            # If the first partition could not be added, the broker has no such transaction and refuses to end it.
            if failed.args[0].code() in kafka_answers.FENCED:
                raise

    def _ready(self) -> kafka.Producer:
        if self._producer is None:
            producer = kafka.Producer(self._properties)
            if self._is_transactional:
                producer.init_transactions(self._timeout_s)
            self._producer = producer
        return self._producer

    def _send(self, producer: kafka.Producer, messages: Sequence[port.Outgoing]) -> _Round:
        """Return the failure of each message, and that of the producer."""
        untold = KafkaError(KafkaError._TIMED_OUT)
        errors: list[KafkaError | Exception | None] = [untold] * len(messages)
        broken: KafkaError | None = None

        def told(row: int, error: KafkaError | None, message: Event) -> None:
            errors[row] = error

        for row, each in enumerate(messages):
            try:
                with kafka_errors():
                    self._enqueue(producer, each, functools.partial(told, row))
            except KafkaException as error:
                errors[row] = error.args[0]
            except BufferError:
                errors[row] = KafkaError(KafkaError._QUEUE_FULL)
            except Exception as error:  # noqa: BLE001 - it is reported with the message
                errors[row] = error
        # An error of the producer itself is raised between the reports of messages, and after the last one.
        calls: deque[Callable[[], object]] = deque([lambda: producer.flush(self._timeout_s), lambda: producer.poll(0)])
        while calls:
            try:
                with kafka_errors():
                    calls[0]()
                calls.popleft()
            except KafkaException as error:
                if broken is not None:
                    calls.popleft()
                broken = broken or error.args[0]
        for row, came in enumerate(errors):
            if came is untold:
                # It must not be published later, because it is repeated.
                broken = broken or untold
                errors[row] = broken
            elif isinstance(came, KafkaError) and _ends_producer(came):
                broken = broken or came
                errors[row] = broken
            elif isinstance(came, KafkaError) and broken is not None and came.code() == KafkaError._PURGE_QUEUE:
                errors[row] = broken
        return _Round(errors, broken=broken)

    def _enqueue(self, producer: kafka.Producer, outgoing: port.Outgoing, told: Callable[..., None]) -> None:
        published = _published(outgoing)
        try:
            producer.produce(outgoing.target, **published, on_delivery=told)
        except BufferError:
            producer.flush(self._timeout_s)
            producer.produce(outgoing.target, **published, on_delivery=told)


@dataclasses.dataclass(frozen=True, slots=True)
class _Round:
    """The result of publishing some messages once."""

    errors: Sequence[KafkaError | Exception | None]
    """Message -> its failure, or None"""
    whole: KafkaError | None = None
    """Failure of the transaction, if no single message is known to be at fault"""
    broken: KafkaError | None = None
    """Failure of the producer, which cannot be used again"""
    is_aborted: bool = False
    """True if nothing of it was published"""


def _settle(
    messages: Sequence[port.Outgoing], rows: Sequence[int], came: _Round, answers: dict[int, port.Produced]
) -> Iterable[list[int]]:
    """Answer what can be answered of a round; return the rows to publish again, in rounds."""
    undone: list[int] = []
    alone: list[list[int]] = []
    for row, error in zip(rows, came.errors, strict=True):
        target = messages[row].target
        if isinstance(error, Exception):
            answers[row] = kafka_answers.raised(target, error)
        elif error is None and not came.is_aborted:
            answers[row] = port.Produced()
        elif error is None or (came.is_aborted and error.code() in kafka_answers.OF_A_TRANSACTION):
            undone.append(row)
        elif error.code() in kafka_answers.OF_A_BATCH and len(rows) > 1:
            # Alone, each shows whether it is to blame.
            alone.append([row])
        else:
            answers[row] = kafka_answers.produced(target, error)
    if len(undone) < len(rows):
        return [undone, *alone]
    by_target: dict[str, list[int]] = {}
    for row in undone:
        by_target.setdefault(messages[row].target, []).append(row)
    if len(by_target) > 1:
        # One target that takes nothing fails the transaction for all.
        return by_target.values()
    for row in undone:
        answers[row] = kafka_answers.produced(messages[row].target, came.whole or KafkaError(KafkaError._PURGE_QUEUE))
    return []


def _ends_producer(error: KafkaError) -> bool:
    return error.fatal() or error.code() == KafkaError._FATAL or error.code() in kafka_answers.FENCED


def _published(outgoing: port.Outgoing) -> dict[str, Any]:
    """Return the arguments of the producer. Raises UnicodeEncodeError for a name that would crash the client."""
    for name in outgoing.own_headers:
        name.encode()
    own = [(name, text.encode(errors="replace")) for name, text in outgoing.own_headers.items()]
    if outgoing.message is None:
        return {"value": None, "headers": own}
    key, value, headers = outgoing.message.body
    replaced = {kafka_judgement.header_key(name) for name in outgoing.own_headers}
    kept = [
        header
        for header in headers or ()
        if (name := kafka_judgement.header_key(header[0])) not in replaced and not name.startswith(_OWN)
    ]
    return {"key": key, "value": value, "headers": [*kept, *own]}
