"""TLS, mutual TLS and the Unix socket of the gRPC server, and files that change under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import trustme

from daemon import auth, call_values, config
from daemon.auth import Scope, hash_of
from daemon.owner.engine import Engine
from tarry.v1 import cluster_pb2, delayed_delivery_pb2
from tests._support.door_files import DoorFiles, door_files, identity, token_of
from tests.daemon.grpc_services.conftest import Edge, admission_of, serving
from tests.daemon.grpc_services.test_server import hints_of

TIMEOUT_S = 300
STREAMS = 8
CHANGES = 5
# Answers of each stream between two changes.
ANSWERS = 20


@pytest.fixture
def files(tmp_path: Path) -> DoorFiles:
    return door_files(tmp_path, identity("a", list(Scope), [""]))


def settings_of(*overrides: str) -> config.Config:
    return config.load(environment={}, overrides=["grpc.listen=127.0.0.1:0", "grpc.drain_s=0", *overrides])


@contextlib.asynccontextmanager
async def watched(engine: Engine, settings: config.Config) -> AsyncIterator[Edge]:
    """An edge whose files are looked at all the time, as a daemon does every second."""
    let_in = admission_of(settings)
    async with serving(engine, settings, let_in) as edge:
        watching = asyncio.create_task(
            let_in.door.watch(changed=let_in.identities_changed, refused=lambda kind, refused: None)
        )
        try:
            yield edge
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def version(channel: grpc.aio.Channel, token: str | None) -> grpc.StatusCode:
    """How a call ends that any identity may make."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    call: Any = channel.unary_unary("/tarry.v1.Cluster/GetVersion")
    made = call(cluster_pb2.GetVersionRequest().SerializeToString(), timeout=TIMEOUT_S, metadata=metadata)
    return cast(grpc.StatusCode, await made.code())


def shown_certificate(port: int, files: DoorFiles) -> str:
    """What a new connection is shown, PEM."""
    return ssl.get_server_certificate(("localhost", port), ca_certs=str(files.ca), timeout=TIMEOUT_S)


