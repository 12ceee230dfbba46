"""Who calls, for quotas: an identity, or else a client's own name for itself, or the host that it calls from.

Owns: the metadata key and what it may hold, and reading gRPC's form of a peer.
Does not own: what a client may do (`daemon.core.quotas`, `admission`). The name that a client gives itself is taken as
it is: nothing proves it.
"""

from __future__ import annotations

import functools
import urllib.parse

from daemon import call_values, errors
from daemon.grpc_services.admission import Context

CLIENT_ID_KEY = "tarry-client-id"
CLIENT_ID_MAX_BYTES = 128
# So many connections call often.
PEERS_REMEMBERED = 1_024
# Whoever sends it waits for a former owner by itself, and can say what it waits for.
TOLD_KEY = "tarry-told-of-former-owner"


def client_of(context: Context) -> str:
    """The id by which the client is told apart: its identity, or else what its metadata says, or else its host.

    Raises `InvalidArgument`.
    """
    if context.identity is not None:
        return context.identity.name
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_ID_KEY:
            client = value if isinstance(value, str) else value.decode("utf-8", errors="replace")
            if not 1 <= len(client) <= CLIENT_ID_MAX_BYTES:
                raise errors.InvalidArgument(
                    f"{CLIENT_ID_KEY}, in the metadata, has {len(client)} characters; it must have 1 to "
                    f"{CLIENT_ID_MAX_BYTES}"
                )
            return client
    return host_of(context.peer())


def waits_by_itself(context: Context, wait_s: float) -> bool:
    """Whether a caller is told that its answer takes so long: it asks for that, or its deadline is over before."""
    left_s = context.time_remaining()
    if left_s is not None and left_s < wait_s:
        return True
    return any(key == TOLD_KEY for key, _ in context.invocation_metadata() or ())


@functools.lru_cache(PEERS_REMEMBERED)
def host_of(peer: str) -> str:
    """`ipv4:127.0.0.1:1234` and `ipv6:%5B::1%5D:1234` without their ports; 127.0.0.1 behind a Unix socket."""
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return "127.0.0.1"
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = urllib.parse.unquote(address).rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def caller_of(context: Context, size_bytes: int) -> call_values.Caller:
    """The caller of one request of that size. Raises `InvalidArgument`."""
    return call_values.Caller(client_of(context), size_bytes)
