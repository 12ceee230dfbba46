"""Publishing to Kafka: messages one by one, or what is published at once in a transaction.

Owns: what is confirmed, what is refused, and what of a transaction that failed is published again.
Does not own: the producer's properties (`tarry_relay.kafka_client`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import confluent_kafka as kafka
from confluent_kafka import KafkaError, KafkaException

from tarry_relay import port, relay_settings
from tarry_relay.kafka_client import ClientProperties, Event, Thread

_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
_NEVER_TAKEN = (*_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.TOPIC_EXCEPTION)
_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)


class KafkaOutput:
    """Topics. Of what comes twice nothing is dropped; with transactions a call publishes all, or nothing."""

    def __init__(self, source: str, properties: ClientProperties, broker: relay_settings.Kafka) -> None:
        self._properties = properties.producer(source)
        self._is_transactional = broker.transactional
        # A message fails by itself before that.
        self._timeout_s = broker.confirm_s + broker.timeout_s
        self._producer: kafka.Producer | None = None
        self._thread = Thread("publish")

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[port.Produced]:
        """Publishes messages; what is confirmed is at all replicas that are in sync. Raises SettingsError: another
        relay has the same id.
        """
        return await self._thread.call(self._produce, messages)

    async def close(self) -> None:
        """Waits for what is under way."""
        await self._thread.end()
        self._producer = None

    def _produce(self, messages: Sequence[port.Outgoing]) -> list[port.Produced]:
        answers: dict[int, port.Produced] = {}
        rounds = deque([list(range(len(messages)))])
        while rounds:
            rows = rounds.popleft()
            try:
                errors = self._round([messages[row] for row in rows])
            except KafkaException as failed:
                if not answers:
                    raise
                # What others of this call have come to is not to be done again.
                errors = [failed.args[0]] * len(rows)
            is_undone = self._is_transactional and any(error is not None for error in errors)
            undone = []
            for row, error in zip(rows, errors, strict=True):
                if error is None and is_undone:
                    undone.append(row)
                elif error is None:
                    answers[row] = port.Produced()
                elif error.code() in _TOO_LARGE and len(rows) > 1:
                    # With others in one batch it was: which of them is, shows when each is by itself.
                    rounds.append([row])
                else:
                    answers[row] = _refusal(messages[row].target, error)
            if undone:
                rounds.append(undone)
        return [answers[row] for row in range(len(messages))]

    def _round(self, messages: Sequence[port.Outgoing]) -> list[KafkaError | None]:
        """What each has failed with; with transactions nothing is there if one has. Raises Unreachable."""
        try:
            producer = self._ready()
            if self._is_transactional:
                producer.begin_transaction()
            errors = self._send(producer, messages)
            for error in errors:
                if error is not None and (error.fatal() or error.code() in _FENCED):
                    raise KafkaException(error)
            if self._is_transactional and any(error is not None for error in errors):
                producer.abort_transaction(self._timeout_s)
            elif self._is_transactional:
                producer.commit_transaction(self._timeout_s)
        except KafkaException as failure:
            # Another one, which begins by ending what this one may have left open.
            self._producer = None
            if failure.args[0].code() in _FENCED:
                raise relay_settings.SettingsError(
                    "relay.id: another relay publishes with it, and transactions need one for each"
                ) from failure
            raise
        return errors

    def _ready(self) -> kafka.Producer:
        if self._producer is None:
            producer = kafka.Producer(self._properties)
            if self._is_transactional:
                producer.init_transactions(self._timeout_s)
            self._producer = producer
        return self._producer

    def _send(self, producer: kafka.Producer, messages: Sequence[port.Outgoing]) -> list[KafkaError | None]:
        errors: list[KafkaError | None] = [KafkaError(KafkaError._TIMED_OUT)] * len(messages)

        def told(row: int, error: KafkaError | None, message: Event) -> None:
            errors[row] = error

        for row, each in enumerate(messages):
            try:
                producer.produce(each.target, **_published(each), on_delivery=functools.partial(told, row))
            except KafkaException as error:
                errors[row] = error.args[0]
            except BufferError:
                errors[row] = KafkaError(KafkaError._QUEUE_FULL)
        try:
            producer.flush(self._timeout_s)
        except SystemError as error:
            # The client tells what came of a message with a fatal error raised already, which Python takes for its own.
            raise error.__cause__ or error from error
        return errors


def _published(outgoing: port.Outgoing) -> dict[str, Any]:
    own = [(name, text.encode()) for name, text in outgoing.own_headers.items()]
    if outgoing.message is None or not outgoing.has_body:
        return {"value": None, "headers": own}
    key, value, headers = outgoing.message.body
    kept = [header for header in headers if header[0] not in outgoing.own_headers]
    return {"key": key, "value": value, "headers": [*kept, *own]}


def _refusal(target: str, error: KafkaError) -> port.Produced:
    text = f"{target}: {error.name()}: {error.str()}"
    return port.Produced(refused=text) if error.code() in _NEVER_TAKEN else port.Produced(failed=text)
