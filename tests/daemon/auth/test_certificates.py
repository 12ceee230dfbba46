"""Certificate, key and CA: what does not fit together is refused with the setting and the file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import trustme

from daemon import auth, errors
from daemon.settings import TlsSettings
from tests._support.door_files import DoorFiles, door_files, identity


@pytest.fixture
def files(tmp_path: Path) -> DoorFiles:
    return door_files(tmp_path, identity("a", [], []))


def tls(files: DoorFiles) -> TlsSettings:
    return TlsSettings(cert_file=str(files.cert), key_file=str(files.key), client_ca_file=str(files.ca))


def test_they_are_read_and_show_no_key(files: DoorFiles) -> None:
    found = auth.read_certificates(tls(files))
    assert (found.chain, found.key) == (files.cert.read_bytes(), files.key.read_bytes())
    assert "PRIVATE KEY" not in repr(found)


def test_a_key_of_another_certificate_is_refused(files: DoorFiles) -> None:
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(files.key)
    with pytest.raises(errors.InvalidArgument, match=r"tls.cert_file .*tls.key_file .*its own key"):
        auth.read_certificates(tls(files))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(files: DoorFiles) -> None:
    encrypted = files.folder / "encrypted.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", files.key, "-out", encrypted, "-passout", "pass:secret"], check=True
    )
    encrypted.replace(files.key)
    with pytest.raises(errors.InvalidArgument, match="without a password"):
        auth.read_certificates(tls(files))


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_file_that_is_missing_or_no_pem_is_refused_by_its_setting(files: DoorFiles, name: str) -> None:
    path: Path = getattr(files, name)
    setting = {"cert": "cert_file", "key": "key_file", "ca": "client_ca_file"}[name]
    path.write_text("no PEM")
    with pytest.raises(errors.InvalidArgument, match=f"tls.{setting} {path}"):
        auth.read_certificates(tls(files))
    path.unlink()
    with pytest.raises(errors.InvalidArgument, match=f"tls.{setting} {path} cannot be read"):
        auth.read_certificates(tls(files))
