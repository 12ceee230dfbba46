"""The certificate and the key with which the daemon shows who it is, and the CA of those who may connect."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path

from daemon import errors
from daemon.settings import Tls


@dataclasses.dataclass(frozen=True)
class Certificates:
    """What the files of section `tls` hold, as PEM. `client_ca` None: clients need no certificate.

    `context` serves HTTPS with the same certificate and key; it asks nobody for a certificate.
    """

    chain: bytes
    key: bytes = dataclasses.field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext = dataclasses.field(compare=False, repr=False)


def files_of(tls: Tls) -> list[str]:
    """The files that the settings name."""
    return [path for path in (tls.cert_file, tls.key_file, tls.client_ca_file) if path is not None]


def read(tls: Tls) -> Certificates:
    """Reads and checks what the settings name. Raises `InvalidArgument`: the setting, the file and what is wrong."""
    chain, key = _bytes_of("tls.cert_file", tls.cert_file), _bytes_of("tls.key_file", tls.key_file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An encrypted key is refused; without a password OpenSSL would ask the terminal for one.
        context.load_cert_chain(str(tls.cert_file), str(tls.key_file), password="")
    except (OSError, ValueError) as error:
        raise errors.InvalidArgument(
            f"tls.cert_file {tls.cert_file} and tls.key_file {tls.key_file}: they must be a certificate and its own "
            f"key, both PEM, the key without a password ({error})"
        ) from error
    return Certificates(chain, key, _client_ca(tls), context)


def _client_ca(tls: Tls) -> bytes | None:
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
