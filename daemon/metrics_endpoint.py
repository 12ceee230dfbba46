"""Serves `/metrics` over HTTP or HTTPS to those who may scrape.

`process` alone uses it; it stands apart because it is the only HTTP server. `daemon.auth` has the certificate and the
identities.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final
from wsgiref import simple_server

import prometheus_client
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import CollectorRegistry

from daemon.auth import EVERY_TOPIC, Certificates, Identities, Scope, bearer_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# Longest silence of a caller, also in its handshake (seconds)
SILENCE_MAX_S: Final = 30.0


class Endpoint:
    """A server of the series with threads of its own, which never wait for the event loop."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        certificates: Callable[[], Certificates | None] = lambda: None,
        identities: Callable[[], Identities | None] = lambda: None,
    ) -> None:
        """Bind and serve; port 0 takes a free one. Raise `OSError` if the address is taken.

        `certificates` returns those for a new connection, None for HTTP. `identities` returns those that may scrape
        with scope `inspect` and all topics; None allows every caller.
        """
        app: WSGIApplication = prometheus_client.make_wsgi_app(registry)
        self._server = _server_class(host, port, certificates)((host, port), _Handler)
        self._server.set_app(_for_identities(app, identities))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(simple_server.WSGIRequestHandler):
    timeout = SILENCE_MAX_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for a scrape."""


def _server_class(
    host: str, port: int, certificates: Callable[[], Certificates | None]
) -> type[simple_server.WSGIServer]:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    class Server(ThreadingWSGIServer):
        address_family = family

        def get_request(self) -> tuple[Any, Any]:
            connection, caller = super().get_request()
            if (found := certificates()) is not None:
                # The connection's thread makes the handshake: a silent caller delays no other.
                connection = found.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            return connection, caller

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore a caller that disconnects or does not speak TLS."""
            if not isinstance(sys.exc_info()[1], OSError):
                super().handle_error(request, client_address)

    return Server


def _for_identities(app: WSGIApplication, identities: Callable[[], Identities | None]) -> WSGIApplication:
    """Restrict the application to callers with a token of an identity that may see every topic."""

    def guarded(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        known = identities()
        if known is None:
            return app(environment, start)
        token = bearer_of(environment.get("HTTP_AUTHORIZATION", ""))
        identity = None if token is None else known.of_token(token)
        if identity is None:
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"a scrape needs the bearer token of an identity\n"]
        if Scope.INSPECT not in identity.scopes or not identity.may_use(EVERY_TOPIC):
            start("403 Forbidden", [("Content-Type", "text/plain")])
            return [b'a scrape needs an identity with scope inspect and topic prefix ""\n']
        return app(environment, start)

    return guarded
