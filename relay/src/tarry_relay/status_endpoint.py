"""Serves `GET /metrics` and `GET /health` over HTTP, in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http import HTTPStatus

import msgspec
import prometheus_client

from tarry import http_port
from tarry_relay import relay_settings
from tarry_relay.relay_metrics import RelayMetrics


@contextlib.contextmanager
def serving(listen: str | None, metrics: RelayMetrics) -> Iterator[str | None]:
    """Serve on host:port while the block runs; yield the address, with the port that port 0 has become.

    Serve nothing, and yield None, if `listen` is None. Raises SettingsError.
    """
    if listen is None:
        yield None
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise relay_settings.SettingsError(f"relay.listen is {listen!r}; it must be host:port with a port up to 65535")

    def series() -> http_port.Answer:
        body = prometheus_client.generate_latest(metrics.registry)
        return http_port.Answer(body, prometheus_client.CONTENT_TYPE_LATEST)

    def health() -> http_port.Answer:
        is_healthy, body = metrics.health.body()
        status = HTTPStatus.OK if is_healthy else HTTPStatus.SERVICE_UNAVAILABLE
        return http_port.Answer(msgspec.json.encode(body), "application/json", status)

    try:
        server = http_port.Port(host.strip("[]"), int(port), {"/metrics": series, "/health": health})
    except OSError as error:
        raise relay_settings.SettingsError(f"relay.listen is {listen!r}: {error}") from error
    with contextlib.closing(server):
        yield f"{host}:{server.port}"
