"""A relay reaches brokers by TLS, shows a certificate and a password, and is refused without the right ones."""

from __future__ import annotations

import contextlib
import dataclasses
import ssl
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from examples import processes
from tarry_relay import port, relay_settings, sessions
from tests.brokers import nats_server, redis_server
from tests.client._support.authority import Authority

FILES = ("ca", "server.crt", "server.key", "client.crt", "client.key", "password", "wrong")


@dataclasses.dataclass(frozen=True)
class Files:
    """Certificates of a broker and of a relay, and passwords."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def make(self) -> None:
        authority = Authority()
        server, client = authority.issue("127.0.0.1"), authority.issue("relay@example.org")
        contents = (authority.certificate, server.chain, server.key, client.chain, client.key, b"secret\n", b"guess")
        for name, content in zip(FILES, contents, strict=True):
            (self.folder / name).write_bytes(content)
        (self.folder / "other-ca").write_bytes(Authority().certificate)

    def settings(self, kind: str, url: str, *, timeout_s: int = 60, **instead: str) -> relay_settings.Settings:
        shown = {
            "user": "relay",
            "password_file": self.path("password"),
            "ca_file": self.path("ca"),
            "cert_file": self.path("client.crt"),
            "key_file": self.path("client.key"),
        }
        fields = "\n".join(f'broker.{name} = "{value}"' for name, value in (shown | instead).items())
        file = self.folder / "relay.toml"
        file.write_text(
            f'broker.kind = "{kind}"\nbroker.url = "{url}"\nbroker.timeout_s = {timeout_s}\n{fields}\n'
            'relay = { topic = "orders" }\nsource = { name = "orders", dead_letters = "dead" }\n'
            'targets = [{ name = "due" }]\ndaemon.address = "127.0.0.1:1"\n'
        )
        return relay_settings.load(file)


@contextlib.contextmanager
def serving_nats(files: Files, directory: Path) -> Iterator[str]:
    if (program := nats_server.find()) is None:
        pytest.skip(nats_server.MISSING)
    tls = ("--tls", "--tlsverify", f"--tlscert={files.path('server.crt')}", f"--tlskey={files.path('server.key')}")
    more = (*tls, f"--tlscacert={files.path('ca')}", "--user=relay", "--pass=secret")
    with nats_server.NatsServer(program, directory, more) as server:
        server.start()
        server.wait_until_loaded()
        yield server.url.replace("nats:", "tls:")


@contextlib.contextmanager
def serving_redis(files: Files, directory: Path) -> Iterator[str]:
    if (program := redis_server.find()) is None:
        pytest.skip(redis_server.MISSING)
    tls_port = processes.free_port()
    more = (
        *("--tls-port", str(tls_port), "--tls-cert-file", files.path("server.crt")),
        *("--tls-key-file", files.path("server.key"), "--tls-ca-cert-file", files.path("ca")),
        *("--user", "relay", "on", ">secret", "~*", "&*", "+@all"),
    )
    with redis_server.RedisServer(program, directory, more=more) as server:
        server.start()
        try:
            server.wait_until_loaded()
        except processes.ProcessFailed as failure:
            if "'tls-port" not in str(failure) or "Bad directive" not in str(failure):
                raise
            pytest.skip(f"Redis with TLS: not run, since {program} is made without it")
        yield f"rediss://127.0.0.1:{tls_port}"


async def make_streams(files: Files, url: str) -> None:
    """Of NATS. Redis makes them."""
    context = ssl.create_default_context(cafile=files.path("ca"))
    context.load_cert_chain(files.path("client.crt"), files.path("client.key"))
    async with await nats.connect(url, tls=context, user="relay", password="secret") as connection:
        await connection.jetstream().add_stream(name="due", subjects=["due"])


@pytest.mark.parametrize("kind", ["nats", "redis"])
async def test_a_broker_is_reached_by_tls_with_what_the_file_shows_and_not_with_less(tmp_path: Path, kind: str) -> None:
    files = Files(tmp_path)
    files.make()
    directory = tmp_path / "broker"
    directory.mkdir()
    with (serving_nats if kind == "nats" else serving_redis)(files, directory) as url:
        if kind == "nats":
            await make_streams(files, url)
        async with sessions.opened(files.settings(kind, url)) as opened:
            outgoing = [port.Outgoing("due", None, {"n": "1"}, "id 1")]
            assert await opened.broker.output.produce(outgoing) == [port.Produced()]
        for wrong in ({"ca_file": files.path("other-ca")}, {"password_file": files.path("wrong")}):
            with pytest.raises(port.Unreachable):
                async with sessions.opened(files.settings(kind, url, timeout_s=3, **wrong)):
                    pass
