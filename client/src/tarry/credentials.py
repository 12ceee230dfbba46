"""Gives connections their TLS, token, gRPC options and metadata.

Files are read again when they change, and a token is only sent where no one else can read it. Both clients use this
module; `tarry.aio.connections` holds the channels.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
import re
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import grpc

from tarry import errors

DEFAULT_PORT = 7461
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_TIMEOUT_S = 30.0

Options: TypeAlias = tuple[tuple[str, str | int], ...]

_OPTIONS: Options = (
    # The daemon limits answers by rows; a limit here would only turn an answer into an error.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC's default back-off grows to two minutes, far longer than a daemon needs to return.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A host that is gone sends nothing: only a ping shows that an idle stream is dead.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Two clients in one process must fail and recover separately.
    ("grpc.use_local_subchannel_pool", 1),
)
# An address that a proxy reaches as loopback belongs to another machine.
_NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)

PORT_MAX = 65_535

CLIENT_ID_KEY = "tarry-client-id"
CLIENT_ID_MAX_BYTES = 128
# A daemon that waits for a former owner reports the time at once, and the client waits here.
TOLD_OF_FORMER_OWNER = ("tarry-told-of-former-owner", "1")


def unsaid(why: str) -> None:
    """Ignore the reason of a wait."""


_WITHOUT_PORT = re.compile(r"(?:unix|unix-abstract|vsock|xds|google-c2p):.")
# gRPC's own forms of a host:port, or of several
_GRPC_FORM = re.compile(r"dns:(?://[^/]*/)?|ipv4:|ipv6:")
_HOST_AND_PORT = re.compile(r"(\[[^\s/@,\[\]]+\]|[^\s:/@,\[\]]+)(?::(.*))?")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://)(?:[^/?#]*@)?([^/?#]*).*", re.IGNORECASE)


def check_target(target: str, *, name: str = "target") -> str:
    """Return a target as gRPC takes it, with the daemon's default port if it has none.

    `name` is the argument or option that the caller gave. Raises InvalidArgument if the target is a URL, or has no host
    or an invalid port.
    """
    target = target.strip()
    if _WITHOUT_PORT.match(target):
        return target
    if form := _GRPC_FORM.match(target):
        return form[0] + ",".join(_with_port(each, target, name) for each in target[form.end() :].split(","))
    return _with_port(target, target, name)


def _with_port(address: str, target: str, name: str) -> str:
    wrong = f"{name} is {target!r}"
    if url := _URL.fullmatch(address):
        tls = "; TLS is a setting of its own" if url[1].lower() == "https://" else ""
        raise errors.InvalidArgument(
            f"{wrong}; it must be host:port without {url[1]}, such as {url[2] or DEFAULT_TARGET}{tls}"
        )
    parts = _HOST_AND_PORT.fullmatch(address)
    if parts is None or ":" in (parts[2] or ""):
        brackets = "; an IPv6 address stands in brackets: [::1]:7461" if address.count(":") > 1 else ""
        raise errors.InvalidArgument(
            f"{wrong}; it must be host:port, such as {DEFAULT_TARGET}, or unix: and the path of a socket{brackets}"
        )
    if parts[2] is None:
        return f"{address}:{DEFAULT_PORT}"
    if not re.fullmatch("[0-9]{1,5}", parts[2]) or not 1 <= int(parts[2]) <= PORT_MAX:
        raise errors.InvalidArgument(f"{wrong}, and {parts[2]!r} is no port; it must be from 1 to {PORT_MAX}")
    return address


def addresses_of(target: str | Sequence[str], *, name: str = "target") -> tuple[str, ...]:
    """Return the addresses of a target: those of a list, or of text with commas between them, each with its port.

    Raises InvalidArgument if there is none, or as `check_target` does.
    """
    given = target
    if isinstance(target, str):
        # gRPC's form of several addresses of one kind
        scheme = next((each for each in ("ipv4:", "ipv6:") if target.startswith(each)), "")
        given = [f"{scheme}{each.strip().removeprefix(scheme)}" for each in target.split(",")]
    for address in given:
        if address in ("", "ipv4:", "ipv6:"):
            raise errors.InvalidArgument(
                f"{name} is {target!r}, and an address of it is empty; it must be host:port, such as {DEFAULT_TARGET}"
            )
    if not given:
        raise errors.InvalidArgument(f"{name} is {target!r}; it must have an address, host:port")
    return tuple(dict.fromkeys(check_target(address, name=name) for address in given))


def is_unix_socket(target: str) -> bool:
    return target.startswith(("unix:", "unix-abstract:"))


def is_of_this_machine(target: str) -> bool:
    """Return True if data sent there stays on the machine: loopback by number or as `localhost`, or a Unix socket."""
    if is_unix_socket(target):
        return True
    # A custom name server (`dns://server/localhost`) may return any address.
    addresses = re.sub(r"^(?:dns|ipv4|ipv6):(?:///)?", "", target).split(",")
    return all(_is_loopback(re.sub(r"^\[(.*)\](?::[0-9]+)?$|^([^:]*):[0-9]+$", r"\1\2", each)) for each in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def options_of(target: str, *, server_name: str | None = None) -> Options:
    """Return gRPC's options for a channel.

    `server_name` is the name in the daemon's certificate; None means the target's host.
    """
    options = _OPTIONS
    if is_of_this_machine(target):
        options += _NO_PROXY
    if server_name is not None:
        options += (("grpc.ssl_target_name_override", server_name),)
    return options


def metadata_of(client_id: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call. Raises InvalidArgument."""
    if client_id is None:
        return (TOLD_OF_FORMER_OWNER,)
    if not 1 <= len(client_id) <= CLIENT_ID_MAX_BYTES or not re.fullmatch("[!-~]+", client_id):
        raise errors.InvalidArgument(
            f"client_id is {client_id!r}; it must be 1 to {CLIENT_ID_MAX_BYTES} printable ASCII characters, no blanks"
        )
    return (TOLD_OF_FORMER_OWNER, (CLIENT_ID_KEY, client_id))


