"""Runs the gRPC server: its services, reflection, health, addresses and limits, and how it drains.

`HealthReport` reports the engine's health by `grpc.health.v1`, for the daemon ("") and for each service. Only
`daemon.process` imports this module; that starts and stops the engine.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from daemon import config
from daemon.auth import Certificates, Door
from daemon.call_values import HEALTH_REASON_KEY, HEALTH_STANDS_BY_KEY
from daemon.grpc_services import (
    admin_service,
    cluster_service,
    delayed_delivery_service,
    dispatch_service,
    inspect_service,
    ledger_deletion_service,
)
from daemon.grpc_services.admission import Admission
from daemon.grpc_services.receiving import MESSAGE_ROOM_BYTES, WINDOW_BYTES
from daemon.owner.engine import Engine

# gRPC allows 8 KiB for all metadata
REASON_MAX_BYTES = 2_048


class _HealthServicer(health.aio.HealthServicer):
    """The standard health service. The trailing metadata of `Check` tell a standby from a failure, and the reason.

    Health is open to everyone. If the daemon has identities, the reason, which names other daemons and the store, is
    only for its own user, over the Unix socket.
    """

    def __init__(self, engine: Engine, door: Door, service_names: Sequence[str]) -> None:
        super().__init__()
        self._engine = engine
        self._door = door
        self._service_names = service_names

    async def List(self, _: object, __: object) -> Any:
        # Its type stubs do not know the message yet.
        response = cast(Any, health_pb2).HealthListResponse()
        for name in self._service_names:
            response.statuses[name].status = _status_of(self._engine)
        return response

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        now = self._engine.health
        hints: list[tuple[str, str | bytes]] = [(HEALTH_STANDS_BY_KEY, "1")] if now.stands_by else []
        if self._door.identities is None or context.peer().startswith("unix:"):
            reason = "; ".join((now.reason, *self._door.faults))
            hints.append((HEALTH_REASON_KEY, reason.encode()[:REASON_MAX_BYTES]))
        context.set_trailing_metadata(tuple(hints))
        return await super().Check(request, context)


def _status_of(engine: Engine) -> Any:
    states = health_pb2.HealthCheckResponse
    return states.SERVING if engine.health.serving else states.NOT_SERVING


class HealthReport:
    """The health service, which follows the engine's health until it is closed."""

    def __init__(self, engine: Engine, door: Door, service_names: Sequence[str]) -> None:
        self._service_names = ("", *service_names)
        self.servicer = _HealthServicer(engine, door, self._service_names)
        self._engine = engine
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report the current health, then each change."""
        self._engine.on_health_change(lambda _: self._changed.set())
        await self._tell()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Report NOT_SERVING for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._tell()

    async def _tell(self) -> None:
        for name in self._service_names:
            await self.servicer.set(name, _status_of(self._engine))


class _OpenToEveryone:
    """Registers the handlers of services that are none of the contract."""

    def __init__(self, server: grpc.aio.Server, admission: Admission) -> None:
        self._server = server
        self._admission = admission

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore what is also registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register handlers that receive within the budget."""
        wrapped = {name: self._admission.open_to_everyone(f"{service}/{name}", each) for name, each in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))


