"""A real daemon behind TLS that knows its clients by tokens and certificates."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tarry
import tarry.aio
from examples import processes
from tests.client._support.authority import Authority, replaced
from tests.client._support.fake_daemon import WAIT_S, receive
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

IDENTITY = """
[[identity]]
name = "{name}"
scopes = ["add", "dispatch"]
topic_prefixes = ["ours "]
tokens = [{tokens}]
"""


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A daemon and its files."""

    process: processes.DaemonProcess
    identities: Path
    tls: tarry.Tls
    socket: Path


def known_as(name: str, *tokens: str) -> str:
    """An identity in the file of identities."""
    hashes = ", ".join(f'"{hashlib.sha256(token.encode()).hexdigest()}"' for token in tokens)
    return IDENTITY.format(name=name, tokens=hashes)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority()
    issued = authority.issue("127.0.0.1")
    tls = tarry.Tls(replaced(folder / "ca.pem", authority.certificate))
    identities = replaced(folder / "identities.toml", known_as("gate", "g4te"))
    settings: dict[str, Any] = {
        "tls.cert_file": replaced(folder / "tls.crt", issued.chain),
        "tls.key_file": replaced(folder / "tls.key", issued.key),
        "access.identities_file": identities,
        "grpc.unix_socket": folder / "sock",
        **processes.local_store(folder / "root"),
    }
    with processes.DaemonProcess("tarryd", folder, settings, tls=tls) as process:
        process.start_serving()
        yield Guarded(process, identities, tls, folder / "sock")


@pytest.fixture
def ours(topic: str) -> str:
    """A topic that the identities may use."""
    return f"ours {topic}"


async def test_who_is_known_works_with_its_own_topics_and_no_others(
    guarded: Guarded, connect: Connect, ours: str
) -> None:
    for target, tls in ((guarded.process.address, guarded.tls), (f"unix:{guarded.socket}", None)):
        client = connect(target, timeout_s=WAIT_S, tls=tls, token="g4te")
        async with client.subscribe(ours, "sub", create=True) as subscription:
            async with client.add_stream(ours) as stream:
                await (await stream.add(1, [1, 2], delay_ms=0))
            received = await receive(subscription)
            with pytest.raises(tarry.PermissionDenied, match="theirs"):
                await client.subscribe("theirs", "sub")
            assert await subscription.ack(received) == 0
            assert subscription.streams_opened == 1, "what another subscription may not do is its own"
        with pytest.raises(tarry.PermissionDenied, match="theirs"):
            await client.add("theirs", 1, 1, delay_ms=0)
        with pytest.raises(tarry.PermissionDenied, match="needs the scope inspect, which identity gate has not"):
            await client.stats(ours)


async def test_who_is_not_known_is_told_so_by_every_kind_of_call(guarded: Guarded, connect: Connect, ours: str) -> None:
    for named in ({"token": "gu3ss"}, {}):
        client = connect(guarded.process.address, timeout_s=WAIT_S, tls=guarded.tls, **named)
        with pytest.raises(tarry.Unauthenticated):
            await client.add(ours, 1, 1, delay_ms=0)
        with pytest.raises(tarry.Unauthenticated):
            await client.subscribe(ours, "sub")
        with pytest.raises(tarry.Unauthenticated):
            async with client.add_stream(ours) as stream:
                await (await stream.add(1, 1, delay_ms=0))


async def test_a_token_is_replaced_while_a_subscription_is_open(
    guarded: Guarded, connect: Connect, ours: str, tmp_path: Path
) -> None:
    token_file = replaced(tmp_path / "token", "form3r")
    replaced(guarded.identities, known_as("gate", "g4te") + known_as("rotated", "form3r", "l4tter"))
    client = connect(guarded.process.address, timeout_s=WAIT_S, tls=guarded.tls, token_file=token_file)
    await until_known(client, ours, is_known=True)
    async with client.subscribe(ours, "sub", create=True) as subscription:
        replaced(token_file, "l4tter")
        replaced(guarded.identities, known_as("gate", "g4te") + known_as("rotated", "l4tter"))
        former = connect(guarded.process.address, timeout_s=WAIT_S, tls=guarded.tls, token="form3r")
        await until_known(former, ours, is_known=False)
        await client.add(ours, 2, 1, delay_ms=0)
        assert await subscription.ack(await receive(subscription)) == 0


async def until_known(client: tarry.aio.Client, topic: str, *, is_known: bool) -> None:
    """Waits until the daemon has read its file of identities again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await client.contains(topic, 1, 1)
                known = True
            except tarry.Unauthenticated:
                known = False
            if known is is_known:
                return
            await asyncio.sleep(0.05)
