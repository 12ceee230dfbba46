"""Channels, and performing the steps of plans in the caller's thread.

Owns: the channels of one client, and waiting.
Does not own: whom a call asks and how often (`tarry.attempts`), streams (`tarry.session`), requests and results.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from tarry import attempts, errors

T = TypeVar("T")

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


CLIENT_ID_KEY = "tarry-client-id"
CLIENT_ID_MAX_BYTES = 128
# A call that has to wait for a former owner is answered at once with how long, and waited for here.
TOLD_OF_FORMER_OWNER = ("tarry-told-of-former-owner", "1")


def unsaid(why: str) -> None:
    """Nobody wants to know what is waited for."""


def metadata_of(client_id: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries. Raises InvalidArgument."""
    if client_id is None:
        return (TOLD_OF_FORMER_OWNER,)
    if not 1 <= len(client_id) <= CLIENT_ID_MAX_BYTES or not re.fullmatch("[!-~]+", client_id):
        raise errors.InvalidArgument(
            f"client_id is {client_id!r}; it must be 1 to {CLIENT_ID_MAX_BYTES} printable ASCII characters, no blanks"
        )
    return (TOLD_OF_FORMER_OWNER, (CLIENT_ID_KEY, client_id))


class Connections:
    """Thread-safe."""

    def __init__(self, *, client_id: str | None = None, waiting: Callable[[str], None] = unsaid) -> None:
        """`waiting` is told what is waited for where that is worth saying. Raises InvalidArgument."""
        self.metadata = metadata_of(client_id)
        self._waiting = waiting
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._closed = threading.Event()

    def check_open(self) -> None:
        """Raises Closed."""
        if self._closed.is_set():
            raise errors.Closed("the client is closed")

    def channel(self, address: str) -> grpc.Channel:
        """The channel to a gRPC target. Raises Closed."""
        with self._lock:
            self.check_open()
            channel = self._channels.get(address)
            if channel is None:
                channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                self._channels[address] = channel
            return channel

    def run(self, plan: attempts.Plan[T]) -> T:
        """Performs a plan's steps; its result. Raises what the plan raises."""
        try:
            step = next(plan)
            while True:
                if isinstance(step, attempts.Wait):
                    if step.why:
                        self._waiting(step.why)
                    self._closed.wait(step.delay_s)
                    step = plan.send(None)
                    continue
                try:
                    response = self._send(step)
                except errors.TarryError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(response)
        except StopIteration as finished:
            result: T = finished.value
            return result

    def receive(self, step: attempts.Send, result_of: Callable[[Any], T]) -> Iterator[T]:
        """Sends a request that has many answers, once; each of them as a result. Raises TarryError."""
        try:
            method: grpc.UnaryStreamMultiCallable[bytes, Any] = self.channel(step.address).unary_stream(
                step.method.path, request_serializer=None, response_deserializer=step.method.read
            )
            for response in method(step.request, timeout=step.timeout_s, metadata=self.metadata):
                yield result_of(response)
        except grpc.RpcError as failure:
            self.check_open()
            raise errors.from_rpc(failure) from None

    def close(self) -> None:
        """Ends every call; idempotent."""
        with self._lock:
            self._closed.set()
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _send(self, step: attempts.Send) -> Any:
        try:
            method: grpc.UnaryUnaryMultiCallable[bytes, Any] = self.channel(step.address).unary_unary(
                step.method.path, request_serializer=None, response_deserializer=step.method.read
            )
            return method(step.request, timeout=step.timeout_s, metadata=self.metadata)
        except grpc.RpcError as failure:
            self.check_open()
            raise errors.from_rpc(failure) from None
        except ValueError:
            # gRPC's word for a channel that another thread closed.
            self.check_open()
            raise
