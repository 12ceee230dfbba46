"""Who may do what: identities, by the token or the certificate that shows one.

Owns: the form of the file of identities, and which identity a token or a certificate shows.
Does not own: what a call needs (`proto/tarry/v1/access.proto`), and how a caller shows who it is
(`daemon.grpc_services.admission`).
"""

from __future__ import annotations

import enum
import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from daemon import errors


class Scope(enum.StrEnum):
    """What an identity may do with the topics that are its own."""

    ADD = "add"
    DISPATCH = "dispatch"
    INSPECT = "inspect"
    ADMIN = "admin"
    DELETE = "delete"


# Fits every topic, and calls over all topics.
EVERY_TOPIC: Final = ""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody whom the daemon knows: a service, a team, an operator.

    `tokens`: SHA-256 of each of its tokens, in hexadecimal digits. `certificates`: names in client certificates, each a
    common name or an alternative one.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    scopes: frozenset[Scope]
    topic_prefixes: tuple[str, ...]
    tokens: tuple[Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")], ...] = ()
    certificates: tuple[Annotated[str, Meta(min_length=1)], ...] = ()

    def may_use(self, topic: str) -> bool:
        """Whether a prefix fits the topic; "" stands for all topics."""
        return topic.startswith(self.topic_prefixes)

    def has_rights_of(self, other: Identity) -> bool:
        """Whether it is the same one with the same rights; its tokens may be others."""
        return (self.name, self.scopes, self.topic_prefixes) == (other.name, other.scopes, other.topic_prefixes)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    identity: tuple[Identity, ...]


class Identities:
    """All identities of a file."""

    def __init__(self, identities: Iterable[Identity]) -> None:
        """Raises `InvalidArgument` where two have one name, token or certificate, or one has neither of these."""
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
        """Who shows this token; None: nobody."""
        return self._by_token.get(hash_of(token))

    def of_certificate(self, names: Iterable[str]) -> Identity | None:
        """Who has the first of the names that is anybody's; None: nobody."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)


def bearer_of(authorization: str) -> str | None:
    """The token of `Bearer <token>`, the value of an `authorization`; None where it is something else."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def hash_of(token: str) -> str:
    """How the file of identities holds a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def read(path: str) -> Identities:
    """Reads the file of identities. Raises `InvalidArgument`: the file, and what is wrong where."""
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
