"""TLS, certificates and tokens, on the way to daemons that want them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

import tarry
import tarry.aio
from tests._support import patience
from tests.client import conftest
from tests.client._support.authority import Authority, replaced
from tests.client._support.fake_daemon import (
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    accept,
    accept_all,
    confirm_all,
    messages,
    moved,
    one_batch,
    opened,
    receive,
    refuse,
    take,
)
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

Serve: TypeAlias = Callable[..., FakeDaemon]
TOKEN, ANOTHER = "v3ry-5ecret", "other-5ecret"
BEARER, BEARER_OF_ANOTHER = f"Bearer {TOKEN}", f"Bearer {ANOTHER}"
UNAUTHENTICATED = refuse(grpc.StatusCode.UNAUTHENTICATED, "the token is not known")
# The first failure is the last one.
ONCE = tarry.RetryPolicy(initial_s=1e9, max_s=1e9, uniform=lambda lowest_s, highest_s: highest_s)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return replaced(tmp_path / "token", TOKEN)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes a scripted daemon with the arguments of `FakeDaemon`, which adds."""
    with contextlib.ExitStack() as serving:

        def make(**named: Any) -> FakeDaemon:
            daemon = FakeDaemon(**named)
            serving.callback(daemon.stop)
            daemon.script("AddMessages", accept)
            daemon.script("StreamAddMessages", accept_all)
            return daemon

        yield make


def patient(**named: Any) -> dict[str, Any]:
    return {"timeout_s": WAIT_S, "retry_policy": conftest.AT_ONCE, **named}


async def add(client: tarry.aio.Client) -> None:
    assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1


async def check_not_connected(client: tarry.aio.Client, why: str) -> None:
    with pytest.raises(tarry.DeadlineExceeded, match=why) as failed:
        await add(client)
    assert isinstance(failed.value.last, tarry.Unavailable)


async def test_every_call_and_stream_goes_over_tls_and_shows_token_and_certificate(
    serve: Serve, connect: Connect, authority: Authority, ca_file: Path, token_file: Path, tmp_path: Path
) -> None:
    daemon = serve(credentials=authority.of_daemon(clients_of=authority))
    daemon.script("Subscribe", one_batch(range(0)))
    issued = authority.issue("gate", common_name="gate-7")
    tls = tarry.Tls(ca_file, replaced(tmp_path / "cert.pem", issued.chain), replaced(tmp_path / "key.pem", issued.key))
    client = connect(daemon.address, **patient(tls=tls, token_file=token_file))
    await add(client)
    async with client.add_stream("topic") as stream:
        await (await stream.add(1, 1, delay_ms=1))
    async with client.subscribe("topic", "sub"):
        pass
    asked = ("AddMessages", "GetVersion", "StreamAddMessages", "Subscribe")
    assert daemon.shown == [(name, BEARER, "gate-7") for name in asked]


async def test_a_daemon_that_another_authority_vouches_for_is_told_nothing(
    serve: Serve, connect: Connect, ca_file: Path
) -> None:
    daemon = serve(credentials=Authority().of_daemon())
    client = connect(daemon.address, tls=tarry.Tls(ca_file), token=TOKEN, retry_policy=ONCE)
    await check_not_connected(client, "CERTIFICATE_VERIFY_FAILED")
    await check_not_connected(connect(daemon.address, tls=tarry.Tls(), retry_policy=ONCE), "CERTIFICATE_VERIFY_FAILED")
    assert daemon.calls == []


async def test_a_daemon_of_another_name_is_told_nothing_unless_that_name_is_expected(
    serve: Serve, connect: Connect, authority: Authority, ca_file: Path
) -> None:
    daemon = serve(credentials=authority.of_daemon("tarry.example"))
    await check_not_connected(connect(daemon.address, tls=tarry.Tls(ca_file), retry_policy=ONCE), "Hostname")
    other = tarry.Tls(ca_file, server_name="other.example")
    await check_not_connected(connect(daemon.address, tls=other, retry_policy=ONCE), "Hostname")
    assert daemon.calls == []
    await add(connect(daemon.address, **patient(tls=tarry.Tls(ca_file, server_name="tarry.example"))))


async def test_a_daemon_that_wants_certificates_serves_nobody_else(
    serve: Serve, connect: Connect, authority: Authority, ca_file: Path, tmp_path: Path
) -> None:
    daemon = serve(credentials=authority.of_daemon(clients_of=authority))
    stranger = Authority().issue("gate")
    tls = tarry.Tls(
        ca_file, replaced(tmp_path / "cert.pem", stranger.chain), replaced(tmp_path / "key.pem", stranger.key)
    )
    for each in (None, tarry.Tls(ca_file), tls):
        await check_not_connected(connect(daemon.address, tls=each, retry_policy=ONCE), "failed to connect")
    assert daemon.calls == []


