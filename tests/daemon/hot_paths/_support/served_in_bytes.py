"""A daemon in virtual time, called through its gRPC services without gRPC: bytes go in, and bytes come out.

Owns: calls with their context, and streams whose requests are sent and whose answers are waited for.
Does not own: the daemon (`engine_fixture`), and what the bytes say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc

from daemon import config
from daemon.audit_log import AuditLog
from daemon.auth import Door
from daemon.grpc_services import delayed_delivery_service, dispatch_service
from daemon.grpc_services.admission import Admission
from daemon.grpc_services.receiving import Receiving
from tests._support.engine_fixture import Daemon, EngineFixture


class Call:
    """What a handler is given in place of gRPC's context, and what the caller has of it."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._answered = asyncio.Event()

    def send(self, *requests: bytes) -> None:
        for request in requests:
            self._requests.put_nowait(request)

    async def until(self, reached: Callable[[Sequence[bytes]], bool]) -> None:
        """Looks at the answers whenever one has come."""
        while not reached(self.answers):
            self._answered.clear()
            await self._answered.wait()

    async def answered(self, count: int) -> list[bytes]:
        """The answers that have not been taken, when they are so many."""
        await self.until(lambda answers: len(answers) >= count)
        answers, self.answers = self.answers, []
        return answers

    # ---- what handlers ask

    async def read(self) -> bytes:
        return await self._requests.get()

    async def write(self, answer: bytes) -> None:
        self.answers.append(answer)
        self._answered.set()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        raise AssertionError(f"{code.name}: {details}")

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


class CallWithOne(Call):
    """A call whose one request is there."""

    def __init__(self, request: bytes) -> None:
        self._request = request

    async def read(self) -> bytes:
        return self._request


class Served:
    """The calls of one daemon."""

    def __init__(self, machines: EngineFixture, daemon: Daemon) -> None:
        self.daemon = daemon
        self.machines = machines
        settings = config.load(environment={}, overrides=[])
        admission = Admission(
            Door(settings.tls, settings.access),
            AuditLog(settings.access),
            daemon.metrics.caller_refused,
            Receiving(settings),
        )
        services: dict[Any, dict[str, Any]] = {
            delayed_delivery_service.DESCRIPTOR: delayed_delivery_service.DelayedDelivery(
                daemon.engine, settings
            ).handlers(),
            dispatch_service.DESCRIPTOR: dispatch_service.Dispatch(daemon.engine, settings).handlers(),
        }
        self._handlers = {
            name: admission.guarded(service.methods_by_name[name], handler)
            for service, handlers in services.items()
            for name, handler in handlers.items()
        }

    def call(self, method: str, request: bytes) -> asyncio.Task[bytes]:
        """A call with one request; its answer."""
        return self.daemon.call(self._handlers[method].stream_unary(None, cast(Any, CallWithOne(request))))

    def open(self, method: str, *requests: bytes) -> Call:
        """A stream that stays open as long as the daemon."""
        call = Call()
        call.send(*requests)
        _ = self.daemon.call(self._handlers[method].stream_stream(None, cast(Any, call)))
        return call
