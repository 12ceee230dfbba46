"""The failures that a caller of the client sees, one class for each gRPC status code of the daemon.

Also turns a status into its class, and knows which failures a retry may fix. Every other module may import this one, so
it imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
import grpc.aio
from google.protobuf import message as protobuf_message
from google.rpc import error_details_pb2, status_pb2

OWNER_ADDRESS_KEY = "owner-address"
RETRY_AFTER_KEY = "retry-after-ms"
DAMAGED_KEY = "damaged"
OTHER_PROTOCOL = "the port answers, but not in gRPC, like the port of the daemon's metrics (by default 7462)"
"""The reason for which a daemon is unavailable if another service answers"""
FORMER_OWNER_KEY = "former-owner-ms"
# gRPC's reasons for a call that had no connection, so that nothing was sent
_NOT_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed")


class TarryError(Exception):
    """Any failure of this library.

    `code` is the gRPC status code and `message` the daemon's text. `attempts` is how often the request was sent.
    `may_have_landed` is True if an attempt without a certain answer may have been carried out.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.attempts = 0
        self.may_have_landed = False
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidArgument(TarryError, ValueError):
    """An invalid request; the message names the field, the value and the limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class OutOfRange(TarryError):
    """A delay over the limit."""

    code = grpc.StatusCode.OUT_OF_RANGE


class NotFound(TarryError):
    """A topic or subscription that does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(TarryError):
    """A topic or subscription that exists with other properties."""

    code = grpc.StatusCode.ALREADY_EXISTS


class ResourceExhausted(TarryError):
    """A limit of the daemon that was reached.

    `retry_after_ms` is the daemon's time for a retry, or None if waiting does not help.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class NotOwner(TarryError):
    """A topic that another daemon serves. `owner_address` is its host:port, empty if unknown."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, *, owner_address: str = "") -> None:
        super().__init__(message)
        self.owner_address = owner_address


class Aborted(TarryError):
    """A conflict; nothing happened."""

    code = grpc.StatusCode.ABORTED


class PlanLost(Aborted):
    """The end of the stream on which messages were planned (`KeySharedSubscription.plan`)."""


class Unavailable(TarryError):
    """A daemon that cannot be reached, cannot reach its store, or is starting or stopping.

    `retry_after_ms` is the daemon's time for a retry, or None if it names none. `former_owner_ms` is how long a former
    owner of the topic may still deliver rows while the request waits, or None for other causes.
    """

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, *, retry_after_ms: int | None = None, former_owner_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.former_owner_ms = former_owner_ms


class OutcomeUnknown(TarryError):
    """A request that may or may not be durable; repeating it is safe.

    `owner_address` is the host:port of the daemon to ask next, empty if unknown.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, owner_address: str = "") -> None:
        super().__init__(message)
        self.owner_address = owner_address


class DataLoss(TarryError):
    """Damaged stored data; the message names what is lost.

    `of_topic` is True if it is the requested topic, which is not served until it is repaired.
    """

    code = grpc.StatusCode.DATA_LOSS

    def __init__(self, message: str, *, of_topic: bool = False) -> None:
        super().__init__(message)
        self.of_topic = of_topic


class Internal(TarryError):
    """A bug of the daemon or of this library."""

    code = grpc.StatusCode.INTERNAL


class Unsupported(TarryError):
    """A feature, named in the message, that the daemon does not support; nothing was sent."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(TarryError):
    """A missing token or certificate that the daemon requires, or one that it does not know.

    `is_outdated` is True if the client's files have changed since, so that another attempt is worthwhile.
    """

    code = grpc.StatusCode.UNAUTHENTICATED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.is_outdated = False


class PermissionDenied(TarryError):
    """A known caller without permission; the message names the missing scope."""

    code = grpc.StatusCode.PERMISSION_DENIED


class DeadlineExceeded(TarryError, TimeoutError):
    """The end of the caller's timeout; the request may or may not be durable, and repeating it is safe.

    `last` is the failure of the last attempt, or None if there was no answer.
    """

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, message: str, *, last: TarryError | None = None) -> None:
        super().__init__(message if last is None else f"{message}; the last failure was {last}")
        self.last = last