async def test_a_certificate_that_was_replaced_is_shown_from_the_next_call_on_and_the_open_stream_goes_on(
    serve: Serve, connect: Connect, authority: Authority, ca_file: Path, tmp_path: Path
) -> None:
    go_on = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(1))
        go_on.wait()
        yield messages(range(1, 2))
        yield from confirm_all(requests)

    daemon = serve(credentials=authority.of_daemon(clients_of=authority))
    daemon.script("Subscribe", step)
    former, latter = (authority.issue("gate", common_name=name) for name in ("former", "latter"))
    cert_file, key_file = replaced(tmp_path / "cert.pem", former.chain), replaced(tmp_path / "key.pem", former.key)
    client = connect(daemon.address, **patient(tls=tarry.Tls(ca_file, cert_file, key_file)))
    async with client.subscribe("topic", "sub") as subscription:
        await receive(subscription)
        replaced(cert_file, latter.chain)
        await add(client)
        replaced(key_file, latter.key)
        await add(client)
        go_on.open()
        assert await subscription.ack(await receive(subscription)) == 0
    assert daemon.shown == [
        ("GetVersion", None, "former"),
        ("Subscribe", None, "former"),
        ("AddMessages", None, "former"),
        ("AddMessages", None, "latter"),
    ]


def connections_to(daemon: FakeDaemon) -> int:
    """How many connections from here to the daemon are open."""
    port = int(daemon.address.rpartition(":")[2])
    # gRPC's sockets speak both versions of IP.
    lines = (line for version in ("tcp", "tcp6") for line in Path("/proc/net", version).read_text().splitlines())
    return sum(fields[2].endswith(f":{port:04X}") and fields[3] == "01" for fields in map(str.split, lines))


async def test_the_connection_of_a_certificate_that_was_replaced_is_closed_when_no_call_needs_it(
    serve: Serve, connect: Connect, authority: Authority, ca_file: Path
) -> None:
    daemon = serve(credentials=authority.of_daemon())
    client = connect(daemon.address, **patient(tls=tarry.Tls(ca_file)))
    for _ in range(5):
        await add(client)
        replaced(ca_file, authority.certificate)
    closed = functools.partial(patience.wait_until, lambda: connections_to(daemon) == 1, "one connection")
    await asyncio.to_thread(closed, timeout_s=WAIT_S)


async def test_a_daemon_of_a_new_authority_is_reached_when_the_file_names_it(
    serve: Serve, connect: Connect, ca_file: Path
) -> None:
    new = Authority()
    daemon = serve(credentials=new.of_daemon())
    client = connect(daemon.address, tls=tarry.Tls(ca_file), retry_policy=ONCE)
    await check_not_connected(client, "CERTIFICATE_VERIFY_FAILED")
    replaced(ca_file, new.certificate)
    await add(client)


async def test_a_token_that_was_replaced_is_shown_from_the_next_call_on(
    serve: Serve, connect: Connect, token_file: Path
) -> None:
    daemon = serve()
    client = connect(daemon.address, **patient(token_file=token_file))
    await add(client)
    replaced(token_file, ANOTHER)
    await add(client)
    assert [token for _, token, _ in daemon.shown] == [BEARER, BEARER_OF_ANOTHER]


async def test_a_call_whose_token_was_replaced_while_it_was_under_way_is_tried_again_with_the_new_one(
    serve: Serve, connect: Connect, token_file: Path
) -> None:
    def replace_and_refuse(request: Any, context: grpc.ServicerContext) -> Any:
        replaced(token_file, ANOTHER)
        return UNAUTHENTICATED(request, context)

    daemon = serve()
    daemon.script("AddMessages", replace_and_refuse, accept)
    await add(connect(daemon.address, **patient(token_file=token_file)))
    assert [token for _, token, _ in daemon.shown] == [BEARER, BEARER_OF_ANOTHER]


async def test_a_stream_whose_token_is_revoked_ends_unless_there_is_another_by_then(
    serve: Serve, connect: Connect, token_file: Path
) -> None:
    revoke = Gate()

    def revoked(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(1))
        revoke.wait()
        UNAUTHENTICATED(None, context)

    daemon = serve()
    daemon.script("Subscribe", revoked)
    subscription = await connect(daemon.address, **patient(token_file=token_file)).subscribe("topic", "sub")
    await receive(subscription)
    replaced(token_file, ANOTHER)
    revoke.open()
    await receive(subscription)
    revoke.open()
    with pytest.raises(tarry.Unauthenticated, match="the token is not known"):
        await receive(subscription)
    assert [token for name, token, _ in daemon.shown if name == "Subscribe"] == [BEARER, BEARER_OF_ANOTHER]


