"""Decides when and where a stream is opened again, for the readers and writers of any stream.

A stream outlives its connections. `tarry.aio.session` reads, writes and waits; `tarry.add_requests` and
`tarry.receiving` know what is sent and what the answers mean.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import grpc
from google.rpc import status_pb2

from tarry import attempts, daemons, errors
from tarry.v1 import cluster_pb2

logger = logging.getLogger("tarry")

_OK: int = grpc.StatusCode.OK.value[0]

Answer = TypeVar("Answer")
Result = TypeVar("Result")
Response = TypeVar("Response")


@dataclasses.dataclass(frozen=True, slots=True)
class StreamMethod(Generic[Response]):
    """A bidirectional method of the wire, with its path and the parser of an answer. Requests are bytes."""

    path: str
    read: Callable[[bytes], Response]


VERSION: StreamMethod[cluster_pb2.GetVersionResponse] = StreamMethod(attempts.VERSION.path, attempts.VERSION.read)
"""A call with one request and one answer, read like a stream so that closing need not wait for it"""


class Sending(Protocol):
    """The requests of one connection, in order. Nothing put after its end is sent."""

    def put(self, message: bytes) -> None:
        """Send a message after all earlier ones."""

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        """Call `message` after `delay_s` and send its result, unless it is None or the stream has ended."""


class Requests(Sending, Protocol):
    """The requests of one connection, or of one lane, up to their end."""

    def close(self) -> None:
        """Send nothing more. Idempotent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settled(Generic[Answer, Result]):
    """A request with its result or its failure; exactly one of them is set."""

    request_id: int
    answer: Answer
    result: Result | None
    error: errors.TarryError | None


class Lifetime:
    """One stream across its connections."""

    def __init__(
        self, known: daemons.Daemons, policy: attempts.RetryPolicy, topic: str, name: str, *, timeout_s: float
    ) -> None:
        """Be opened at the daemon of a topic. `timeout_s` is how long callers wait for answers (seconds)."""
        self.name = name
        self.timeout_s = timeout_s
        self._known = known
        self._search = attempts.Search(known, policy, topic)
        self.features: frozenset[str] | None = None
        """Features of the daemon where a stream is being opened; None if unknown"""

    @property
    def failures(self) -> int:
        """The number of failures in a row, without progress between them."""
        return self._search.failures

    @property
    def address(self) -> str:
        """The address where the stream is opened next."""
        return self._search.address

    def must_ask(self, address: str) -> bool:
        """Return True if the features of the daemon there are unknown."""
        self.features = self._known.features(address)
        return self.features is None

    def told(self, address: str, version: cluster_pb2.GetVersionResponse) -> None:
        self.features = frozenset(version.feature)
        self._known.learn_features(address, self.features, version.message_bytes_max)

    def may_open(self, address: str, error: errors.TarryError) -> bool:
        """Return whether a stream may be opened there, after asking the daemon ended with this error.

        A daemon that refuses to report its features, as older ones do, counts as having none. One that cannot
        authenticate the caller is asked for nothing else.
        """
        refuses = errors.ends_stream(error) and not isinstance(error, errors.Unauthenticated)
        if self.features is None and refuses:
            self.features = frozenset()
            if errors.is_unknown_call(error):
                self._known.learn_features(address, self.features)
        return self.features is not None

    def progressed(self) -> None:
        self._search.restart()

    def reopens_after_s(self, address: str, error: errors.TarryError) -> float:
        """Return how long to wait after a failure at an address (seconds). Raises it if no retry fixes it."""
        if errors.ends_stream(error):
            raise error
        delay_s = self._search.failed(address, error)
        logger.info("%s is interrupted and opens again in %.3f s: %s", self.name, delay_s, error)
        return delay_s

    def closed(self) -> errors.Closed:
        return errors.Closed(f"{self.name} is closed")

    def ended_by_bug(self, bug: BaseException) -> errors.Internal:
        return errors.Internal(f"{self.name} ended by a bug of the client: {bug!r}")


def why_ended(failure: grpc.RpcError | None) -> errors.TarryError:
    """Return what ended a connection that this client has not cancelled; None means that it ended without a failure."""
    error = None if failure is None else errors.from_rpc(failure)
    if error is None or error.code is grpc.StatusCode.OK:
        return errors.Unavailable("the daemon ended the stream")
    return error


def why_lane_ended(status: status_pb2.Status) -> errors.TarryError:
    """Return what ended a lane that this client has not left."""
    return why_ended(None) if status.code == _OK else errors.from_status(status)
