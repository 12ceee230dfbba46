"""What the relay does below nats-py: blocks of headers, reading the protocol, and private names of nats-py."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import random
from pathlib import Path
from typing import Any

import nats.aio.client
import nats.aio.msg
import nats.errors
import nats.protocol.command
import nats.protocol.parser
import pytest
from nats.aio.transport import TcpTransport

from tarry_relay import nats_client, port

FIRST = b"NATS/1.0\r\n"


def published(message: port.Message | None, own: dict[str, str] | None = None) -> bytes:
    return nats_client.block_of(port.Outgoing("due", message, own or {}, "id 1"))


def test_headers_are_published_as_they_are() -> None:
    lines = b"tag: a\r\nTag:b\r\nX-Odd :\t \xff\xfe\0 \r\nStatus: shipped\r\nDescription: 404\r\n"
    message = nats_client.message_of(FIRST + lines + b"\r\n", b"body")
    assert message.headers == {"tag": "a", "x-odd": "\ufffd\ufffd\0", "status": "shipped", "description": "404"}
    assert message.repeated == {"tag"}
    assert published(message) == FIRST + b"Nats-Msg-Id: id 1\r\n" + lines + b"\r\n"


def test_headers_of_the_relay_come_from_the_relay_alone() -> None:
    block = (
        FIRST
        + b"tarry-reason: false\r\nTarry-Position: 1\r\n tarry\r\nNats-Msg-Id: x\r\nnats-rollup: all\r\nX-Id: 1\r\n"
    )
    message = nats_client.message_of(block + b"n: 1\r\n\r\n", b"")
    assert message.headers == {"tarry-reason": "false", "tarry-position": "1", "x-id": "1", "n": "1"}
    own = {"tarry-reason": "two\r\nlines\ud800", "x-id": "2"}
    expected = b"tarry-reason: two  lines?\r\nx-id: 2\r\nNats-Msg-Id: id 1\r\nn: 1\r\n\r\n"
    assert published(message, own) == FIRST + expected


@pytest.mark.parametrize(
    ("block", "headers", "again"),
    [
        (b"", {}, FIRST),
        (b"x", {}, FIRST + b"x\r\n"),
        (b"NATS/1.0", {}, FIRST),
        (b"a: b", {"a": "b"}, FIRST + b"a: b\r\n"),
        (b"NATS/1.0 503\r\n\r\n", {}, b"NATS/1.0 503\r\n"),
        (b"NATS/1.0 404 No Messages\r\na: b\r\n\r\n", {"a": "b"}, b"NATS/1.0 404 No Messages\r\na: b\r\n"),
        (
            FIRST + b"a: b\r\n\r\ntarry-x: c\r\nd: e\r\n\r\n\r\n",
            {"a": "b", "tarry-x": "c", "d": "e"},
            FIRST + b"a: b\r\n\r\nd: e\r\n",
        ),
        (FIRST + b"a: b\ntarry-x: c\r\n\r\n", {"a": "b", "tarry-x": "c"}, FIRST + b"a: b\n"),
        (FIRST + b" b\r\n: c\r\n\r\n", {}, FIRST + b" b\r\n: c\r\n"),
        (
            FIRST + b"a: b\r\n tarry-x: c\r\n\td: e\r\nf: g\r\n\r\n",
            {"a": "b", "tarry-x": "c", "d": "e", "f": "g"},
            FIRST + b"a: b\r\nf: g\r\n",
        ),
    ],
)
def test_a_block_that_a_client_of_its_own_has_written(block: bytes, headers: dict[str, str], again: bytes) -> None:
    message = nats_client.message_of(block, b"")
    assert message.headers == headers
    assert published(message).replace(b"Nats-Msg-Id: id 1\r\n", b"") == again + b"\r\n"


def test_no_bytes_stop_the_taking_apart() -> None:
    pieces = [b"NATS/1.0", b"\r\n", b"\n", b"\r", b":", b" ", b"\t", b"tarry-", b"Nats-", b"\xff", b"\0", b"404", b"a"]
    chance = random.Random(7)
    for _ in range(5_000):
        block = b"".join(chance.choices(pieces, k=chance.randrange(12)))
        message = nats_client.message_of(block, b"")
        again = nats_client.message_of(published(message), b"")
        assert not any(name.startswith("tarry-") for name in again.headers)
        assert {name for name in message.headers if not name.startswith("tarry-")} >= set(again.headers)
        assert b"\nNats-Msg-Id: id 1\r\n" in published(message)
        nats_client.Block(block)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"NATS/1.0 503\r\n\r\n", 503),
        (b"NATS/1.0 404 No Messages\r\n\r\n", 404),
        (b"NATS/1.0\r\nStatus: 404\r\nDescription: x\r\n\r\n", 0),
        (b"NATS/1.0\r\nStatus: shipped\r\n\r\n", 0),
        (b"NATS/1.0 4041\r\n\r\n", 0),
        (b"NATS/1.0", 0),
        (b"x", 0),
    ],
)
def test_a_status_stands_in_the_first_line(raw: bytes, status: int) -> None:
    message: Any = nats.aio.msg.Msg(_client=None, headers=nats_client.Block(raw))  # type: ignore[arg-type]
    assert nats_client.status_of(message) == status


def test_the_sequence_of_a_direct_get_is_the_one_behind_those_of_the_producer() -> None:
    raw = FIRST + b"Nats-Sequence: 5\r\nX: Nats-Sequence: 6\r\nNats-Stream: s\r\nNats-Sequence: 7\r\n\r\n"
    message: Any = nats.aio.msg.Msg(_client=None, headers=nats_client.Block(raw))  # type: ignore[arg-type]
    assert nats_client.sequence_of(message) == 7


# Reading the protocol.


@dataclasses.dataclass
class Connection:
    """Notes what a parser calls."""

    came: list[Any] = dataclasses.field(default_factory=list)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.came.append((sid, subject, reply, data, headers))

    async def _process_ping(self) -> None:
        self.came.append("PING")

    async def _process_pong(self) -> None:
        self.came.append("PONG")

    async def _process_info(self, info: Any) -> None:
        self.came.append(info)

    async def _process_err(self, text: str) -> None:
        self.came.append(text)

    def error_came(self, text: str) -> None:
        self.came.append(text)


SENT = (
    b'INFO {"a":1} \r\nPING\r\n+OK\r\nMSG orders.a 1 2\r\n\r\n\r\n'
    b"MSG orders.\x0b1 1 $JS.ACK.x 3\r\nabc\r\nHMSG orders.\x0c\xff 22 reply 12 14\r\nNATS/1.0\r\n\r\nxy\r\n"
    b"-ERR 'Permissions Violation for Publish to \"Out\"'\r\nPONG\r\n"
)
CAME = [
    {"a": 1},
    "PING",
    (1, b"orders.a", b"", b"\r\n", b""),
    (1, b"orders.\x0b1", b"$JS.ACK.x", b"abc", b""),
    (22, b"orders.\x0c\xff", b"reply", b"xy", b"NATS/1.0\r\n\r\n"),
    'Permissions Violation for Publish to "Out"',
    'permissions violation for publish to "out"',
    "PONG",
]


@pytest.mark.parametrize("size", [1, 2, 7, 1_000])
async def test_what_the_server_sends_is_read_however_it_is_cut(size: int) -> None:
    connection: Any = Connection()
    parser = nats_client._Parser(connection)
    for first in range(0, len(SENT), size):
        await parser.parse(SENT[first : first + size])
    assert connection.came == CAME
    assert not parser.buf


@pytest.mark.parametrize("line", [b"MSG orders 1\r\n", b"HMSG orders x 1 2 3\r\n", b"MSG\r\n", b"HELLO\r\n", b"\r\n"])
async def test_what_is_no_nats_is_a_fault_of_the_protocol(line: bytes) -> None:
    connection: Any = Connection()
    with pytest.raises(nats.errors.ProtocolError):
        await nats_client._Parser(connection).parse(line)


# The private names of nats-py.


def parameters_of(call: Any) -> list[str]:
    return list(inspect.signature(call).parameters)


def test_the_private_names_of_nats_py_are_where_they_were() -> None:
    """If this fails, compare `nats_client` with the new version's `aio/client.py` and `protocol/parser.py`."""
    assert importlib.metadata.version("nats-py").startswith("2.16.")
    of = nats.aio.client.Client
    assert parameters_of(of._process_headers) == ["self", "headers"]
    assert parameters_of(of._build_message) == ["self", "sid", "subject", "reply", "data", "headers"]
    assert parameters_of(of._send_publish) == ["self", "subject", "reply", "payload", "payload_size", "headers"]
    assert parameters_of(of._connect_to_server) == ["self", "s"]
    assert parameters_of(of._process_msg) == ["self", "sid", "subject", "reply", "data", "headers"]
    assert parameters_of(of._process_err) == ["self", "err_msg"]
    assert parameters_of(of._process_info)[:2] == ["self", "info"]
    assert parameters_of(of._process_ping) == parameters_of(of._process_pong) == ["self"]
    assert parameters_of(of._send_command)[:2] == ["self", "cmd"]
    assert parameters_of(of._flush_pending)[:1] == ["self"]
    assert parameters_of(nats.protocol.command.hpub_cmd) == ["subject", "reply", "hdr", "payload"]
    made: Any = of()
    assert isinstance(made._ps, nats.protocol.parser.Parser)
    assert made._flush_queue is made._transport is None
    assert {"buf", "state", "needed", "header_needed", "msg_arg", "nc"} <= vars(made._ps).keys()
    transport: Any = TcpTransport
    assert "_io_writer" in vars(transport())
    assert {"out_msgs", "out_bytes"} <= made.stats.keys()
    fields = {each.name for each in dataclasses.fields(nats.aio.msg.Msg)}
    assert {"_client", "subject", "reply", "data", "headers", "_sid"} <= fields
    source = Path(inspect.getfile(of)).read_text(encoding="utf-8")
    for used in ("await self._send_publish(subject, reply, payload, payload_size, headers)", "await self._ps.parse(b)"):
        assert used in source


@pytest.mark.parametrize("broken", [ConnectionResetError(104, "Connection reset by peer"), nats.errors.UnexpectedEOF()])
async def test_a_broken_socket_does_not_hide_why_the_server_ended_the_connection(broken: Exception) -> None:
    client = nats_client.NatsClient(timeout_s=1.0)
    await client._error(nats.errors.Error("nats: 'Authorization Violation'"))
    await client._error(broken)
    assert "Authorization Violation" in client._said
    await client._reconnected()
    await client._error(broken)
    assert client._said == str(broken)


async def test_a_denied_subject_is_no_reason_for_a_connection_that_breaks() -> None:
    client = nats_client.NatsClient(timeout_s=1.0)
    client._error_came('Permissions Violation for Publish to "a"')
    await client._error(nats.errors.Error('nats: permissions violation for publish to "a"'))
    await client._error(nats.errors.UnexpectedEOF())
    assert client._said == "nats: unexpected EOF"