async def test_an_owner_that_a_daemon_names_is_verified_too_and_shown_the_token(
    serve: Serve, connect: Connect, authority: Authority, ca_file: Path
) -> None:
    owner = serve(credentials=authority.of_daemon())
    impostor = serve(credentials=Authority().of_daemon())
    daemon = serve(credentials=authority.of_daemon())

    def names(address: str) -> Callable[..., Any]:
        return refuse(grpc.StatusCode.FAILED_PRECONDITION, "not mine", owner_address=address)

    daemon.script("AddMessages", names(owner.address), names(impostor.address))
    await add(connect(daemon.address, **patient(tls=tarry.Tls(ca_file), token=TOKEN)))
    assert owner.shown == [("AddMessages", BEARER, None)]
    client = connect(daemon.address, tls=tarry.Tls(ca_file), token=TOKEN, retry_policy=ONCE)
    await check_not_connected(client, "CERTIFICATE_VERIFY_FAILED")
    assert impostor.calls == []


async def test_the_token_is_not_sent_to_an_owner_elsewhere_without_tls(serve: Serve, connect: Connect) -> None:
    def moving(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield moved("10.0.0.1:7461")

    daemon = serve()
    daemon.script("AddMessages", refuse(grpc.StatusCode.FAILED_PRECONDITION, "not mine", owner_address="10.0.0.1:7461"))
    daemon.script("Subscribe", moving)
    client = connect(daemon.address, **patient(token=TOKEN))
    refusal = "the token is not sent to 10.0.0.1:7461 without TLS"
    with pytest.raises(tarry.InvalidArgument, match=refusal):
        await add(client)
    subscription = await client.subscribe("another topic", "sub")
    with pytest.raises(tarry.InvalidArgument, match=refusal):
        await receive(subscription)


async def test_a_daemon_of_before_is_reached_over_tls_with_a_token(
    serve: Serve, connect: Connect, authority: Authority, ca_file: Path
) -> None:
    daemon = serve(credentials=authority.of_daemon())
    daemon.script("GetVersion", refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown method GetVersion"))
    daemon.script("Subscribe", one_batch(range(1)))
    client = connect(daemon.address, **patient(tls=tarry.Tls(ca_file), token=TOKEN))
    async with client.subscribe("topic", "sub") as subscription:
        assert await subscription.ack(await receive(subscription)) == 0


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_refusal_is_raised_at_once_in_the_daemon_s_words(
    serve: Serve, connect: Connect, code: grpc.StatusCode
) -> None:
    kind = {"UNAUTHENTICATED": tarry.Unauthenticated, "PERMISSION_DENIED": tarry.PermissionDenied}[code.name]
    daemon = serve()
    for method in ("AddMessages", "Subscribe"):
        daemon.script(method, refuse(code, "the identity lacks the scope add"))
    client = connect(daemon.address, **patient(token=TOKEN))
    with pytest.raises(kind, match="the identity lacks the scope add"):
        await add(client)
    with pytest.raises(kind, match="the identity lacks the scope add"):
        await client.subscribe("topic", "sub")
    assert (daemon.count("AddMessages"), daemon.count("Subscribe")) == (1, 1)


async def test_a_daemon_that_does_not_know_who_asks_is_asked_nothing_else(serve: Serve, connect: Connect) -> None:
    daemon = serve()
    daemon.script("GetVersion", UNAUTHENTICATED)
    client = connect(daemon.address, **patient(token=TOKEN))
    with pytest.raises(tarry.Unauthenticated, match="the token is not known"):
        await client.subscribe("topic", "sub")
    with pytest.raises(tarry.Unauthenticated, match="the token is not known"):
        await client.add("topic", 1, 1, delay_ms=1, on_invalid=tarry.OnInvalid.RETURN)
    with pytest.raises(tarry.Unauthenticated, match="the token is not known"):
        async with client.add_stream("topic") as stream:
            await (await stream.add(1, 1, delay_ms=1))
    assert {name for name, _ in daemon.calls} == {"GetVersion"}
    assert daemon.count("GetVersion") == 3


async def test_a_unix_socket_takes_a_token(serve: Serve, connect: Connect, tmp_path: Path, ca_file: Path) -> None:
    daemon = serve(address=f"unix:{tmp_path}/s")
    await add(connect(daemon.address, **patient(tls=tarry.Tls(ca_file), token=TOKEN)))
    assert daemon.shown == [("AddMessages", BEARER, None)]


async def test_no_proxy_gets_what_goes_to_loopback(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    daemon = serve()
    await add(connect(daemon.address, timeout_s=WAIT_S, token=TOKEN, retry_policy=ONCE))
    assert daemon.shown == [("AddMessages", BEARER, None)]
