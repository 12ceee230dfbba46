"""Defines the kinds of failure, by what the caller should do about them.

Each gRPC status code has exactly one class beneath the kinds; `daemon.grpc_services.status` maps them. Errors of the
object store are in `storage_backends.object_store`; the layers above turn them into these.
"""

from __future__ import annotations


class TarryError(Exception):
    """A failure that a caller may see."""


class CallerError(TarryError):
    """A wrong request, or one that is wrong now: repeating it unchanged is useless while nothing else changes."""


class InvalidArgument(CallerError):
    """A field that is missing, malformed or out of range; the message names field, value and limit."""


class NotFound(CallerError):
    """A named topic or subscription that does not exist."""


class AlreadyExists(CallerError):
    """A topic or subscription that exists with other properties."""


class Conflict(CallerError):
    """A conflict with what is open or leased now; the message says what that is."""


class Unauthenticated(CallerError):
    """A caller without a known token or certificate."""


class PermissionDenied(CallerError):
    """A known caller without permission. The message says what is missing, never what exists."""


class LimitExceeded(TarryError):
    """A well-formed request that exceeds a limit."""


class DelayTooLong(LimitExceeded):
    """A row that is due later than the limit allows."""


class QuotaExceeded(LimitExceeded):
    """A request that is too much for now.

    `retry_after_ms` is when to try again (ms). None means that waiting does not help: less must be requested, or an
    operator must make room.
    """

    def __init__(self, message: str, *, retry_after_ms: int | None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class NotOwner(TarryError):
    """A topic that another daemon serves. `owner_address` is its host:port, empty if unknown."""

    def __init__(self, message: str, *, owner_address: str = "") -> None:
        super().__init__(message)
        self.owner_address = owner_address


class Unavailable(TarryError):
    """A store that cannot be reached, or a daemon that is starting or stopping. A retry is safe.

    `retry_after_ms` is when to try again (ms); None means by the caller's own back-off. `former_owner_ms` is how long a
    former owner may still deliver rows, for which requests wait (ms); None means that this is not the reason.
    """

    def __init__(self, message: str, *, retry_after_ms: int | None = None, former_owner_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.former_owner_ms = former_owner_ms


class OutcomeUnknown(TarryError):
    """A request that may or may not be durable. A retry is safe.

    `owner_address` is the host:port of the daemon to ask next, empty if unknown.
    """

    def __init__(self, message: str, *, owner_address: str = "") -> None:
        super().__init__(message)
        self.owner_address = owner_address

    @classmethod
    def after(cls, error: Exception) -> OutcomeUnknown:
        """Return the answer to a request that had staged something, or changed anything else, when `error` came."""
        if isinstance(error, cls):
            return error
        owner_address = error.owner_address if isinstance(error, NotOwner) else ""
        return cls(
            f"the request may or may not have taken effect, whole or in part; a retry is safe: {error}",
            owner_address=owner_address,
        )


class Corruption(TarryError):
    """Damaged stored data; the message names object and offset.

    `of_topic` is whether it is data of the requested topic, which cannot be served until it is repaired. With
    `wrote_nothing` it ended a commit that had written nothing.
    """

    def __init__(self, message: str, *, of_topic: bool = False, wrote_nothing: bool = False) -> None:
        super().__init__(message)
        self.of_topic = of_topic
        self.wrote_nothing = wrote_nothing


class InvariantViolated(TarryError):
    """A bug of the daemon."""
