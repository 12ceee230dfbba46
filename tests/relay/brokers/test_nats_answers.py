"""A real NATS gives each known answer to a publish, and the table says what it means.

Not provoked, and why: `10120` needs accounts with tiers, which an operator signs. `10158` is a race within a cluster.
`10077 store is closed` and `10077 snapshot in progress` are moments of a server that stops or copies a stream.
`10077 no space left on device` is said by older servers only; this one answers nothing, which is `timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.js.api
import pytest

from examples import processes
from tarry_relay import nats_answers, nats_broker, nats_client, port, relay_settings
from tarry_relay.port import Cause, Meaning, Meant
from tests.brokers import nats_server

NOT_PROVOKED = {
    "10120",
    "10158",
    "10077 store is closed",
    "10077 snapshot in progress",
    "10077 no space left on device",
}
LIMIT = Meant(Meaning.NOT_NOW, Cause.LIMIT)
REFUSED = Meant(Meaning.REFUSED)
CONFIGURATION = """
max_payload: 40MB
jetstream { max_file_store: 300MB, max_buffered_msgs: 10000 }
accounts {
  ALL {
    jetstream: enabled
    users = [
      { user: all, password: all },
      { user: relay, password: relay, permissions: { publish: { deny: ["Denied.>"] } } }
    ]
  }
  SMALL { jetstream: { max_store: 1MB }, users = [{ user: small, password: small }] }
}
no_auth_user: all
"""
STREAMS: dict[str, dict[str, Any]] = {
    "small": {"max_msg_size": 100_000},
    "plain": {},
    "counter": {"allow_msg_counter": True},
    "bytes": {"max_bytes": 1_000, "discard": "new"},
    "messages": {"max_msgs": 1, "discard": "new"},
    "by_subject": {"max_msgs": 10, "max_msgs_per_subject": 1, "discard": "new", "discard_new_per_subject": True},
    "sealed": {"sealed": True},
    "silent": {"no_ack": True},
    "denied": {"subjects": ["Denied.x", "denied.x"]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nats_server.NatsServer]:
    program = nats_server.find()
    if program is None:
        pytest.skip(nats_server.MISSING)
    directory = tmp_path_factory.mktemp("nats")
    file = directory / "nats.conf"
    file.write_text(CONFIGURATION)
    with nats_server.NatsServer(program, directory, ("--config", str(file))) as made:
        made.start()
        made.wait_until_loaded()
        yield made


@pytest.fixture
async def admin(server: nats_server.NatsServer) -> AsyncIterator[Any]:
    """A client that makes streams, of which tests of this module find those of `STREAMS`."""
    async with contextlib.AsyncExitStack() as stack:
        connection = await nats.connect(server.url)
        stack.push_async_callback(connection.close)
        for name, config in STREAMS.items():
            made = await api(connection, f"STREAM.INFO.{name}")
            if "error" in made:
                await make_stream(connection, name, config)
        yield connection


async def api(connection: Any, call: str, asked: object = None, timeout_s: float = 300) -> dict[str, Any]:
    data = b"" if asked is None else json.dumps(asked).encode()
    told: dict[str, Any] = json.loads((await connection.request(f"$JS.API.{call}", data, timeout=timeout_s)).data)
    return told


async def make_stream(connection: Any, name: str, config: dict[str, Any], timeout_s: float = 300) -> None:
    sealed = {"sealed": True} if config.get("sealed") else None
    whole = {"name": name, "subjects": [name], "duplicate_window": 60 * 10**9, "allow_direct": True, **config}
    whole.pop("sealed", None)
    told = await api(connection, f"STREAM.CREATE.{name}", whole, timeout_s)
    if sealed is not None:
        told = await api(connection, f"STREAM.UPDATE.{name}", {**told["config"], **sealed})
    assert "error" not in told, told


@contextlib.asynccontextmanager
async def opened(server: nats_server.NatsServer, user: str = "relay", **more: Any) -> AsyncIterator[Any]:
    """The adapter, as a user whose password is its name."""
    url = server.url.replace("//", f"//{user}:{user}@")
    broker = relay_settings.Nats(url=url, **{"timeout_s": 30.0, **more})
    settings = relay_settings.Settings(
        relay=relay_settings.Relay(topic="orders"), source=relay_settings.Source(name="plain"), broker=broker
    )
    async with nats_broker.opened(settings, broker) as made:
        yield made


def outgoing(target: str, number: int = 1, *, size: int = 1, block: bytes = b"") -> port.Outgoing:
    return port.Outgoing(target, nats_client.message_of(block, b"x" * size), {"n": str(number)}, f"{target} {number}")


async def answers_of(output: Any, *messages: port.Outgoing) -> list[port.Produced]:
    return [each for message in messages for each in await output.produce([message])]


def means(produced: port.Produced, code: str, meant: Meant) -> bool:
    assert produced.code == code, produced
    assert nats_answers.KNOWN[code] == produced.meant == meant
    return True


async def test_what_is_taken(server: nats_server.NatsServer, admin: Any) -> None:
    async with opened(server) as adapter:
        for _ in range(2):
            assert await adapter.output.produce([outgoing("plain")]) == [port.Produced()]
    assert (await api(admin, "STREAM.INFO.plain"))["state"]["messages"] == 1


@pytest.mark.parametrize(
    ("message", "code", "meant"),
    [
        (outgoing("plain", size=40 * 2**20), nats_answers.MAX_PAYLOAD, REFUSED),
        (outgoing("small", size=100_001), "10054", REFUSED),
        (outgoing("plain", 2, block=b"NATS/1.0\r\na: " + b"b" * 65_600 + b"\r\n\r\n"), "10097", REFUSED),
        (outgoing("plain", 3, size=33 * 2**20), "10077 message too large", REFUSED),
        (outgoing("counter"), "10169", REFUSED),
        (outgoing("bytes", size=1_000), "10077 maximum bytes exceeded", LIMIT),
        (outgoing("sealed"), "10109", Meant(Meaning.NOT_NOW)),
        (outgoing("nowhere"), nats_answers.NO_STREAM, Meant(Meaning.NOT_NOW, Cause.MISSING)),
    ],
)
@pytest.mark.usefixtures("admin")
async def test_a_message_that_is_refused(
    server: nats_server.NatsServer, message: port.Outgoing, code: str, meant: Meant
) -> None:
    async with opened(server) as adapter:
        refused, taken = await adapter.output.produce([message, outgoing("by_subject", 1)])
        assert means(refused, code, meant)
        assert refused.text.startswith(f"{message.target}: ")
        assert "\n" not in refused.text
        assert taken.is_taken


@pytest.mark.parametrize(
    ("target", "code"),
    [("messages", "10077 maximum messages exceeded"), ("by_subject", "10077 maximum messages per subject exceeded")],
)
@pytest.mark.usefixtures("admin")
async def test_a_stream_that_is_full(server: nats_server.NatsServer, target: str, code: str) -> None:
    async with opened(server) as adapter:
        first, second = await answers_of(adapter.output, outgoing(target, 1), outgoing(target, 2))
        assert first.is_taken
        assert means(second, code, LIMIT)


async def test_an_account_that_is_full(server: nats_server.NatsServer) -> None:
    connection = await nats.connect(server.url.replace("//", "//small:small@"))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(connection.close)
        await make_stream(connection, "plain", {})
        async with opened(server, "small") as adapter:
            many = [outgoing("plain", number, size=200_000) for number in range(8)]
            *_, last = await answers_of(adapter.output, *many)
            assert means(last, "10002", LIMIT)


async def test_a_server_that_is_full(server: nats_server.NatsServer, admin: Any) -> None:
    await make_stream(admin, "filling", {})
    try:
        async with opened(server) as adapter:
            many = [outgoing("filling", number, size=30 * 2**20) for number in range(12)]
            *_, last = await answers_of(adapter.output, *many)
            assert means(last, "10023", LIMIT)
    finally:
        await api(admin, "STREAM.DELETE.filling")


async def test_a_server_that_is_asked_too_much(tmp_path: Path) -> None:
    program = nats_server.find()
    if program is None:
        pytest.skip(nats_server.MISSING)
    file = tmp_path / "nats.conf"
    file.write_text("jetstream { max_buffered_msgs: 1 }")
    with nats_server.NatsServer(program, tmp_path, ("--config", str(file))) as made:
        made.start()
        made.wait_until_loaded()
        connection = await nats.connect(made.url)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            await make_stream(connection, "plain", {})
            async with opened(made, "any", in_flight=1_000) as adapter:
                async with asyncio.timeout(300):
                    found: set[str] = set()
                    for first in range(0, 10**9, 500):
                        some = [outgoing("plain", number) for number in range(first, first + 500)]
                        found |= {each.code for each in await adapter.output.produce(some)}
                        if "10167" in found:
                            break
                assert found <= {"", "10167"}
                assert nats_answers.KNOWN["10167"] == LIMIT


async def test_a_permission_that_the_user_does_not_have(server: nats_server.NatsServer, admin: Any) -> None:
    """Others of the batch are taken, also one whose subject differs in the case of its letters alone."""
    assert (await api(admin, "STREAM.INFO.denied"))["config"]["subjects"]
    async with opened(server) as adapter:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        denied, other, taken = await adapter.output.produce(
            [outgoing("Denied.x"), outgoing("denied.x"), outgoing("plain", 9)]
        )
        assert loop.time() - began_s < adapter._client.timeout_s / 2
        assert means(denied, nats_answers.DENIED, LIMIT)
        assert other.is_taken
        assert taken.is_taken


async def test_a_service_that_answers_for_a_stream_is_not_believed(server: nats_server.NatsServer, admin: Any) -> None:
    told = [b"", b"ok", b"[]", b'{"stream": "x", "seq": 1}', b'{"stream": "silent", "seq": 0}', b'{"seq": 1}']
    told += [b'{"stream": "silent"}', b'{"error": {"code": 400, "err_code": 10054}}', b"[" * 100_000]

    async def answer(message: Any) -> None:
        await message.respond(told[int(message.headers["n"])])

    await admin.subscribe("silent", cb=answer)
    await admin.subscribe("nowhere", cb=answer)
    async with opened(server, timeout_s=1.0) as adapter:
        for produced in await adapter.output.produce([outgoing("silent", number) for number in range(len(told))]):
            assert means(produced, nats_answers.NOT_JETSTREAM, Meant(Meaning.UNKNOWN))
        for produced in await adapter.output.produce([outgoing("nowhere", number) for number in range(len(told))]):
            assert means(produced, nats_answers.NO_STREAM, Meant(Meaning.NOT_NOW, Cause.MISSING))


async def test_a_service_beside_a_stream_does_not_hide_that_the_stream_has_taken_it(
    server: nats_server.NatsServer, admin: Any
) -> None:
    async def answer(message: Any) -> None:
        await message.respond(b"ok")

    await admin.subscribe("plain", cb=answer)
    async with opened(server) as adapter:
        produced = await adapter.output.produce([outgoing("plain", number) for number in range(100, 200)])
        assert set(produced) == {port.Produced()}


async def test_a_subject_that_moves_to_another_stream(server: nats_server.NatsServer, admin: Any) -> None:
    await make_stream(admin, "old", {"subjects": ["moves"]})
    async with opened(server, timeout_s=1.0) as adapter:
        assert (await adapter.output.produce([outgoing("moves", 1)]))[0].is_taken
        await api(admin, "STREAM.DELETE.old")
        await make_stream(admin, "new", {"subjects": ["moves"]})
        assert (await adapter.output.produce([outgoing("moves", 2)]))[0].is_taken
        await api(admin, "STREAM.DELETE.new")
        (missing,) = await adapter.output.produce([outgoing("moves", 3)])
        assert means(missing, nats_answers.NO_STREAM, Meant(Meaning.NOT_NOW, Cause.MISSING))


async def test_a_stream_that_does_not_answer(server: nats_server.NatsServer, admin: Any) -> None:
    assert (await api(admin, "STREAM.INFO.silent"))["config"]["no_ack"]
    async with opened(server, timeout_s=0.5) as adapter:
        (produced,) = await adapter.output.produce([outgoing("silent", 99)])
        assert means(produced, nats_answers.TIMEOUT, Meant(Meaning.UNKNOWN))


@pytest.mark.usefixtures("admin")
async def test_a_subject_that_cannot_be_sent(server: nats_server.NatsServer) -> None:
    """No judged target gets there: an empty word is refused before, and so is a blank."""
    async with opened(server) as adapter:
        with pytest.raises(nats_answers.Failed) as failed:
            await adapter._client.ask("a b")
    assert means(nats_answers.produced("a b", failed.value), nats_answers.BAD_SUBJECT, REFUSED)


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[nats_server.NatsServer]:
    program = nats_server.find()
    if program is None:
        pytest.skip(nats_server.MISSING)
    with nats_server.NatsServer(program, directory) as made:
        made.start()
        made.wait_until_loaded()
        yield made


async def test_a_connection_that_is_lost(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        connection = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            await make_stream(connection, "plain", {})
            adapter = await stack.enter_async_context(opened(server, "any", timeout_s=30.0))
            assert (await adapter.output.produce([outgoing("plain", 1)]))[0].is_taken
            server.suspend()
            large = [outgoing("plain", number, size=900_000) for number in range(2, 102)]
            producing = asyncio.ensure_future(adapter.output.produce(large))
            while not adapter._client._asked:  # noqa: ASYNC110 - the server is suspended, so that nothing tells it
                await asyncio.sleep(0)
            server.kill()
            produced = await producing
            assert {each.code for each in produced} == {nats_answers.LOST, nats_answers.NOT_SENT}
            assert means(produced[0], nats_answers.LOST, Meant(Meaning.UNKNOWN))
            assert means(produced[-1], nats_answers.NOT_SENT, Meant(Meaning.NOT_NOW))
            adapter._client.timeout_s = 0.5
            with pytest.raises(nats_answers.Failed) as failed:
                await adapter.output.produce([outgoing("plain", 2)])
            assert nats_answers.KNOWN[failed.value.code] == Meant(Meaning.NOT_NOW)
            assert failed.value.code == nats_answers.NOT_CONNECTED
            server.start()
            server.wait_until_loaded()
            adapter._client.timeout_s = 300.0
            assert (await adapter.output.produce([outgoing("plain", 2)]))[0].is_taken


async def test_a_stream_whose_server_is_away_is_not_missing(tmp_path: Path) -> None:
    """In a cluster, which still knows the stream: nobody answers on its subject."""
    program = nats_server.find()
    if program is None:
        pytest.skip(nats_server.MISSING)
    ports = [processes.free_port() for _ in range(3)]
    routes = ", ".join(f"nats-route://127.0.0.1:{each}" for each in ports)
    with contextlib.ExitStack() as running:
        servers = []
        for number, each in enumerate(ports):
            directory = tmp_path / str(number)
            directory.mkdir()
            file = directory / "nats.conf"
            cluster = f'cluster {{ name: c, listen: "127.0.0.1:{each}", routes: [{routes}] }}'
            file.write_text(f"server_name: s{number}\n{cluster}\njetstream {{ }}\n")
            servers.append(running.enter_context(nats_server.NatsServer(program, directory, ("--config", str(file)))))
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_loaded()
        connection = await nats.connect(servers[0].url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            await until_made(connection, "plain", {"num_replicas": 3})
            await until_made(connection, "due", {"num_replicas": 1})
            leader = (await api(connection, "STREAM.INFO.due"))["cluster"]["leader"]
            there = next(each for number, each in enumerate(servers) if leader != f"s{number}")
            adapter = await stack.enter_async_context(opened(there, "any", timeout_s=2.0))
            assert (await adapter.output.produce([outgoing("due", 1)]))[0].is_taken
            servers[int(leader[1:])].kill()
            async with asyncio.timeout(300):
                while True:
                    (produced,) = await adapter.output.produce([outgoing("due", 2)])
                    assert not produced.is_taken
                    assert produced.meant.cause is not Cause.MISSING
                    if produced.code == nats_answers.NO_RESPONDERS:
                        break
            assert means(produced, nats_answers.NO_RESPONDERS, Meant(Meaning.NOT_NOW))


async def until_made(connection: Any, name: str, config: dict[str, Any]) -> None:
    """Make a stream, as soon as the cluster has a leader."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(AssertionError, nats.errors.Error):
                await make_stream(connection, name, config, timeout_s=2)
                return


def test_each_known_answer_is_provoked_or_named_above() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    names = {value: name for name, value in vars(nats_answers).items() if isinstance(value, str) and name.isupper()}
    tested = source.partition("NOT_PROVOKED = {")[2].partition("}")[2]
    for code in nats_answers.KNOWN:
        said = f"nats_answers.{names[code]}" if code in names else f'"{code}"'
        assert (said in tested) == (code not in NOT_PROVOKED), code
