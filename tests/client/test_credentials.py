"""What a client shows, made of files, and where a token may be sent."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

import tarry
from tarry import credentials
from tests.client._support.authority import Authority, replaced

TOKEN = "v3ry-5ecret"
HERE = "127.0.0.1:7461"
ELSEWHERE = "10.0.0.1:7461"


def token_of(shows: credentials.Credentials, target: str = HERE) -> str | None:
    return dict(shows.shown_to(target).metadata).get("authorization")


@pytest.mark.parametrize(
    "target",
    [
        HERE,
        "127.9.9.9:1",
        "localhost:7461",
        "localhost",
        "[::1]:7461",
        "[::1]",
        "::1",
        "dns:127.0.0.1:7461",
        "dns:///localhost:7461",
        "ipv4:127.0.0.1:7461,127.0.0.2:7461",
        "ipv6:[::1]:7461",
        "unix:/run/tarry.sock",
        "unix:///run/tarry.sock",
        "unix-abstract:tarry",
    ],
)
def test_loopback_and_unix_sockets_are_of_this_machine(target: str) -> None:
    assert credentials.is_of_this_machine(target)
    assert token_of(credentials.Credentials(token=TOKEN), target) == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    "target",
    [
        ELSEWHERE,
        "0.0.0.0:7461",
        "[::]:7461",
        "tarry.example:7461",
        "localhost.example:7461",
        "127.0.0.1.example:7461",
        "evil@127.0.0.1:7461",
        "dns://10.0.0.1/localhost:7461",
        "ipv4:127.0.0.1:7461,10.0.0.1:7461",
        "vsock:2:7461",
        "xds:///127.0.0.1:7461",
        "",
    ],
)
def test_every_other_target_gets_a_token_over_tls_alone(target: str, ca_file: Path) -> None:
    assert not credentials.is_of_this_machine(target)
    shows = credentials.Credentials(token=TOKEN)
    with pytest.raises(tarry.InvalidArgument, match=r"the token is not sent to .* without TLS") as refused:
        shows.shown_to(target)
    assert TOKEN not in str(refused.value)
    over_tls = credentials.Credentials(tarry.Tls(ca_file=ca_file), token=TOKEN)
    assert token_of(over_tls, target) == f"Bearer {TOKEN}"


def test_without_a_token_everything_is_as_it_was() -> None:
    assert credentials.Credentials().shown_to(ELSEWHERE) == credentials.Shown(None, ())


@pytest.mark.parametrize("kind", [tarry.Client, tarry.aio.Client])
def test_a_client_is_not_made_where_its_token_could_be_read(kind: type[tarry.Client]) -> None:
    with pytest.raises(tarry.InvalidArgument, match=r"the token is not sent to 10.0.0.1:7461 without TLS"):
        kind(ELSEWHERE, token=TOKEN)


def test_a_unix_socket_is_not_encrypted_and_other_addresses_of_the_same_client_are(ca_file: Path) -> None:
    shows = credentials.Credentials(tarry.Tls(ca_file=ca_file))
    assert shows.shown_to("unix:/run/tarry.sock").channel is None
    assert shows.shown_to(HERE).channel is not None


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = replaced(tmp_path / "token", f"{TOKEN}\n")
    shows = credentials.Credentials(token_file=file)
    before = shows.shown_to(HERE)
    assert shows.shown_to(HERE) == before
    assert token_of(shows) == f"Bearer {TOKEN}"
    replaced(file, "another\n")
    assert token_of(shows) == "Bearer another"
    assert shows.shown_to(HERE) != before


def test_certificates_are_read_again_when_they_change_and_not_when_only_the_token_does(
    tmp_path: Path, ca_file: Path
) -> None:
    token_file = replaced(tmp_path / "token", TOKEN)
    shows = credentials.Credentials(tarry.Tls(ca_file=ca_file), token_file=token_file)
    channel = shows.shown_to(HERE).channel
    replaced(token_file, "another")
    assert shows.shown_to(HERE).channel is channel
    replaced(ca_file, Authority().certificate)
    assert shows.shown_to(HERE).channel is not channel


def test_what_is_half_replaced_or_gone_leaves_what_was_read_in_use(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    former, latter = authority.issue("client"), authority.issue("client")
    cert_file = replaced(tmp_path / "cert.pem", former.chain)
    key_file = replaced(tmp_path / "key.pem", former.key)
    token_file = replaced(tmp_path / "token", TOKEN)
    shows = credentials.Credentials(tarry.Tls(cert_file=cert_file, key_file=key_file), token_file=token_file)
    before = shows.shown_to(HERE)
    with caplog.at_level(logging.WARNING, "tarry"):
        replaced(cert_file, latter.chain)
        token_file.unlink()
        assert shows.shown_to(HERE) == before
        assert shows.shown_to(HERE) == before
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        f"cert_file '{cert_file}' and key_file '{key_file}' are no certificate in PEM and its key without a password",
        f"token_file '{token_file}' cannot be read",
    ]
    replaced(key_file, latter.key)
    replaced(token_file, "another")
    assert shows.shown_to(HERE).channel is not before.channel
    assert token_of(shows) == "Bearer another"


def test_a_token_from_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_text, args=(TOKEN,))
    writing.start()
    shows = credentials.Credentials(token_file=pipe)
    writing.join()
    assert token_of(shows) == token_of(shows) == f"Bearer {TOKEN}"


@pytest.mark.parametrize("text", ["", "\n", "two words", "two\nlines", "ä", "x" * 4_097])
def test_what_is_no_token_is_refused_without_telling_it(tmp_path: Path, text: str) -> None:
    file = replaced(tmp_path / "token", text)
    with pytest.raises(tarry.InvalidArgument, match=r"token_file .* has no token of 1 to 4096 printable") as refused:
        credentials.Credentials(token_file=file)
    with pytest.raises(tarry.InvalidArgument, match=r"^INVALID_ARGUMENT: token has no token"):
        credentials.Credentials(token=text)
    assert "two" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(tarry.InvalidArgument, match=r"token_file '.*missing' cannot be read: No such file"):
        credentials.Credentials(token_file=missing)
    with pytest.raises(tarry.InvalidArgument, match=r"ca_file '.*missing' cannot be read: No such file"):
        credentials.Credentials(tarry.Tls(ca_file=missing))


def test_what_is_no_certificate_or_not_its_key_is_named(tmp_path: Path, authority: Authority) -> None:
    wrong = replaced(tmp_path / "wrong", "wrong")
    with pytest.raises(tarry.InvalidArgument, match=r"ca_file '.*wrong' is no certificate in PEM"):
        credentials.Credentials(tarry.Tls(ca_file=wrong))
    cert_file = replaced(tmp_path / "cert.pem", authority.issue("client").chain)
    key_file = replaced(tmp_path / "key.pem", authority.issue("client").key)
    with pytest.raises(tarry.InvalidArgument, match=r"cert_file '.*cert.pem' and key_file '.*key.pem' are no"):
        credentials.Credentials(tarry.Tls(cert_file=cert_file, key_file=key_file))


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(tarry.InvalidArgument, match="cert_file is given without key_file"):
        tarry.Tls(cert_file="cert.pem")
    with pytest.raises(tarry.InvalidArgument, match="key_file is given without cert_file"):
        tarry.Tls(key_file="key.pem")
    with pytest.raises(tarry.InvalidArgument, match="server_name is ''"):
        tarry.Tls(server_name="")
    with pytest.raises(tarry.InvalidArgument, match="a client has one token"):
        credentials.Credentials(token=TOKEN, token_file="token")


def test_without_a_file_of_authorities_those_of_this_system_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    monkeypatch.setattr(credentials, "_SYSTEM_ROOTS", (str(tmp_path / "missing"),))
    assert credentials._system_roots() is None, "gRPC's own"
    known = replaced(tmp_path / "roots.pem", Authority().certificate)
    monkeypatch.setattr(credentials, "_SYSTEM_ROOTS", (str(tmp_path / "missing"), str(known)))
    assert credentials._system_roots() == str(known)
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "/named/for/grpc")
    assert credentials._system_roots() is None
    assert credentials.Credentials(tarry.Tls()).shown_to(ELSEWHERE).channel is not None


def test_a_token_is_in_no_repr() -> None:
    shows = credentials.Credentials(token=TOKEN)
    with tarry.Client(HERE, token=TOKEN) as client:
        for each in (shows, shows.shown_to(HERE), client, client._connections, client._connections.connect(HERE)):
            assert TOKEN not in repr(each)