logger = logging.getLogger("tarry")

T = TypeVar("T")
File: TypeAlias = str | os.PathLike[str]

TOKEN_MAX_BYTES = 4_096
AUTHORIZATION_KEY = "authorization"

_GRPC_ROOTS_VARIABLE = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
_SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS, the BSDs
)


@dataclasses.dataclass(frozen=True)
class Tls:
    """Settings of TLS. Daemons' certificates are verified: their issuer, and that they name the address's host.

    - `ca_file` has the certificates of the authorities that may issue a daemon's; None means those that this system
      trusts.
    - `cert_file` and `key_file` are the certificate that this client presents, with its chain, and its private key;
      both or none.
    - `server_name` is the name in the daemons' certificates if it differs from the address's host, as behind a tunnel.
    All files are PEM. Changed files are read again: later calls use them, and open streams stay. Raises InvalidArgument
    if only one of `cert_file` and `key_file` is given, or if `server_name` is empty.
    """

    ca_file: File | None = None
    cert_file: File | None = None
    key_file: File | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            given, missing = ("key_file", "cert_file") if self.cert_file is None else ("cert_file", "key_file")
            raise errors.InvalidArgument(f"{given} is given without {missing}; a certificate and its key go together")
        if self.server_name == "":
            raise errors.InvalidArgument("server_name is ''; it must be the name in the daemons' certificates, or None")


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """The credentials that one call shows to a daemon; equal if they show the same.

    `channel` is TLS and the certificate, or None without encryption. `metadata` holds the token.
    """

    channel: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...]


class Credentials:
    """TLS and the token of one client. Threads may share it."""

    def __init__(self, tls: Tls | None = None, *, token: str | None = None, token_file: File | None = None) -> None:
        """Read the files. Raises InvalidArgument if one is unreadable or invalid, or if two tokens are given."""
        if token is not None and token_file is not None:
            raise errors.InvalidArgument("token and token_file are given; a client has one token")
        self.server_name = None if tls is None else tls.server_name
        self._channel = _of_tls(tls)
        self._token = _of_token(token, token_file)

    def shown_to(self, target: str) -> Shown:
        """Return the credentials that a call to a target shows now.

        Raises InvalidArgument if there is a token and others could read it on its way.
        """
        channel = None if is_unix_socket(target) else self._channel.now()
        token = self._token.now()
        if token is None:
            return Shown(channel, ())
        if channel is None and not is_of_this_machine(target):
            raise errors.InvalidArgument(
                f"the token is not sent to {target} without TLS, since others could read it: connect with TLS, or by "
                "loopback or a Unix socket of the daemon's machine"
            )
        return Shown(channel, ((AUTHORIZATION_KEY, f"Bearer {token}"),))


