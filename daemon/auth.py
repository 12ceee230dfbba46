"""Reads who may come in: certificate, client CA, identities and their tokens, from files that may change.

The files are read at the start, and again when they change. A file that is wrong then changes nothing.
`proto/tarry/v1/access.proto` says what a call needs; `daemon.grpc_services.admission` authenticates callers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import hashlib
import logging
import math
import os
import secrets
import ssl
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from daemon import errors
from daemon.settings import AccessSettings, TlsSettings

log = logging.getLogger(__name__)


EXPIRES_SOON_S: Final = 14 * 86_400.0
"""Time before its end from which on a certificate is named (seconds)"""


@dataclasses.dataclass(frozen=True)
class Validity:
    """The end of the validity of a certificate in the file of a setting (Unix time, seconds)."""

    setting: str
    subject: str
    not_after_s: float

    def fault(self, now_s: float) -> str | None:
        """Return what to report of a certificate that is expired or expires soon, or None."""
        if self.not_after_s - now_s > EXPIRES_SOON_S:
            return None
        end = datetime.datetime.fromtimestamp(self.not_after_s, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        word = "expired" if self.not_after_s <= now_s else "expires"
        return f"a certificate in {self.setting} {word} at {end}: {self.subject}; replace it"


@dataclasses.dataclass(frozen=True)
class Certificates:
    """The files of section `tls`, as PEM. Without a `client_ca` clients need no certificate.

    `context` serves HTTPS with the same certificate and key, and requests no client certificate. `validity` has every
    certificate of the files.
    """

    chain: bytes
    key: bytes = dataclasses.field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext = dataclasses.field(compare=False, repr=False)
    validity: tuple[Validity, ...]


def certificate_files(tls: TlsSettings) -> list[str]:
    """Return the files that the settings name."""
    return [path for path in (tls.cert_file, tls.key_file, tls.client_ca_file) if path is not None]


def read_certificates(tls: TlsSettings) -> Certificates:
    """Read and check the files. Raise `InvalidArgument` with the setting, the file and what is wrong."""
    chain, key = _bytes_of("tls.cert_file", tls.cert_file), _bytes_of("tls.key_file", tls.key_file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # This refuses an encrypted key; without a password OpenSSL would ask the terminal for one.
        context.load_cert_chain(str(tls.cert_file), str(tls.key_file), password="")
    except (OSError, ValueError) as error:
        raise errors.InvalidArgument(
            f"tls.cert_file {tls.cert_file} and tls.key_file {tls.key_file}: they must be a certificate and its own "
            f"key, both PEM, the key without a password ({error})"
        ) from error
    client_ca = _client_ca(tls)
    validity = [*_validity("tls.cert_file", chain), *_validity("tls.client_ca_file", client_ca or b"")]
    return Certificates(chain, key, client_ca, context, tuple(validity))


def _validity(setting: str, pem: bytes) -> Iterator[Validity]:
    if not pem:
        return
    # Imported here, since it takes a while, and most commands need no certificate.
    from cryptography import x509

    try:
        # A field that is wrong raises only when it is read.
        yield from [
            Validity(setting, each.subject.rfc4514_string(), each.not_valid_after_utc.timestamp())
            for each in x509.load_pem_x509_certificates(pem)
        ]
    except ValueError as error:
        # OpenSSL, which serves them, may take what is not quite X.509.
        log.warning("when the certificates in %s expire cannot be read: %s", setting, error)


def _client_ca(tls: TlsSettings) -> bytes | None:
    if tls.client_ca_file is None:
        return None
    authority = _bytes_of("tls.client_ca_file", tls.client_ca_file)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise errors.InvalidArgument(
            f"tls.client_ca_file {tls.client_ca_file}: it must be PEM with at least one certificate ({error})"
        ) from error
    return authority


def _bytes_of(setting: str, path: str | None) -> bytes:
    try:
        return Path(str(path)).read_bytes()
    except OSError as error:
        raise errors.InvalidArgument(f"{setting} {path} cannot be read: {error.strerror}") from error


class Scope(enum.StrEnum):
    """A kind of calls that an identity may make on its topics."""

    ADD = "add"
    DISPATCH = "dispatch"
    INSPECT = "inspect"
    ADMIN = "admin"
    DELETE = "delete"


# Matches every topic, and calls over all topics
EVERY_TOPIC: Final = ""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A caller that the daemon knows: a service, a team, an operator.

    `tokens` are SHA-256 hashes in hexadecimal digits. `certificates` are names in client certificates, common or
    alternative ones.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    scopes: frozenset[Scope]
    topic_prefixes: tuple[str, ...]
    tokens: tuple[Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")], ...] = ()
    certificates: tuple[Annotated[str, Meta(min_length=1)], ...] = ()

    def may_use(self, topic: str) -> bool:
        """Return whether a prefix matches the topic; "" stands for all topics."""
        return topic.startswith(self.topic_prefixes)

    def has_rights_of(self, other: Identity) -> bool:
        """Return whether it is the same identity with the same rights; its tokens may differ."""
        return (self.name, self.scopes, self.topic_prefixes) == (other.name, other.scopes, other.topic_prefixes)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    identity: tuple[Identity, ...]


class Identities:
    """All identities of a file."""

    def __init__(self, identities: Iterable[Identity]) -> None:
        """Index the identities.

        Raises `InvalidArgument` if two share a name, token or certificate, or if one has neither token nor certificate.
        """
        self._all = tuple(identities)
        if not self._all:
            raise errors.InvalidArgument("identity: there is none; at least one [[identity]] must be there")
        for each in self._all:
            if not each.tokens and not each.certificates:
                raise errors.InvalidArgument(f"identity {each.name!r} has neither tokens nor certificates")
        _by("name", ((each.name, each) for each in self._all))
        self._by_token = _by("a token", ((token, each) for each in self._all for token in each.tokens))
        self._by_certificate = _by("a certificate", ((name, each) for each in self._all for name in each.certificates))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identities) and self._all == other._all

    def of_token(self, token: str) -> Identity | None:
        """Return the identity with this token, or None."""
        return self._by_token.get(hash_of(token))

    def of_certificate(self, names: Iterable[str]) -> Identity | None:
        """Return the identity of the first known name, or None."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)


