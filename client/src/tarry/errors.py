"""The failures that a caller of the client sees: one class for each gRPC status code that the daemon answers with.

Owns: the classes, how a status becomes one of them, and which of them a retry may cure.
Does not own: when and where to retry (`tarry.attempts`, `tarry.attempts`, `tarry.streams`).
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
FORMER_OWNER_KEY = "former-owner-ms"


class TarryError(Exception):
    """Every failure of this library.

    `code`: the gRPC status code. `message`: what the daemon said.
    `attempts`: how often the request was sent. `may_have_landed`: an earlier attempt may have been carried out.
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
    """The request is wrong; the message names the field, the value and the limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class OutOfRange(TarryError):
    """A delay is over the limit."""

    code = grpc.StatusCode.OUT_OF_RANGE


class NotFound(TarryError):
    """The topic or the subscription does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(TarryError):
    """The topic or subscription exists with other properties."""

    code = grpc.StatusCode.ALREADY_EXISTS


class ResourceExhausted(TarryError):
    """Too much.

    `retry_after_ms`: when the daemon wants it tried again; None when waiting does not help.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class NotOwner(TarryError):
    """Another daemon serves the topic.

    `owner_address`: its host:port, empty when it is not known.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, *, owner_address: str = "") -> None:
        super().__init__(message)
        self.owner_address = owner_address


class Aborted(TarryError):
    """A conflict; nothing happened."""

    code = grpc.StatusCode.ABORTED


class PlanLost(Aborted):
    """The stream that messages were planned on has ended (`KeySharedSubscription.plan`)."""


class Unavailable(TarryError):
    """The daemon cannot be reached, or cannot reach its store, or is starting or stopping.

    `retry_after_ms`: when the daemon wants it tried again; None when it does not say. `former_owner_ms`: for so long a
    daemon that owned the topic before may still hand out rows, and what was asked waits; None when it is not that.
    """

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, *, retry_after_ms: int | None = None, former_owner_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.former_owner_ms = former_owner_ms


class OutcomeUnknown(TarryError):
    """The request may or may not be durable; repeating it is safe."""

    code = grpc.StatusCode.UNKNOWN


class DataLoss(TarryError):
    """Stored data is damaged; the message names what is lost.

    `of_topic`: it is the topic that was asked for, which is not served before it is mended.
    """

    code = grpc.StatusCode.DATA_LOSS

    def __init__(self, message: str, *, of_topic: bool = False) -> None:
        super().__init__(message)
        self.of_topic = of_topic


class Internal(TarryError):
    """A bug of the daemon or of this library."""

    code = grpc.StatusCode.INTERNAL


class Unsupported(TarryError):
    """The daemon does not know something that the request asks for; nothing was sent. The message names it."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(TarryError):
    """The daemon wants to know who asks, and was shown no token or certificate that it knows.

    `is_outdated`: the client's files have others by now than were shown, so that it is worth another attempt.
    """

    code = grpc.StatusCode.UNAUTHENTICATED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.is_outdated = False


class PermissionDenied(TarryError):
    """The daemon knows who asks, and that one may not do it; the message says which scope is missing."""

    code = grpc.StatusCode.PERMISSION_DENIED


class DeadlineExceeded(TarryError, TimeoutError):
    """The caller's time ran out. Whether the request is durable is not known; repeating it is safe.

    `last`: the failure of the last attempt, None when there was no answer at all.
    """

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, message: str, *, last: TarryError | None = None) -> None:
        super().__init__(message if last is None else f"{message}; the last failure was {last}")
        self.last = last


class Closed(TarryError):
    """The client, the stream or the subscription was closed by its user."""

    code = grpc.StatusCode.CANCELLED


_BY_CODE: Mapping[grpc.StatusCode, type[TarryError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        OutOfRange,
        NotFound,
        AlreadyExists,
        Aborted,
        OutcomeUnknown,
        DataLoss,
        Internal,
        Unauthenticated,
        PermissionDenied,
        DeadlineExceeded,
    )
}
_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def is_retryable(error: TarryError) -> bool:
    """Whether the same request may succeed later. Every request of this library is idempotent."""
    if isinstance(error, ResourceExhausted):
        return error.retry_after_ms is not None
    if isinstance(error, Unauthenticated):
        return error.is_outdated
    return isinstance(error, (Unavailable, Aborted, OutcomeUnknown, NotOwner))


def is_unknown_call(error: TarryError) -> bool:
    """Whether the daemon does not know the call: it is of before it."""
    return error.code is grpc.StatusCode.UNIMPLEMENTED


def ends_stream(error: TarryError) -> bool:
    """Whether a stream of a topic is not opened again after the failure. What is damaged ends only the streams that
    were told that it is their topic.
    """
    return not (is_retryable(error) or (isinstance(error, DataLoss) and not error.of_topic))


def from_rpc(error: grpc.RpcError) -> TarryError:
    """The failure of a call."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return Internal(f"gRPC failed without a status: {error!r}")
    hints = {
        str(key): value if isinstance(value, str) else value.decode("utf-8", errors="replace")
        for key, value in error.trailing_metadata() or ()
    }
    return _from_code(error.code() or grpc.StatusCode.UNKNOWN, error.details() or "no message", hints)


def from_status(status: status_pb2.Status) -> TarryError:
    """The failure of one request of a stream, answered in band. Its hints are the ErrorInfo's, with underscores."""
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
            return Unavailable(message, retry_after_ms=_milliseconds(hints), former_owner_ms=former_owner_ms)
        case grpc.StatusCode.DATA_LOSS:
            return DataLoss(message, of_topic=hints.get(DAMAGED_KEY) == "topic")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return NotOwner(message, owner_address=hints.get(OWNER_ADDRESS_KEY, ""))
    kind = _BY_CODE.get(code)
    return TarryError(message, code=code) if kind is None else kind(message)


def _milliseconds(hints: Mapping[str, str], key: str = RETRY_AFTER_KEY) -> int | None:
    text = hints.get(key, "")
    return int(text) if text.isascii() and text.isdigit() else None