class _FromFiles(Generic[T]):
    """A value made from files, and made again when one of them changes.

    If that fails, the former value stays, because two files cannot be replaced at once.
    """

    def __init__(self, files: Sequence[File], make: Callable[[], T]) -> None:
        self._files = [Path(file) for file in files]
        self._make = make
        self._lock = threading.Lock()
        self._seen = self._look()
        self._made = make()

    def now(self) -> T:
        with self._lock:
            # Checked before reading: a change in between is noticed the next time.
            if (found := self._look()) != self._seen:
                self._seen = found
                try:
                    self._made = self._make()
                except errors.InvalidArgument as error:
                    logger.warning("%s; what was read before stays in use", error.message)
            return self._made

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state_of(file) for file in self._files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    """Return a value that changes if the file is replaced or its contents change, or None if it cannot be checked."""
    try:
        found = file.stat()
    except OSError:
        return None
    # A pipe, such as that of a shell's `<(...)`, can be read once.
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else ()


def _of_token(token: str | None, token_file: File | None) -> _FromFiles[str | None]:
    if token_file is None:
        if token is not None:
            _check_token(token, "token")
        return _FromFiles((), lambda: token)

    def read() -> str:
        name = f"token_file {os.fspath(token_file)!r}"
        text = _read(token_file, "token_file").decode("ascii", errors="replace").strip()
        _check_token(text, name)
        return text

    return _FromFiles((token_file,), read)


def _check_token(token: str, name: str) -> None:
    """Raise InvalidArgument if the token is malformed; the text omits the token, because errors get into logs."""
    if not 1 <= len(token) <= TOKEN_MAX_BYTES or not re.fullmatch("[!-~]+", token):
        raise errors.InvalidArgument(
            f"{name} has no token of 1 to {TOKEN_MAX_BYTES} printable ASCII characters, no blanks; it has {len(token)}"
        )


def _of_tls(tls: Tls | None) -> _FromFiles[grpc.ChannelCredentials | None]:
    if tls is None:
        return _FromFiles((), lambda: None)
    roots = _system_roots() if tls.ca_file is None else tls.ca_file

    def make() -> grpc.ChannelCredentials:
        authorities = None if roots is None else _read(roots, "ca_file")
        certificate = None if tls.cert_file is None else _read(tls.cert_file, "cert_file")
        key = None if tls.key_file is None else _read(tls.key_file, "key_file")
        _check_tls(tls)
        return grpc.ssl_channel_credentials(authorities, key, certificate)

    return _FromFiles([file for file in (roots, tls.cert_file, tls.key_file) if file is not None], make)


def _check_tls(tls: Tls) -> None:
    """Raise InvalidArgument for files of which gRPC would only report a failed handshake."""
    files = [Path(file) for file in (tls.ca_file, tls.cert_file, tls.key_file) if file is not None]
    if not all(file.is_file() for file in files):
        # A pipe can be read once.
        return
    checked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca_file is not None:
        try:
            checked.load_verify_locations(cafile=tls.ca_file)
        except (ssl.SSLError, OSError) as error:
            raise errors.InvalidArgument(
                f"ca_file {os.fspath(tls.ca_file)!r} is no certificate in PEM: {error}"
            ) from None
    if tls.cert_file is not None and tls.key_file is not None:
        try:
            # Without a password OpenSSL asks for it, in the terminal.
            checked.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")
        except (ssl.SSLError, OSError) as error:
            raise errors.InvalidArgument(
                f"cert_file {os.fspath(tls.cert_file)!r} and key_file {os.fspath(tls.key_file)!r} are no certificate "
                f"in PEM and its key without a password: {error}"
            ) from None


def _system_roots() -> str | None:
    """Return the file of this system's trusted certificates, or None for gRPC's own or those of its variable."""
    if os.environ.get(_GRPC_ROOTS_VARIABLE):
        return None
    known = (ssl.get_default_verify_paths().cafile, *_SYSTEM_ROOTS)
    return next((path for path in known if path is not None and Path(path).is_file()), None)


def _read(file: File, name: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise errors.InvalidArgument(f"{name} {os.fspath(file)!r} cannot be read: {error.strerror}") from None