class Adding:
    """A stream of adds, one after the other until it is told to end."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        opening: Any = channel.stream_stream("/tarry.v1.DelayedDelivery/StreamAddMessages")
        self._call = opening(metadata=(("authorization", f"Bearer {token}"),))
        self.ending = False
        self.answered = 0

    async def run(self) -> grpc.StatusCode:
        for request_id in itertools.count(1):
            if self.ending:
                break
            add = delayed_delivery_pb2.AddMessagesRequest(
                topic="t", ledger_id=[1], entry_id=[request_id], delay_ms=[60_000]
            )
            request = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=request_id, add=add)
            await self._call.write(request.SerializeToString())
            answer = delayed_delivery_pb2.StreamAddMessagesResponse.FromString(await self._call.read())
            assert answer.request_id == request_id
            self.answered += 1
        await self._call.done_writing()
        return cast(grpc.StatusCode, await self._call.code())


async def test_no_stream_is_dropped_when_certificate_and_tokens_change_under_load(
    engine: Engine, files: DoorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "LOOK_EVERY_S", 0.01)
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    async with contextlib.AsyncExitStack() as stack:
        edge = await stack.enter_async_context(watched(engine, settings_of(*files.settings())))
        channel = await stack.enter_async_context(grpc.aio.secure_channel(f"localhost:{edge.port}", credentials))
        streams = [Adding(channel, token_of("a")) for _ in range(STREAMS)]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        for number in range(CHANGES):
            further = hash_of(f"further-{number}")
            files.issue()
            files.admit(identity("a", list(Scope), [""], tokens=[hash_of(token_of("a")), further]))
            async with asyncio.timeout(TIMEOUT_S):
                before = [stream.answered for stream in streams]
                while await asyncio.to_thread(shown_certificate, edge.port, files) != files.cert.read_text():
                    assert not [task for task in running if task.done()]
                while await version(channel, f"further-{number}") is not grpc.StatusCode.OK:
                    pass
                while min(stream.answered - was for stream, was in zip(streams, before, strict=True)) < ANSWERS:
                    await version(channel, token_of("a"))
        for stream in streams:
            stream.ending = True
        assert await asyncio.gather(*running) == [grpc.StatusCode.OK] * STREAMS


async def test_a_certificate_that_is_wrong_changes_nothing(
    engine: Engine, files: DoorFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "LOOK_EVERY_S", 0.01)
    settings = settings_of(*files.settings())
    let_in = admission_of(settings)
    refused: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    async with serving(engine, settings, let_in) as edge:
        before = files.cert.read_text()
        watching = asyncio.create_task(
            let_in.door.watch(changed=lambda: None, refused=lambda *told: refused.put_nowait(told))
        )
        files.key.write_text("no key")
        assert await asyncio.wait_for(refused.get(), TIMEOUT_S) == ("certificates", True)
        assert await asyncio.to_thread(shown_certificate, edge.port, files) == before
        assert "certificates in force stay as they were: tls.cert_file" in caplog.text
        files.issue()
        assert await asyncio.wait_for(refused.get(), TIMEOUT_S) == ("certificates", False)
        assert await asyncio.to_thread(shown_certificate, edge.port, files) == files.cert.read_text()
        watching.cancel()


async def test_the_name_of_a_clients_certificate_shows_who_it_is(engine: Engine, files: DoorFiles) -> None:
    files.admit(identity("of-certificate", [], ["x/"], certificates=["gate.example"]), identity("of-token", [], []))
    async with serving(engine, settings_of(*files.settings(mutual=True))) as edge:

        async def outcome(authority: trustme.CA | None, name: str, token: str | None = None) -> grpc.StatusCode:
            pair = []
            if authority is not None:
                issued = authority.issue_cert(name)
                pair = [issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()]
            credentials = grpc.ssl_channel_credentials(files.ca.read_bytes(), *pair)
            async with grpc.aio.secure_channel(f"localhost:{edge.port}", credentials) as channel:
                return await version(channel, token)

        assert await outcome(files.authority, "gate.example") is grpc.StatusCode.OK
        assert await outcome(files.authority, "other.example") is grpc.StatusCode.UNAUTHENTICATED
        assert await outcome(files.authority, "other.example", token_of("of-token")) is grpc.StatusCode.OK
        # A token that is wrong is not passed over for a certificate that is right.
        assert await outcome(files.authority, "gate.example", "unknown") is grpc.StatusCode.UNAUTHENTICATED
        assert await outcome(trustme.CA(), "gate.example") is grpc.StatusCode.UNAVAILABLE
        assert await outcome(None, "") is grpc.StatusCode.UNAVAILABLE


async def test_a_plain_client_reaches_nothing_behind_tls(engine: Engine, files: DoorFiles) -> None:
    async with serving(engine, settings_of(*files.settings())) as edge:
        assert await version(edge.caller.channel, token_of("a")) is grpc.StatusCode.UNAVAILABLE


async def test_a_unix_socket_is_served_beside_tls_and_needs_a_token_too(engine: Engine, files: DoorFiles) -> None:
    path = files.folder / "tarryd.sock"
    settings = settings_of(*files.settings(), f"grpc.unix_socket={path}")
    for _ in range(2):
        async with serving(engine, settings), grpc.aio.insecure_channel(f"unix:{path}") as channel:
            assert await version(channel, token_of("a")) is grpc.StatusCode.OK
            assert await version(channel, None) is grpc.StatusCode.UNAUTHENTICATED


async def test_with_identities_the_reason_of_health_is_for_the_unix_socket_alone(
    engine: Engine, files: DoorFiles
) -> None:
    path = files.folder / "tarryd.sock"
    settings = settings_of(f"access.identities_file={files.identities}", f"grpc.unix_socket={path}")
    async with serving(engine, settings) as edge, grpc.aio.insecure_channel(f"unix:{path}") as own:
        engine._set_health(call_values.Health(serving=False, reason="waiting for daemon north", stands_by=True))
        assert await hints_of(own) == {"stands-by": "1", "reason-bin": b"waiting for daemon north"}
        assert await hints_of(edge.caller.channel) == {"stands-by": "1"}


async def test_a_unix_socket_that_cannot_be_made_is_named_with_the_reason(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match=r"grpc.unix_socket: /nowhere/tarryd.sock cannot be bound: No such file"):
        async with serving(engine, settings_of("grpc.unix_socket=/nowhere/tarryd.sock")):
            pass
    assert capfd.readouterr().err == "", "gRPC prints nothing of its own"
