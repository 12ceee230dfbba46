"""What every connection to a daemon goes by, whoever waits for its answers.

Owns: the default target and time-out, which ports there are, which targets are of this machine, gRPC's options, and the
metadata of a call.
Does not own: the channels themselves (`tarry.aio.connections`); TLS and tokens (`tarry.credentials`).
"""

from __future__ import annotations

import ipaddress
import re
from typing import TypeAlias

from tarry import errors

DEFAULT_TARGET = "127.0.0.1:7461"
DEFAULT_TIMEOUT_S = 30.0

Options: TypeAlias = tuple[tuple[str, str | int], ...]

_OPTIONS: Options = (
    # The daemon bounds what it sends by rows; a bound here would only turn an answer into an error.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC's own back-off grows to two minutes: far longer than a daemon needs to come back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A host that is gone sends nothing: only a ping tells an idle stream.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Two clients in one process are to fail and recover apart.
    ("grpc.use_local_subchannel_pool", 1),
)
# What a proxy reaches as loopback is another machine's.
_NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)

PORT_MAX = 65_535

CLIENT_ID_KEY = "tarry-client-id"
CLIENT_ID_MAX_BYTES = 128
# A call that has to wait for a former owner is answered at once with how long, and waited for here.
TOLD_OF_FORMER_OWNER = ("tarry-told-of-former-owner", "1")


def unsaid(why: str) -> None:
    """Nobody wants to know what is waited for."""


def check_target(target: str, *, name: str = "target") -> None:
    """Raises InvalidArgument where host:port has a port that there is not. What a gRPC target may be else is gRPC's."""
    port = re.fullmatch(r"(?:(?:dns|ipv4|ipv6):.*|[^:]+|\[.*\]):([0-9]+)", target)
    if port is not None and int(port[1]) > PORT_MAX:
        raise errors.InvalidArgument(f"{name} is {target!r}, and {port[1]} is no port; it must be at most {PORT_MAX}")


def is_unix_socket(target: str) -> bool:
    return target.startswith(("unix:", "unix-abstract:"))


def is_of_this_machine(target: str) -> bool:
    """Whether what is sent there leaves the machine in no case: loopback by number or as `localhost`, a Unix socket."""
    if is_unix_socket(target):
        return True
    # A name server of one's own (`dns://server/localhost`) may say anything.
    addresses = re.sub(r"^(?:dns|ipv4|ipv6):(?:///)?", "", target).split(",")
    return all(_is_loopback(re.sub(r"^\[(.*)\](?::[0-9]+)?$|^([^:]*):[0-9]+$", r"\1\2", each)) for each in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def options_of(target: str, *, server_name: str | None = None) -> Options:
    """gRPC's options for a channel. `server_name`: what the daemon's certificate is for; None: the target's host."""
    options = _OPTIONS
    if is_of_this_machine(target):
        options += _NO_PROXY
    if server_name is not None:
        options += (("grpc.ssl_target_name_override", server_name),)
    return options


def metadata_of(client_id: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries. Raises InvalidArgument."""
    if client_id is None:
        return (TOLD_OF_FORMER_OWNER,)
    if not 1 <= len(client_id) <= CLIENT_ID_MAX_BYTES or not re.fullmatch("[!-~]+", client_id):
        raise errors.InvalidArgument(
            f"client_id is {client_id!r}; it must be 1 to {CLIENT_ID_MAX_BYTES} printable ASCII characters, no blanks"
        )
    return (TOLD_OF_FORMER_OWNER, (CLIENT_ID_KEY, client_id))