def bearer_of(authorization: str) -> str | None:
    """Return the token of an `authorization` value `Bearer <token>`, or None for anything else."""
    scheme, _, token = authorization.partition(" ")
    # Only spaces: gRPC and HTTP give bytes that are no UTF-8 as Latin-1, in which some of them are white space.
    return token.strip(" ") or None if scheme.lower() == "bearer" else None


def hash_of(token: str) -> str:
    """Return the form in which the file of identities has a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_identities(path: str) -> Identities:
    """Read the file of identities. Raise `InvalidArgument` with the file, the place and what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Identities(msgspec.convert(tomllib.loads(text), _File).identity)
    except OSError as error:
        raise errors.InvalidArgument(f"access.identities_file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidArgument(f"access.identities_file {path} is not TOML: {error}") from error
    except (msgspec.ValidationError, errors.InvalidArgument) as error:
        raise errors.InvalidArgument(f"access.identities_file {path}: {error}") from error


def _by(what: str, given: Iterable[tuple[str, Identity]]) -> Mapping[str, Identity]:
    found: dict[str, Identity] = {}
    for key, identity in given:
        if key in found:
            raise errors.InvalidArgument(
                f"identity {identity.name!r} has {what} that identity {found[key].name!r} has: each must be of one"
            )
        found[key] = identity
    return found


BITS: Final = 256


def make_token() -> str:
    """Create a token: letters, digits, `-` and `_`."""
    return secrets.token_urlsafe(BITS // 8)


def write_token(path: Path, token: str) -> None:
    """Write a token to a new file for this user alone. Raise `OSError`, also if the path exists."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as opened:
        opened.write(f"{token}\n")


T = TypeVar("T")
# Modification time, inode and size of each file, or None if it does not exist
_State: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """The last valid value read from files.

    A change is read when two looks in a row have seen it, since several files may change one after the other.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Read the files. Raise the errors of `read`."""
        self._paths = tuple(map(Path, paths))
        self._read = read
        self._read_at = self._seen = self._state()
        self.value = read()

    def look(self) -> bool | None:
        """Read the files if they have changed; return whether the value changed, or None if nothing was read.

        Raises the errors of `read` once for each change; the value then stays.
        """
        state = self._state()
        settled = state == self._seen
        self._seen = state
        if state == self._read_at or not settled:
            return None
        self._read_at = state
        former, self.value = self.value, self._read()
        return self.value != former

    def _state(self) -> _State:
        return tuple(map(_state_of, self._paths))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


LOOK_EVERY_S: Final = 1.0

Kind: TypeAlias = Literal["certificates", "identities"]


class Door:
    """The rights and certificates in force, which any thread may read."""

    def __init__(self, tls: TlsSettings, access: AccessSettings, *, now_s: Callable[[], float] = time.time) -> None:
        """Read the files. Raise `InvalidArgument` if one is wrong. `now_s` is the wall clock."""
        self._now_s = now_s
        self._named: Set[str | None] = frozenset()
        self._certificates: WatchedFiles[Certificates] | None = None
        self._identities: WatchedFiles[Identities] | None = None
        if tls.cert_file is not None:
            self._certificates = WatchedFiles(certificate_files(tls), lambda: read_certificates(tls))
        if (path := access.identities_file) is not None:
            self._identities = WatchedFiles([path], lambda: read_identities(path))

    @property
    def certificates(self) -> Certificates | None:
        """The certificates, or None without TLS."""
        return None if self._certificates is None else self._certificates.value

    @property
    def identities(self) -> Identities | None:
        """The identities, or None if every caller that reaches the port may do everything."""
        return None if self._identities is None else self._identities.value

    @property
    def faults(self) -> list[str]:
        """Texts of certificates that are expired or expire soon."""
        now_s = self._now_s()
        return [fault for each in self._validity if (fault := each.fault(now_s)) is not None]

    @property
    def _validity(self) -> Sequence[Validity]:
        return () if self.certificates is None else self.certificates.validity

    def expiry(self, setting: str) -> float:
        """Return when the first certificate in the file of a setting expires (Unix time, seconds); NaN without one."""
        return min((each.not_after_s for each in self._validity if each.setting == setting), default=math.nan)

    def name_faults(self) -> None:
        """Log the certificates that are expired or expire soon, each once."""
        now_s = self._now_s()
        faults = {each.fault(now_s): each for each in self._validity}
        for fault, each in faults.items():
            if fault is not None and fault not in self._named:
                log.log(logging.ERROR if each.not_after_s <= now_s else logging.WARNING, "%s", fault)
        self._named = faults.keys()

    async def watch(self, *, changed: Callable[[], None], refused: Callable[[Kind, bool], None]) -> None:
        """Watch the files until cancelled.

        `changed` is called when the identities have changed. `refused` is called when files were read, with whether
        they are wrong.
        """
        watched: list[tuple[Kind, WatchedFiles[Any] | None]] = [
            ("certificates", self._certificates),
            ("identities", self._identities),
        ]
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for kind, files in watched:
                if files is not None and await _look(kind, files, refused) and kind == "identities":
                    changed()
            self.name_faults()


async def _look(kind: Kind, files: WatchedFiles[Any], refused: Callable[[Kind, bool], None]) -> bool:
    """Return whether the files were read and have new contents."""
    try:
        another = await asyncio.to_thread(files.look)
    except errors.InvalidArgument as error:
        log.error("the %s in force stay as they were: %s", kind, error)
        refused(kind, True)
        return False
    except Exception:
        # Keep watching: revocations must still take effect later.
        log.exception("the %s in force stay as they were", kind)
        refused(kind, True)
        return False
    if another is not None:
        log.info("%s were read again", kind, extra={"changed": another})
        refused(kind, False)
    return bool(another)
