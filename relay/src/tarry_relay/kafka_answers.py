"""Interprets Kafka's answers: to a publish, by a table, and to every other call.

Contents: `MEANT`, the table; `meant`, `produced`, `raised`; `failure` for other calls. Codes are those of
`confluent_kafka.KafkaError`; a leading underscore marks one of the client itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import KafkaError

from tarry_relay import port
from tarry_relay.port import Cause, Meaning, Meant

_REFUSED = Meant(Meaning.REFUSED)
_NOT_NOW = Meant(Meaning.NOT_NOW)
_LIMIT = Meant(Meaning.NOT_NOW, Cause.LIMIT)
_MISSING = Meant(Meaning.NOT_NOW, Cause.MISSING)
_UNKNOWN = Meant(Meaning.UNKNOWN)

MEANT: Mapping[int, Meant] = {
    # The message is too large, or the topic takes no such message.
    KafkaError.MSG_SIZE_TOO_LARGE: _REFUSED,
    KafkaError.RECORD_LIST_TOO_LARGE: _REFUSED,
    KafkaError.INVALID_RECORD: _REFUSED,
    # No topic can have this name, or Kafka reserves it. The client gives the second for more than 512 letters.
    KafkaError.TOPIC_EXCEPTION: _REFUSED,
    KafkaError._INVALID_ARG: _REFUSED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: _LIMIT,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: _LIMIT,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: _LIMIT,
    KafkaError.THROTTLING_QUOTA_EXCEEDED: _LIMIT,
    KafkaError.UNKNOWN_TOPIC_OR_PART: _MISSING,
    KafkaError.UNKNOWN_TOPIC_ID: _MISSING,
    KafkaError._UNKNOWN_TOPIC: _MISSING,
    # Elections, starts, and brokers that learn of them later than others
    KafkaError.LEADER_NOT_AVAILABLE: _NOT_NOW,
    KafkaError.NOT_LEADER_FOR_PARTITION: _NOT_NOW,
    KafkaError.BROKER_NOT_AVAILABLE: _NOT_NOW,
    KafkaError.REPLICA_NOT_AVAILABLE: _NOT_NOW,
    KafkaError.FENCED_LEADER_EPOCH: _NOT_NOW,
    KafkaError.UNKNOWN_LEADER_EPOCH: _NOT_NOW,
    KafkaError.STALE_BROKER_EPOCH: _NOT_NOW,
    KafkaError.INCONSISTENT_TOPIC_ID: _NOT_NOW,
    KafkaError.NOT_ENOUGH_REPLICAS: _NOT_NOW,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS: _NOT_NOW,
    KafkaError.COORDINATOR_NOT_AVAILABLE: _NOT_NOW,
    KafkaError.NOT_COORDINATOR: _NOT_NOW,
    KafkaError.CONCURRENT_TRANSACTIONS: _NOT_NOW,
    KafkaError._UNKNOWN_PARTITION: _NOT_NOW,
    KafkaError._ISR_INSUFF: _NOT_NOW,
    # The bytes were damaged in transit; a broker before 2.4 also reports this for a message that a compacted topic
    # refuses.
    KafkaError.INVALID_MSG: _NOT_NOW,
    # Clocks differ, or the topic's settings refuse everything of this client. An operator can change that.
    KafkaError.INVALID_TIMESTAMP: _NOT_NOW,
    KafkaError.INVALID_REQUIRED_ACKS: _NOT_NOW,
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: _NOT_NOW,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: _NOT_NOW,
    KafkaError.UNSUPPORTED_VERSION: _NOT_NOW,
    # A rule of the cluster's operator. It may be about this message or about the target: if other messages of the
    # target are taken, it is the message, and the relay finds that out.
    KafkaError.POLICY_VIOLATION: _NOT_NOW,
    # Never sent
    KafkaError._QUEUE_FULL: _NOT_NOW,
    KafkaError._PURGE_QUEUE: _NOT_NOW,
    # Another message of its batch is bad, so the broker took nothing of the batch.
    KafkaError._INVALID_DIFFERENT_RECORD: _NOT_NOW,
    # Perhaps sent and not answered, or written by the leader alone
    KafkaError._MSG_TIMED_OUT: _UNKNOWN,
    KafkaError._TIMED_OUT: _UNKNOWN,
    KafkaError._TIMED_OUT_QUEUE: _UNKNOWN,
    KafkaError._TRANSPORT: _UNKNOWN,
    KafkaError._ALL_BROKERS_DOWN: _UNKNOWN,
    KafkaError._PURGE_INFLIGHT: _UNKNOWN,
    KafkaError.REQUEST_TIMED_OUT: _UNKNOWN,
    KafkaError.NETWORK_EXCEPTION: _UNKNOWN,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND: _UNKNOWN,
    KafkaError.KAFKA_STORAGE_ERROR: _UNKNOWN,
    # The leader has lost its state of this producer.
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER: _UNKNOWN,
    KafkaError.UNKNOWN_PRODUCER_ID: _UNKNOWN,
}
"""Code -> meaning. A missing code is unknown."""

OF_A_BATCH = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError._INVALID_DIFFERENT_RECORD,
    )
)
"""Answers to all messages of a batch, whichever is to blame; nothing of the batch was published"""
OF_A_TRANSACTION = frozenset((KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._STATE))
"""Answers to messages whose transaction failed, whichever is to blame"""
FENCED = frozenset((KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH))
"""Another producer has the transactional id by now."""
NO_RIGHT = frozenset((KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED))
REFUSED_CREDENTIALS = frozenset(
    (
        KafkaError._AUTHENTICATION,
        # An expired certificate, or one that the other end does not know
        KafkaError._SSL,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    )
)
_CLOSED = frozenset((KafkaError._DESTROY, KafkaError._FATAL))
_NO_TOPIC = frozenset(
    (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.TOPIC_EXCEPTION,
    )
)


def meant(code: int) -> Meant:
    """Return what an answer to a publish means."""
    return MEANT.get(code, _UNKNOWN)


def produced(target: str, error: KafkaError) -> port.Produced:
    """Return the result of a message that Kafka or its client has not taken."""
    return port.Produced(meant(error.code()), error.name(), f"{target}: {told(error)}")


def raised(target: str, error: Exception) -> port.Produced:
    """Return the result of a message whose publishing raised."""
    return port.Produced(_UNKNOWN, type(error).__name__, f"{target}: {type(error).__name__}: {error}")


def refused(target: str, fault: str) -> port.Produced:
    """Return the result of a message for an impossible target."""
    return port.Produced(_REFUSED, "TOPIC_EXCEPTION", f"{target}: {fault}")


def told(error: KafkaError) -> str:
    """Return an error in words: its name, and the client's text."""
    return f"{error.name()}: {error.str()}"


def failure(error: KafkaError, of: str = "") -> Exception:
    """Return the port's exception for a failed call that published nothing; `of` begins its message."""
    text = f"{of}{told(error)}"
    if error.code() in _NO_TOPIC:
        return port.NotThere(text)
    if error.code() in REFUSED_CREDENTIALS or error.code() in _CLOSED or error.fatal():
        return port.SessionOver(text)
    return port.Unreachable(text)