class Closed(TarryError):
    """A client, stream or subscription that its user closed."""

    code = grpc.StatusCode.CANCELLED


_BY_CODE: Mapping[grpc.StatusCode, type[TarryError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        OutOfRange,
        NotFound,
        AlreadyExists,
        Aborted,
        DataLoss,
        Internal,
        Unauthenticated,
        PermissionDenied,
        DeadlineExceeded,
    )
}
# gRPC's words for a peer that answers in another protocol, such as HTTP/1
_NO_HTTP2 = "Failed parsing HTTP/2"
_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def is_retryable(error: TarryError) -> bool:
    """Return True if the same request may succeed later. Every request of this library is idempotent."""
    if isinstance(error, ResourceExhausted):
        return error.retry_after_ms is not None
    if isinstance(error, Unauthenticated):
        return error.is_outdated
    return isinstance(error, (Unavailable, Aborted, OutcomeUnknown, NotOwner))


def is_unknown_call(error: TarryError) -> bool:
    """Return True if the daemon is too old to know the call."""
    return error.code is grpc.StatusCode.UNIMPLEMENTED


def may_have_landed(error: TarryError) -> bool:
    """Return True if a request that failed like this, with a failure worth a retry, may have been carried out."""
    if isinstance(error, Unavailable):
        return not error.message.startswith(_NOT_CONNECTED)
    return isinstance(error, OutcomeUnknown)


def ends_stream(error: TarryError) -> bool:
    """Return True if a stream of a topic is not opened again after the failure.

    Damage ends only streams whose own topic is reported as damaged.
    """
    return not (is_retryable(error) or (isinstance(error, DataLoss) and not error.of_topic))


def from_rpc(error: grpc.RpcError) -> TarryError:
    """Return the failure of a call."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return Internal(f"gRPC failed without a status: {error!r}")
    hints = {
        str(key): value if isinstance(value, str) else value.decode("utf-8", errors="replace")
        for key, value in error.trailing_metadata() or ()
    }
    return _from_code(error.code() or grpc.StatusCode.UNKNOWN, error.details() or "no message", hints)


def from_status(status: status_pb2.Status) -> TarryError:
    """Return the failure of one request of a stream, answered in band.

    Its hints are the ErrorInfo's, with underscores.
    """
    hints: dict[str, str] = {}
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        try:
            if detail.Unpack(info):
                hints.update((key.replace("_", "-"), value) for key, value in info.metadata.items())
        except protobuf_message.DecodeError as damaged:
            return Internal(f"the details of a status cannot be read ({damaged}): {status.message}")
    code = _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    return _from_code(code, status.message or "no message", hints)


def _from_code(code: grpc.StatusCode, message: str, hints: Mapping[str, str]) -> TarryError:
    match code:
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(message, retry_after_ms=_milliseconds(hints))
        case grpc.StatusCode.UNAVAILABLE:
            former_owner_ms = _milliseconds(hints, FORMER_OWNER_KEY)
            if _NO_HTTP2 in message:
                message = f"{OTHER_PROTOCOL}; name the daemon's gRPC port, by default 7461 (gRPC says: {message})"
            return Unavailable(message, retry_after_ms=_milliseconds(hints), former_owner_ms=former_owner_ms)
        case grpc.StatusCode.CANCELLED:
            # The daemon or its server dropped the call. What the caller cancels does not get here.
            return Unavailable(message)
        case grpc.StatusCode.DATA_LOSS:
            return DataLoss(message, of_topic=hints.get(DAMAGED_KEY) == "topic")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return NotOwner(message, owner_address=hints.get(OWNER_ADDRESS_KEY, ""))
        case grpc.StatusCode.UNKNOWN:
            return OutcomeUnknown(message, owner_address=hints.get(OWNER_ADDRESS_KEY, ""))
    kind = _BY_CODE.get(code)
    return TarryError(message, code=code) if kind is None else kind(message)


def _milliseconds(hints: Mapping[str, str], key: str = RETRY_AFTER_KEY) -> int | None:
    text = hints.get(key, "")
    return int(text) if text.isascii() and text.isdigit() else None
