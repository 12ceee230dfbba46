"""Who issues certificates in a test, and the files that clients are given.

Owns: the certificates, made in memory, and the files in a directory of the test. Does not own: servers and clients.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import trustme


@dataclasses.dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM."""

    chain: bytes
    key: bytes


class Authority:
    """Issues certificates of daemons and of clients."""

    def __init__(self) -> None:
        self._ca = trustme.CA()
        self.certificate: bytes = self._ca.cert_pem.bytes()

    def issue(self, *names: str, common_name: str | None = None) -> Issued:
        """`names`: hosts of a daemon, or any name of a client."""
        made = self._ca.issue_cert(*names, common_name=common_name)
        return Issued(b"".join(each.bytes() for each in made.cert_chain_pems), made.private_key_pem.bytes())

    def of_daemon(self, name: str = "127.0.0.1", *, clients_of: Authority | None = None) -> grpc.ServerCredentials:
        """What a daemon of that name serves with. `clients_of`: who has issued the certificates that clients need."""
        return self.serving(self.issue(name), clients_of=clients_of)

    @staticmethod
    def serving(issued: Issued, *, clients_of: Authority | None = None) -> grpc.ServerCredentials:
        pairs = [(issued.key, issued.chain)]
        if clients_of is None:
            return grpc.ssl_server_credentials(pairs)
        return grpc.ssl_server_credentials(pairs, clients_of.certificate, require_client_auth=True)


def replaced(path: Path, content: bytes | str) -> Path:
    """Puts a file there in one step, as whoever rotates secrets does."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content if isinstance(content, bytes) else content.encode())
    beside.replace(path)
    return path
