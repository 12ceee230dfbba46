"""A CA of its own, and the files of a daemon that stands on a network: certificate, key, identities."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from pathlib import Path

import trustme

from daemon.auth import hash_of


def identity(name: str, scopes: Iterable[str], prefixes: Iterable[str], **named: Iterable[str]) -> str:
    """A table of the file of identities. Its token is `token-of-<name>` unless `tokens` or `certificates` are given."""
    shown = named or {"tokens": [hash_of(token_of(name))]}
    lines = [f'name = "{name}"', f"scopes = {list(map(str, scopes))}", f"topic_prefixes = {list(prefixes)}"]
    return "\n".join(["[[identity]]", *lines, *(f"{key} = {list(values)}" for key, values in shown.items()), ""])


def token_of(name: str) -> str:
    return f"token-of-{name}"


@dataclasses.dataclass(frozen=True)
class DoorFiles:
    """Files in a folder. Whatever takes their place does so in one step."""

    folder: Path
    authority: trustme.CA

    @property
    def cert(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def identities(self) -> Path:
        return self.folder / "identities.toml"

    def settings(self, *, mutual: bool = False) -> list[str]:
        """For `--set`: TLS and identities, with `mutual` for clients with certificates only."""
        found = {"tls.cert_file": self.cert, "tls.key_file": self.key, "access.identities_file": self.identities}
        return [
            f"{name}={path}" for name, path in (found | ({"tls.client_ca_file": self.ca} if mutual else {})).items()
        ]

    def issue(self, *, not_after: datetime.datetime | None = None) -> None:
        """Another certificate, and its key."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1", not_after=not_after)
        issued.private_key_pem.write_to_path(self.folder / "next.key")
        issued.cert_chain_pems[0].write_to_path(self.folder / "next.crt")
        (self.folder / "next.key").replace(self.key)
        (self.folder / "next.crt").replace(self.cert)

    def admit(self, *identities: str) -> None:
        """Another file of identities, of tables that `identity` has made."""
        following = self.folder / "next.toml"
        following.write_text("\n".join(identities))
        following.replace(self.identities)


def door_files(folder: Path, *identities: str) -> DoorFiles:
    files = DoorFiles(folder, trustme.CA())
    files.authority.cert_pem.write_to_path(files.ca)
    files.issue()
    files.admit(*identities)
    return files
