"""Reading and writing a bidirectional stream in a thread, through its connections.

Owns: the thread; opening, reading and closing.
Does not own: when and where it is opened again (`tarry.streams`); what is sent and what the answers mean: that is the
handler's (`tarry.add_stream`, `tarry.subscription`).
"""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

import grpc

from tarry import connections, errors, outbox, streams

Response = TypeVar("Response")
ResponseIn = TypeVar("ResponseIn", contravariant=True)


class Handler(Protocol[ResponseIn]):
    """Called by the session's thread, one call at a time."""

    def wait_until_wanted(self) -> bool:
        """Returns True when a stream is needed, False when the session is closed."""

    def opened(self, sending: streams.Sending) -> None:
        """A stream has begun."""

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
        lifetime: streams.Lifetime,
        method: streams.StreamMethod[Response],
        handler: Handler[Response],
    ) -> None:
        self._shared = shared
        self._lifetime = lifetime
        self._method = method
        self._handler = handler
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=lifetime.name, daemon=True)

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
        ending: errors.TarryError = self._lifetime.closed()
        try:
            while self._handler.wait_until_wanted():
                error = self._read_one_stream()
                if self._closed.is_set():
                    break
                delay_s = self._lifetime.reopens_after_s(error)
                self._handler.interrupted(error)
                self._closed.wait(delay_s)
        except errors.TarryError as error:
            ending = error
        except BaseException as bug:
            ending = self._lifetime.ended_by_bug(bug)
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
                    return self._lifetime.closed()
                method: grpc.StreamStreamMultiCallable[bytes, Response] = self._shared.channel(
                    self._lifetime.address
                ).stream_stream(self._method.path, request_serializer=None, response_deserializer=self._method.read)
                call = method(sending, metadata=self._shared.metadata)
                self._call = call
            self._handler.opened(sending)
            for response in call:
                if self._handler.received(response):
                    self._lifetime.progressed()
            return streams.why_ended(None)
        except grpc.RpcError as failure:
            return streams.why_ended(failure)
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
