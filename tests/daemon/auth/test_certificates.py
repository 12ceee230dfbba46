"""Certificate, key and CA: what does not fit together is refused with the setting and the file."""

from __future__ import annotations

import asyncio
import datetime
import math
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from daemon import auth, errors
from daemon.settings import AccessSettings, TlsSettings
from tests._support.door_files import DoorFiles, door_files, identity
from tests._support.processes import run_child


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


DAY_S = 86_400.0


def _issued(files: DoorFiles, *, days: float) -> float:
    """Issue a certificate that ends so many days from now; return the end (Unix time, seconds)."""
    not_after = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=days)
    files.issue(not_after=not_after)
    return not_after.timestamp()


def test_a_certificate_is_named_from_14_days_before_its_end_on(
    files: DoorFiles, caplog: pytest.LogCaptureFixture
) -> None:
    end_s = _issued(files, days=100)
    now_s = end_s - 14 * DAY_S - 1
    door = auth.Door(tls(files), AccessSettings(), now_s=lambda: now_s)
    door.name_faults()
    assert (door.faults, caplog.records) == ([], [])
    assert door.expiry("tls.cert_file") == end_s < door.expiry("tls.client_ca_file")
    now_s += 2
    for _ in range(3):
        door.name_faults()
    (soon,) = door.faults
    assert "a certificate in tls.cert_file expires at 20" in soon
    now_s = end_s
    door.name_faults()
    (over,) = door.faults
    assert over == soon.replace("expires", "expired")
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [("WARNING", soon), ("ERROR", over)]


def test_every_certificate_of_a_file_is_looked_at(files: DoorFiles) -> None:
    end_s = _issued(files, days=100)
    other = trustme.CA()
    files.ca.write_bytes(files.ca.read_bytes() + other.cert_pem.bytes())
    chained = files.cert.read_bytes() + files.ca.read_bytes()
    files.cert.write_bytes(chained)
    found = auth.read_certificates(tls(files)).validity
    assert [each.setting for each in found] == ["tls.cert_file"] * 3 + ["tls.client_ca_file"] * 2
    assert [each.not_after_s == end_s for each in found] == [True, False, False, False, False]


async def test_a_certificate_that_replaces_another_is_named_when_it_expires_soon(
    files: DoorFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "LOOK_EVERY_S", 0.01)
    door = auth.Door(tls(files), AccessSettings())
    door.name_faults()
    assert door.faults == []
    _issued(files, days=3)
    watching = asyncio.create_task(door.watch(changed=lambda: None, refused=lambda *_: None))
    async with asyncio.timeout(300):
        while not door.faults or door.faults[0] not in caplog.text:  # noqa: ASYNC110 - nothing tells of a log line
            await asyncio.sleep(0.01)
    watching.cancel()


def test_a_name_that_cannot_be_read_keeps_no_certificate_from_being_served(
    files: DoorFiles, caplog: pytest.LogCaptureFixture
) -> None:
    der = x509.load_pem_x509_certificate(files.cert.read_bytes()).public_bytes(serialization.Encoding.DER)
    # OpenSSL looks at UTF-8 alone.
    der, count = re.subn(rb"\x0c(.)trustme", b"\x16\\1\xffrustme", der)
    assert count
    files.cert.write_text(ssl.DER_cert_to_PEM_cert(der))
    found = auth.read_certificates(tls(files))
    assert [each.setting for each in found.validity] == ["tls.client_ca_file"]
    assert "when the certificates in tls.cert_file expire cannot be read" in caplog.text


def test_there_is_none_to_name_without_tls() -> None:
    door = auth.Door(TlsSettings(), AccessSettings())
    door.name_faults()
    assert door.faults == []
    assert math.isnan(door.expiry("tls.cert_file"))


def test_a_check_names_a_certificate_that_has_expired_and_finds_the_rest_in_order(
    files: DoorFiles, tmp_path: Path
) -> None:
    _issued(files, days=-1)
    settings = [f"--set={each}" for each in (*files.settings(), f"store.path={tmp_path / 'data'}")]
    ended = run_child([sys.executable, "-m", "daemon.main", "--check", *settings])
    assert "a certificate in tls.cert_file expired at 20" in ended.stderr
    assert "configuration and store are in order" in ended.stderr