class Server:
    """The daemon's gRPC endpoint: bind, start, drain."""

    def __init__(self, settings: config.Config, admission: Admission) -> None:
        self._settings = settings
        self._admission = admission
        self._server = grpc.aio.server(options=_options(settings))
        self._health: HealthReport | None = None
        self._delayed_delivery: delayed_delivery_service.DelayedDelivery | None = None
        self._dispatch: dispatch_service.Dispatch | None = None

    def bind(self) -> int:
        """Bind the addresses, so that the daemon knows its port before it serves. Raises `OSError` if one is taken."""
        listen, unix_socket = self._settings.grpc.listen, self._settings.grpc.unix_socket
        try:
            _try_address(*config.split_address(listen))
        except OSError as error:
            raise config.cannot_be_bound("grpc.listen", listen, error) from error
        if unix_socket is not None:
            try:
                _try_socket(unix_socket)
            except OSError as error:
                raise config.cannot_be_bound("grpc.unix_socket", unix_socket, error) from error
        door = self._admission.door
        try:
            if door.certificates is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, _credentials(door, door.certificates))
        except RuntimeError as error:
            raise OSError(f"grpc.listen: {listen} cannot be bound: {error}") from error
        if unix_socket is not None:
            # Only its own user may use the socket, and one that a former process has left is replaced.
            try:
                self._server.add_insecure_port(f"unix:{unix_socket}")
            except RuntimeError as error:
                raise OSError(f"grpc.unix_socket: {unix_socket} cannot be bound: {error}") from error
        return port

    async def start(self, engine: Engine) -> None:
        """Serve. An engine that is not ready refuses calls itself, and health follows it."""
        self._delayed_delivery = delayed_delivery_service.DelayedDelivery(engine, self._settings)
        self._dispatch = dispatch_service.Dispatch(engine, self._settings)
        services = {
            delayed_delivery_service.DESCRIPTOR: self._delayed_delivery.handlers(),
            dispatch_service.DESCRIPTOR: self._dispatch.handlers(),
            inspect_service.DESCRIPTOR: inspect_service.Inspect(engine, self._settings).handlers(),
            admin_service.DESCRIPTOR: admin_service.Admin(engine, self._settings).handlers(),
            ledger_deletion_service.DESCRIPTOR: ledger_deletion_service.LedgerDeletion(
                engine, self._settings
            ).handlers(),
            cluster_service.DESCRIPTOR: cluster_service.Cluster(engine, self._settings).handlers(),
        }
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(
                    service.full_name,
                    {
                        name: self._admission.guarded(service.methods_by_name[name], handler)
                        for name, handler in handlers.items()
                    },
                )
                for service, handlers in services.items()
            )
        )
        names = tuple(service.full_name for service in services)
        self._health = HealthReport(engine, self._admission.door, names)
        open_to_everyone = cast(Any, _OpenToEveryone(self._server, self._admission))
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, open_to_everyone)
        asked = self._settings.access.reflection
        if self._admission.door.identities is None if asked is None else asked:
            health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
            servicer = reflection.aio.ReflectionServicer((*names, health_name, reflection.SERVICE_NAME))
            cast(Any, reflection_pb2_grpc).add_ServerReflectionServicer_to_server(servicer, open_to_everyone)
        await self._health.start()
        await self._server.start()

    async def drain(self) -> None:
        """Report NOT_SERVING, take no new call, and cancel calls that are still open after `grpc.drain_s` seconds.

        Streams of adds and of many lanes end themselves; those of dispatchers end with the engine.
        """
        if self._health is not None:
            await self._health.close()
        if self._delayed_delivery is not None:
            self._delayed_delivery.end_streams()
        if self._dispatch is not None:
            self._dispatch.end_streams()
        await self._server.stop(self._settings.grpc.drain_s)

    def left(self) -> list[str]:
        """Describe the unanswered calls for the log."""
        open_calls = self._admission.open_calls
        return [f"{open_calls} calls are open"] if open_calls else []


def _try_address(host: str, port: int) -> None:
    """Bind an address and let it go. Raises the `OSError` of which gRPC would print lines of its own."""
    failure: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as tried:
                # gRPC does the same, because connections that a former daemon has closed do not count.
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
                return
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure


def _try_socket(path: str) -> None:
    """Bind a Unix socket and remove it, unless a former process has left one there. Raises `OSError`."""
    if Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.bind(path)
    Path(path).unlink()


def _credentials(door: Door, at_first: Certificates) -> grpc.ServerCredentials:
    """Return TLS credentials that follow the certificates.

    gRPC asks for the certificates at each new connection, in a thread of its own.
    """
    current = at_first

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        found = door.certificates
        if found is None or found is current:
            return None
        current = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(at_first),
        cast(Any, changed),  # None is allowed, and stands for no change
        require_client_authentication=at_first.client_ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.client_ca
    )


def _options(settings: config.Config) -> list[tuple[str, Any]]:
    server = settings.grpc
    return [
        ("grpc.max_receive_message_length", settings.limits.message_bytes_max + MESSAGE_ROOM_BYTES),
        # Without probes of the bandwidth, which would widen the windows of all calls
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", server.concurrent_calls_per_connection_max),
        ("grpc.keepalive_time_ms", int(server.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(server.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may probe every 5 s, also between calls, without being disconnected.
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
        # Connections to two daemons on one port would reach either, by chance.
        ("grpc.so_reuseport", 0),
    ]
