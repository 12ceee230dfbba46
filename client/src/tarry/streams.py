"""What a stream that outlives its connections decides, whoever reads and writes it.

Owns: when and where it is opened again, what ended it, and what its requests are settled with.
Does not own: reading, writing and waiting (`tarry.aio.session`); what is sent and what the answers mean
(`tarry.add_requests`, `tarry.receiving`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import grpc
from google.rpc import status_pb2

from tarry import attempts, errors
from tarry.v1 import cluster_pb2

logger = logging.getLogger("tarry")

_OK: int = grpc.StatusCode.OK.value[0]

Answer = TypeVar("Answer")
Result = TypeVar("Result")
Response = TypeVar("Response")


@dataclasses.dataclass(frozen=True, slots=True)
class StreamMethod(Generic[Response]):
    """A bidirectional method of the wire: its path, and how an answer is read. Requests are bytes."""

    path: str
    read: Callable[[bytes], Response]


VERSION: StreamMethod[cluster_pb2.GetVersionResponse] = StreamMethod(attempts.VERSION.path, attempts.VERSION.read)
"""A call of one request and one answer, read as a stream is: so who closes need not wait for it."""


class Sending(Protocol):
    """The requests of one connection, in order. Nothing that is put after its end is sent."""

    def put(self, message: bytes) -> None:
        """Sends after what was put before."""

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        """Sends when the delay has passed, unless the stream ends before; what, is asked then. None: nothing."""


class Requests(Sending, Protocol):
    """The requests of one connection, or of a lane of one, to their end."""

    def close(self) -> None:
        """Nothing more is put; idempotent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settled(Generic[Answer, Result]):
    """A request that has its result or its failure: one of them is not None."""

    request_id: int
    answer: Answer
    result: Result | None
    error: errors.TarryError | None


class Lifetime:
    """One stream through its connections."""

    def __init__(self, owners: attempts.Owners, policy: attempts.RetryPolicy, topic: str, name: str) -> None:
        self.name = name
        self._owners = owners
        self._policy = policy
        self._topic = topic
        self._failures = 0
        self.features: frozenset[str] | None = None
        """What the daemon can do at which a stream is being opened; None: that is not known."""

    @property
    def failures(self) -> int:
        """Failures in a row, without progress between them."""
        return self._failures

    @property
    def address(self) -> str:
        """Where to open it."""
        return self._owners.address(self._topic)

    def must_ask(self, address: str) -> bool:
        """Whether it is not known what the daemon there can do."""
        self.features = self._owners.features(address)
        return self.features is None

    def told(self, address: str, version: cluster_pb2.GetVersionResponse) -> None:
        self.features = frozenset(version.feature)
        self._owners.learn_features(address, self.features)

    def may_open(self, address: str, error: errors.TarryError) -> bool:
        """Whether a stream may be opened there after the daemon was asked. `error`: with which the asking ended. A
        daemon that refuses to say what it can do, as those of before, can do nothing of it; one that does not know who
        asks is asked for nothing else.
        """
        refuses = errors.ends_stream(error) and not isinstance(error, errors.Unauthenticated)
        if self.features is None and refuses:
            self.features = frozenset()
            if errors.is_unknown_call(error):
                self._owners.learn_features(address, self.features)
        return self.features is not None

    def progressed(self) -> None:
        self._failures = 0

    def reopens_after_s(self, error: errors.TarryError) -> float:
        """How long to wait after a failure. Raises the failure when no retry cures it."""
        if errors.ends_stream(error):
            raise error
        self._failures += 1
        delay_s = self._policy.delay_s(error, self._failures)
        logger.info("%s is interrupted and opens again in %.3f s: %s", self.name, delay_s, error)
        self._owners.learn(self._topic, error)
        return delay_s

    def closed(self) -> errors.Closed:
        return errors.Closed(f"{self.name} is closed")

    def ended_by_bug(self, bug: BaseException) -> errors.Internal:
        return errors.Internal(f"{self.name} ended by a bug of the client: {bug!r}")


def why_ended(failure: grpc.RpcError | None) -> errors.TarryError:
    """What ended a connection that nobody here has cancelled; None: it ended without a failure."""
    error = None if failure is None else errors.from_rpc(failure)
    if error is None or error.code is grpc.StatusCode.OK:
        return errors.Unavailable("the daemon ended the stream")
    return _dropped(error)


def why_lane_ended(status: status_pb2.Status) -> errors.TarryError:
    """What ended a lane that nobody here has left."""
    return why_ended(None) if status.code == _OK else _dropped(errors.from_status(status))


def _dropped(error: errors.TarryError) -> errors.TarryError:
    # The daemon or its server dropped it.
    return errors.Unavailable(error.message) if error.code is grpc.StatusCode.CANCELLED else error
