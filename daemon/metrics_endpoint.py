"""Serves `/metrics` over HTTP or HTTPS to those who may scrape.

`process` alone uses it; it stands apart because it is the only HTTP server. `daemon.auth` has the certificate and the
identities, and `tarry.http_port` the server with its limits.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from http import HTTPStatus

import prometheus_client
from prometheus_client.registry import CollectorRegistry

from daemon.auth import EVERY_TOPIC, Certificates, Identities, Scope, bearer_of
from tarry import http_port

# Every scraper takes the text form.
_TEXT_FORM = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """A server of the series with a thread of its own, which never waits for the event loop."""

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

        def page() -> http_port.Answer:
            return http_port.Answer(prometheus_client.generate_latest(registry), _TEXT_FORM)

        def context() -> ssl.SSLContext | None:
            found = certificates()
            return None if found is None else found.context

        self._port = http_port.Port(
            host, port, {"/metrics": page}, refuse=lambda headers: _refusal(headers, identities()), context=context
        )

    @property
    def port(self) -> int:
        return self._port.port

    def close(self) -> None:
        self._port.close()


def _refusal(headers: http_port.Headers, identities: Identities | None) -> http_port.Answer | None:
    """Refuse callers without a token of an identity that may see every topic."""
    if identities is None:
        return None
    token = bearer_of(headers.get("Authorization", ""))
    identity = None if token is None else identities.of_token(token)
    if identity is None:
        return http_port.Answer(
            b"a scrape needs the bearer token of an identity\n",
            status=HTTPStatus.UNAUTHORIZED,
            headers=(("WWW-Authenticate", "Bearer"),),
        )
    if Scope.INSPECT not in identity.scopes or not identity.may_use(EVERY_TOPIC):
        return http_port.Answer(
            b'a scrape needs an identity with scope inspect and topic prefix ""\n', status=HTTPStatus.FORBIDDEN
        )
    return None
