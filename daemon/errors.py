"""The kinds of failure, chosen by what the caller should do about them.

Owns: the error classes. Each gRPC status code has exactly one class beneath the kinds.
Does not own: the mapping to status codes (`daemon.grpc_services.status`) and the errors of the object store
(`storage_backends.object_store`), which the layers above turn into these.
"""


class TarryError(Exception):
    """Every failure that a caller may see."""


class CallerError(TarryError):
    """The request is wrong, or wrong now; repeating it unchanged is of no use while things are as they are."""


class InvalidArgument(CallerError):
    """A field is missing, malformed or out of its range; the message names field, value and limit."""


class NotFound(CallerError):
    """The named topic or subscription does not exist."""


class AlreadyExists(CallerError):
    """The topic or subscription exists with other properties."""


class Conflict(CallerError):
    """The request conflicts with what is open or leased now. The message says what that is."""


class Unauthenticated(CallerError):
    """Nobody knows who calls: no token, none that is known, or a certificate that is nobody's."""


class PermissionDenied(CallerError):
    """The caller is known, and may not do this. The message says what is missing, never what there is."""


class LimitExceeded(TarryError):
    """The request is well formed, and more than is allowed."""


class DelayTooLong(LimitExceeded):
    """A row is due later than the limit allows."""


class QuotaExceeded(LimitExceeded):
    """Too much for now; try again.

    `retry_after_ms`: when to try again, None when waiting does not help: less must be asked for.
    """

    def __init__(self, message: str, *, retry_after_ms: int | None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class NotOwner(TarryError):
    """Another daemon serves the topic.

    `owner_address`: its host:port, empty when it is not known.
    """

    def __init__(self, message: str, *, owner_address: str = "") -> None:
        super().__init__(message)
        self.owner_address = owner_address


class Unavailable(TarryError):
    """The store cannot be reached, or the daemon is starting or stopping; a retry is safe.

    `retry_after_ms`: when to try again, None when there is no better guess than the caller's own back-off.
    `former_owner_ms`: for so long a former owner may hand out rows, and what is asked waits; None: it is not that.
    """

    def __init__(self, message: str, *, retry_after_ms: int | None = None, former_owner_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.former_owner_ms = former_owner_ms


class OutcomeUnknown(TarryError):
    """The request may or may not be durable; a retry is safe."""


class Corruption(TarryError):
    """Stored data is damaged; the message names the object and the offset.

    `of_topic`: it is data of the topic that was asked for, which cannot be served before it is mended.
    """

    def __init__(self, message: str, *, of_topic: bool = False) -> None:
        super().__init__(message)
        self.of_topic = of_topic


class InvariantViolated(TarryError):
    """A bug of the daemon."""
