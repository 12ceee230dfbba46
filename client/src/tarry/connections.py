"""Which daemon to ask for a topic, and asking it until the caller's time is over.

Owns: the channels, the owner of each topic as far as it is known, and unary calls with their retries.
Does not own: streams (`tarry.session`), requests and results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import grpc

from tarry import errors, retry

Request = TypeVar("Request")
Response = TypeVar("Response")

CHANNEL_OPTIONS = (
    # The daemon bounds what it sends by rows; a bound here would only turn an answer into an error.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC's own back-off grows to two minutes: far longer than a daemon needs to come back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A host that is gone sends nothing: only a ping tells an idle stream.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Two clients in one process are to fail and recover apart.
    ("grpc.use_local_subchannel_pool", 1),
)


class Connections:
    """Thread-safe. `target` is any gRPC target; owners are host:port."""

    def __init__(self, target: str, policy: retry.RetryPolicy) -> None:
        self.target = target
        self.policy = policy
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._owners: dict[str, str] = {}
        self._closed = threading.Event()

    def check_open(self) -> None:
        """Raises Closed."""
        if self._closed.is_set():
            raise errors.Closed("the client is closed")

    def channel(self, topic: str | None = None) -> grpc.Channel:
        """The channel to the topic's owner if it is known, else to the target. Raises Closed."""
        with self._lock:
            self.check_open()
            address = self.target if topic is None else self._owners.get(topic, self.target)
            channel = self._channels.get(address)
            if channel is None:
                channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                self._channels[address] = channel
            return channel

    def learn(self, topic: str | None, error: errors.TarryError) -> None:
        """Takes from a failure whom to ask next: the owner that it names, otherwise the target again."""
        if topic is None:
            return
        with self._lock:
            if isinstance(error, errors.NotOwner) and error.owner_address:
                self._owners[topic] = error.owner_address
            else:
                self._owners.pop(topic, None)

    def call(
        self,
        method: Callable[[grpc.Channel], grpc.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        *,
        topic: str | None,
        deadline: retry.Deadline,
    ) -> Response:
        """Sends an idempotent request until it is answered.

        Raises the failure that a retry does not cure, DeadlineExceeded, Closed.
        """
        last: errors.TarryError | None = None
        may_have_landed = False
        attempt = 0
        while remaining_s := deadline.remaining_s():
            attempt += 1
            try:
                return method(self.channel(topic))(request, timeout=remaining_s)
            except grpc.RpcError as failure:
                error = errors.from_rpc(failure)
            except ValueError:
                # gRPC's word for a channel that another thread closed.
                self.check_open()
                raise
            self.check_open()
            error.attempts = attempt
            error.may_have_landed = may_have_landed
            if isinstance(error, errors.DeadlineExceeded):
                break
            if not errors.is_retryable(error):
                raise error
            last = error
            may_have_landed = may_have_landed or isinstance(error, (errors.Unavailable, errors.OutcomeUnknown))
            self.learn(topic, error)
            delay_s = self.policy.delay_s(error, attempt)
            if delay_s >= deadline.remaining_s():
                break
            self._closed.wait(delay_s)
        raise deadline.exceeded(last, attempts=attempt)

    def close(self) -> None:
        """Ends every call; idempotent."""
        with self._lock:
            self._closed.set()
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()
