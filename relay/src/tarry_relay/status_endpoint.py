"""Serves `GET /metrics` and `GET /health` over HTTP, in a thread of its own."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator

import msgspec
import prometheus_client

from tarry_relay import relay_settings
from tarry_relay.relay_metrics import RelayMetrics


class _Handler(http.server.BaseHTTPRequestHandler):
    metrics: RelayMetrics

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(
                    200, prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest(self.metrics.registry)
                )
            case "/health":
                is_healthy, body = self.metrics.health.body()
                self._answer(200 if is_healthy else 503, "application/json", msgspec.json.encode(body))
            case other:
                self._answer(404, "text/plain", f"{other} is not served; /metrics and /health are\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


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
    handler = type("Handler", (_Handler,), {"metrics": metrics})
    try:
        server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), handler)
    except OSError as error:
        raise relay_settings.SettingsError(f"relay.listen is {listen!r}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
