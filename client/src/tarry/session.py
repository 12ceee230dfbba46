"""A bidirectional stream that outlives its connections.

Owns: the thread that opens the stream, reads it, and after a failure that a retry may cure opens it again, at the owner
that the failure names; closing.
Does not own: what is sent and what the answers mean: that is the handler's (`tarry.add_stream`, `tarry.subscription`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc

from tarry import calls, connections, errors, outbox

logger = logging.getLogger("tarry")

Response = TypeVar("Response")
ResponseIn = TypeVar("ResponseIn", contravariant=True)

Method: TypeAlias = Callable[[grpc.Channel], "grpc.StreamStreamMultiCallable[bytes, Response]"]


class Handler(Protocol[ResponseIn]):
    """Called by the session's thread, one call at a time."""

    def wait_until_wanted(self) -> bool:
        """Returns True when a stream is needed, False when the session is closed."""

    def opened(self, sending: outbox.Outbox) -> None:
        """A stream has begun, what is put into its outbox is sent on it."""

    def received(self, response: ResponseIn) -> bool:
        """True when the answer shows progress. A TarryError that it raises ends the stream."""

    def interrupted(self, error: errors.TarryError) -> None:
        """The stream is gone, another will be opened."""

    def failed(self, error: errors.TarryError) -> None:
        """The session is over; called once, last."""


class Session(Generic[Response]):
    """Runs from `start` until `close` or a failure that no retry cures."""

    def __init__(
        self,
        shared: connections.Connections,
        known: calls.Calls,
        topic: str,
        method: Method[Response],
        handler: Handler[Response],
        *,
        name: str,
    ) -> None:
        self._shared = shared
        self._owners = known.owners
        self._policy = known.policy
        self._topic = topic
        self._method = method
        self._handler = handler
        self._name = name
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Failures in a row, without progress between them.
        self.failures = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the stream and waits for the thread, unless it is the thread itself that closes; idempotent."""
        self._closed.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        ending: errors.TarryError = errors.Closed(f"{self._name} is closed")
        try:
            while self._handler.wait_until_wanted():
                error = self._read_one_stream()
                if self._closed.is_set():
                    break
                if not errors.is_retryable(error):
                    ending = error
                    break
                self.failures += 1
                delay_s = self._policy.delay_s(error, self.failures)
                logger.info("%s is interrupted and opens again in %.3f s: %s", self._name, delay_s, error)
                self._owners.learn(self._topic, error)
                self._handler.interrupted(error)
                self._closed.wait(delay_s)
        except errors.TarryError as error:
            ending = error
        except BaseException as bug:
            ending = errors.Internal(f"{self._name} ended by a bug of the client: {bug!r}")
            raise
        finally:
            self._handler.failed(ending)

    def _read_one_stream(self) -> errors.TarryError:
        """Opens a stream and reads it to its end; the reason of the end."""
        sending = outbox.Outbox()
        call = None
        try:
            with self._lock:
                if self._closed.is_set():
                    return errors.Closed(f"{self._name} is closed")
                call = self._method(self._shared.channel(self._owners.address(self._topic)))(sending)
                self._call = call
            self._handler.opened(sending)
            for response in call:
                if self._handler.received(response):
                    self.failures = 0
            return errors.Unavailable("the daemon ended the stream")
        except grpc.RpcError as failure:
            error = errors.from_rpc(failure)
            # Nobody here cancelled: the daemon or its server dropped the stream.
            return errors.Unavailable(error.message) if error.code is grpc.StatusCode.CANCELLED else error
        except errors.TarryError as error:
            return error
        except ValueError as bug:
            # gRPC's word for a channel that another thread closed.
            try:
                self._shared.check_open()
            except errors.Closed as error:
                return error
            raise bug
        finally:
            sending.close()
            if call is not None:
                call.cancel()
