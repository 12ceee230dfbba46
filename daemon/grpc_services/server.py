"""The gRPC server: which services it has, on which address, within which bounds.

Owns: the list of services, reflection, the channel's options, start and drain.
Does not own: the services, and the engine, which is started and stopped by `daemon.process`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from daemon import config
from daemon.grpc_services import (
    admin_service,
    cluster_service,
    delayed_delivery_service,
    dispatch_service,
    health_service,
    inspect_service,
    ledger_deletion_service,
)

if TYPE_CHECKING:
    from daemon.owner.engine import Engine

# A message that is a little too large is still read, so that it can be refused by name; beyond that gRPC itself ends
# the call with RESOURCE_EXHAUSTED.
MESSAGE_ROOM_BYTES = 1 << 20


class Server:
    """The daemon's gRPC endpoint: bind, start, drain."""

    def __init__(self, settings: config.Config) -> None:
        self._settings = settings
        self._server = grpc.aio.server(options=_options(settings))
        self._health: health_service.HealthReport | None = None
        self._calls = _OpenCalls()
        self._delayed_delivery: delayed_delivery_service.DelayedDelivery | None = None

    def bind(self) -> int:
        """Takes the address, so that the daemon knows its port before it serves. Raises `OSError` when it is taken."""
        try:
            return self._server.add_insecure_port(self._settings.grpc.listen)
        except RuntimeError as error:
            raise OSError(f"grpc.listen: {self._settings.grpc.listen} cannot be bound: {error}") from error

    async def start(self, engine: Engine) -> None:
        """Serves. An engine that is not ready refuses by itself; health follows it."""
        self._delayed_delivery = delayed_delivery_service.DelayedDelivery(engine, self._settings)
        services = {
            delayed_delivery_service.DESCRIPTOR.full_name: self._delayed_delivery.handlers(),
            dispatch_service.DESCRIPTOR.full_name: dispatch_service.Dispatch(engine, self._settings).handlers(),
            inspect_service.DESCRIPTOR.full_name: inspect_service.Inspect(engine, self._settings).handlers(),
            admin_service.DESCRIPTOR.full_name: admin_service.Admin(engine, self._settings).handlers(),
            ledger_deletion_service.DESCRIPTOR.full_name: ledger_deletion_service.LedgerDeletion(
                engine, self._settings
            ).handlers(),
            cluster_service.DESCRIPTOR.full_name: cluster_service.Cluster(engine, self._settings).handlers(),
        }
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(
                    name, {method: self._calls.counted(handler) for method, handler in handlers.items()}
                )
                for name, handlers in services.items()
            )
        )
        self._health = health_service.HealthReport(engine, tuple(services))
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((*services, health_name, reflection.SERVICE_NAME), self._server)
        await self._health.start()
        await self._server.start()

    async def drain(self) -> None:
        """Says NOT_SERVING, takes no new call, and lets open ones end for `grpc.drain_s` before it cancels them.

        Streams of adds end by themselves, those of dispatchers with the engine.
        """
        if self._health is not None:
            await self._health.close()
        if self._delayed_delivery is not None:
            self._delayed_delivery.end_streams()
        await self._server.stop(self._settings.grpc.drain_s)

    def left(self) -> list[str]:
        """The calls that are not answered, for people."""
        return [f"{self._calls.open} calls are open"] if self._calls.open else []


class _OpenCalls:
    """How many calls are open, streams included."""

    def __init__(self) -> None:
        self.open = 0

    def counted(self, handler: Any) -> Any:
        """The handler, whose calls are counted."""
        kinds = ("unary_unary", "unary_stream", "stream_stream")
        kind = next(each for each in kinds if getattr(handler, each) is not None)
        serve = getattr(handler, kind)

        async def counting(request: Any, context: Any) -> Any:
            self.open += 1
            try:
                return await serve(request, context)
            finally:
                self.open -= 1

        return handler._replace(**{kind: counting})


def _options(settings: config.Config) -> list[tuple[str, Any]]:
    server = settings.grpc
    return [
        ("grpc.max_receive_message_length", settings.limits.message_bytes_max + MESSAGE_ROOM_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", server.concurrent_calls_per_connection_max),
        ("grpc.keepalive_time_ms", int(server.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(server.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may probe as often as every 5 s, also between calls, without being sent away.
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
        # Two daemons on one port would both be reached, by chance.
        ("grpc.so_reuseport", 0),
    ]
