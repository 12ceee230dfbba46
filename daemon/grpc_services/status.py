"""Maps errors to gRPC statuses; no other module does.

It has the table of codes, `google.rpc.Status` with its `ErrorInfo`, and the trailing metadata (`retry-after-ms`,
`former-owner-ms`, `owner-address`, `grpc-status-details-bin`). A refusal looks the same in band and at the end of a
call.
"""

from __future__ import annotations

import logging
import re
from typing import NoReturn, Protocol

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from daemon import errors

log = logging.getLogger(__name__)

DOMAIN = "tarry.v1"

CODES: dict[type[BaseException], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.DelayTooLong: grpc.StatusCode.OUT_OF_RANGE,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotOwner: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.OutcomeUnknown: grpc.StatusCode.UNKNOWN,
    errors.Corruption: grpc.StatusCode.DATA_LOSS,
    errors.InvariantViolated: grpc.StatusCode.INTERNAL,
}


OK = status_pb2.Status()


class Abortable(Protocol):
    """A call that can be ended with a status."""

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...], /
    ) -> NoReturn: ...


# The headers of a call are limited to 8 KiB, and contain the text twice: plain and in the details.
_TEXT_LENGTH_MAX = 1000


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of an error; INTERNAL if it is not a `TarryError`."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    return grpc.StatusCode.INTERNAL


def refusal(error: BaseException) -> status_pb2.Status:
    """Return the error as it appears in an answer of a stream. Logs the daemon's own faults."""
    code = code_of(error)
    text = str(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("request failed by a bug of the daemon", exc_info=error)
        if not isinstance(error, errors.TarryError):
            text = f"unexpected {type(error).__name__}; the daemon's log has more"
    if len(text) > _TEXT_LENGTH_MAX:
        text = f"{text[:_TEXT_LENGTH_MAX]}..."
    info = error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN, metadata=_hints(error))
    detail = any_pb2.Any()
    detail.Pack(info)
    number: int = code.value[0]
    return status_pb2.Status(code=number, message=text, details=[detail])


async def abort(context: Abortable, error: BaseException) -> NoReturn:
    """End the call with the error."""
    status = refusal(error)
    hints = tuple((name.replace("_", "-"), value) for name, value in _hints(error).items())
    await context.abort(
        code_of(error), status.message, (*hints, ("grpc-status-details-bin", status.SerializeToString()))
    )


def _hints(error: BaseException) -> dict[str, str]:
    """Return hints for the caller: `ErrorInfo.metadata` and, with hyphens, trailing metadata."""
    retry_after_ms: int | None = getattr(error, "retry_after_ms", None)
    owner_address: str = getattr(error, "owner_address", "")
    of_topic: bool = getattr(error, "of_topic", False)
    damaged = {"damaged": "topic"} if of_topic else {}
    hints = damaged if retry_after_ms is None else damaged | {"retry_after_ms": str(retry_after_ms)}
    if isinstance(error, errors.Unavailable) and error.former_owner_ms is not None:
        hints["former_owner_ms"] = str(error.former_owner_ms)
    return hints | ({"owner_address": owner_address} if owner_address else {})


def _reason(error: BaseException) -> str:
    """Return the class name in capitals, such as `DELAY_TOO_LONG`; `INTERNAL` if it is not a `TarryError`."""
    if not isinstance(error, errors.TarryError):
        return "INTERNAL"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()
