"""Speaks NATS below nats-py, whose parser takes a producer's headers for the server's.

It has one importer, the adapter, and stands alone because it holds everything that depends on private names of nats-py.
Contents: blocks of headers, raw and parsed; the connection (`_Connection`, `_Parser`), which passes on raw blocks;
`NatsClient`, which sends requests, and ends them at once when the connection is lost, closed or refused.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import dataclasses
import datetime
import itertools
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import nats.aio.client
import nats.errors
import nkeys
from nats.aio.client import Srv
from nats.aio.msg import Msg
from nats.protocol import command
from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, Parser

from tarry_relay import nats_answers, nats_judgement, port, relay_settings
from tarry_relay.nats_answers import Failed

NO_RESPONDERS: Final = 503
_BLANKS = (b" ", b"\t")
_FIRST_LINE = b"NATS/1.0"
_STATUS = re.compile(rb"NATS/1\.0[ \t]+(\d{3})(?!\d)[ \t]*([^\r\n]*)")
_NATS_OWN = "nats-"
"""Prefix of NATS's own headers, which describe how a message was published, not the message"""
_RELAY_OWN = "tarry-"
_MESSAGE_BYTES = 500
"""Memory of a message besides its headers and payload (bytes)"""
_SEQUENCE = re.compile(rb"^Nats-Sequence:[ \t]*(\d+)[ \t]*\r?$", re.MULTILINE)
_TIME = re.compile(rb"^Nats-Time-Stamp: *([^\r\n]+)", re.IGNORECASE | re.MULTILINE)
_LINE_ENDS = str.maketrans({"\r": " ", "\n": " "})
_DENIED = re.compile(r'Permissions Violation for (Publish|Subscription) to ("(?:[^"\\]|\\.)*")', re.IGNORECASE)
_CREDENTIALS_REFUSED = re.compile(r"authorization violation|authentication (expired|revoked)", re.IGNORECASE)
_BROKEN = (ConnectionResetError, BrokenPipeError, nats.errors.UnexpectedEOF)
_JWT = re.compile(r"-+BEGIN NATS USER JWT-+\s+[^\s-]")
_SEED = re.compile(r"-+BEGIN USER NKEY SEED-+\s+(\S+)")
_NOT_FOUND = frozenset({10_014, 10_059})
"""Codes of JetStream: no such consumer, no such stream"""
_PASSES = frozenset({408, 429, 500, 503})
_LIMITS = frozenset({10_002, 10_026})
"""Codes of JetStream: the account's resources, the stream's number of consumers"""
_PING_S = 10
"""Interval of pings to the server (seconds); after three without an answer nats-py reconnects"""
_RECONNECT_S = 0.2


# Headers


@dataclasses.dataclass(frozen=True, slots=True)
class Original:
    """A message's bytes without NATS's own headers. Each field is a header's key and its line."""

    first_line: bytes
    fields: tuple[tuple[str, bytes], ...]
    data: bytes

    @property
    def headers_size(self) -> int:
        return len(self.first_line) + sum(len(line) for _, line in self.fields) + 4


def header_key(name: str) -> str:
    """Return a header's name as `port.Message.headers` has it."""
    return name.strip().lower()


def message_of(block: bytes, data: bytes, sent_at_ms: int = 0) -> port.Message:
    """Parse a message as a stream has it. Never raises, whatever the bytes are."""
    first_line = _FIRST_LINE
    lines = re.findall(rb"[^\n]*\n|[^\n]+$", block)
    if lines and lines[0].startswith(_FIRST_LINE):
        first_line = lines.pop(0).rstrip(b"\r\n")
    while lines and not lines[-1].strip(b"\r\n"):
        del lines[-1]
    ended = [line if line.endswith(b"\n") else line + b"\r\n" for line in lines]
    fields = _without([(_key_of(line), line) for line in ended], lambda key: key.startswith(_NATS_OWN))
    headers: dict[str, str] = {}
    repeated = set()
    for key, line in fields:
        if key in headers:
            repeated.add(key)
        elif key:
            headers[key] = line.partition(b":")[2].decode(errors="replace").strip()
    original = Original(first_line, tuple(fields), data)
    size_bytes = _MESSAGE_BYTES + original.headers_size + len(data)
    return port.Message(headers, original, frozenset(repeated), sent_at_ms, size_bytes)


def block_of(outgoing: port.Outgoing) -> bytes:
    """Return the headers to publish: those of the relay, then the unchanged ones of the original."""
    own = {**outgoing.own_headers, nats_judgement.ONCE_HEADER: outgoing.once_id}
    replaced = {header_key(name) for name in own}
    original = Original(_FIRST_LINE, (), b"") if outgoing.message is None else outgoing.message.body
    kept = _without(original.fields, lambda key: key in replaced or key.startswith(_RELAY_OWN))
    lines = [line for _, line in kept]
    # A line that begins with a blank would continue the relay's last header.
    before = list(itertools.takewhile(lambda line: line.startswith(_BLANKS), lines))
    text = [f"{name}: {value.translate(_LINE_ENDS).strip()}\r\n" for name, value in own.items()]
    own_lines = [each.encode(errors="replace") for each in text]
    return b"".join((original.first_line, b"\r\n", *before, *own_lines, *lines[len(before) :], b"\r\n"))


def _without(fields: Iterable[tuple[str, bytes]], is_dropped: Callable[[str], bool]) -> list[tuple[str, bytes]]:
    """Drop headers by their keys, each with the lines that some clients read as the rest of its value."""
    kept = []
    drops = False
    for key, line in fields:
        drops = is_dropped(key) or (drops and line.startswith(_BLANKS))
        if not drops:
            kept.append((key, line))
    return kept


def _key_of(line: bytes) -> str:
    name, colon, _ = line.partition(b":")
    return header_key(name.decode(errors="replace")) if colon else ""


# The connection


class Block(dict[str, str]):
    """The headers of an arrived message, of which nats-py asks only for the status.

    Only the first line of a block is the server's: a header named `Status` is a producer's.
    """

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw
        if found := _STATUS.match(raw):
            self["Status"] = found[1].decode()
            self["Description"] = found[2].decode(errors="replace")


def raw_block(message: Msg) -> bytes:
    """Return the block of headers of an arrived message; empty if it has none."""
    return message.headers.raw if isinstance(message.headers, Block) else b""


def status_of(message: Msg) -> int:
    """Return the status of an answer; 0 if it has none. A stream's message may also have one: check that first."""
    return int((message.headers or {}).get("Status", "0"))


def description_of(message: Msg) -> str:
    """Return the status of an answer with the server's description."""
    headers = message.headers or {}
    return f"{headers.get('Status', '')} {headers.get('Description', '')}".strip()


def sequence_of(message: Msg) -> int:
    """Return the sequence that a direct get appends to a message's headers; 0 if the answer has no message."""
    found = _SEQUENCE.findall(raw_block(message))
    return int(found[-1]) if found else 0


def fetched(message: Msg) -> port.Message:
    """Parse the answer to a direct get, which must have a message."""
    block = raw_block(message)
    return message_of(block, message.data, _ms(_TIME.findall(block)[-1].decode()))


def _ms(moment: str) -> int:
    """Return a moment as Unix time (ms), rounded down."""
    since = datetime.datetime.fromisoformat(moment) - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return since // datetime.timedelta(milliseconds=1)


class _Parser(Parser):
    """A parser of what the server sends. nats-py's own fails for good on a subject with a vertical tab."""

    nc: _Connection

    async def parse(self, data: bytes = b"") -> None:
        self.buf.extend(data)
        while self.buf:
            if self.state == AWAITING_CONTROL_LINE:
                end = self.buf.find(b"\n")
                if end < 0:
                    return
                line = bytes(self.buf[:end]).rstrip(b"\r")
                del self.buf[: end + 1]
                await self._control_line(line)
            elif len(self.buf) < self.needed + 2:
                return
            else:
                message = bytes(self.buf[: self.needed])
                del self.buf[: self.needed + 2]
                self.state = AWAITING_CONTROL_LINE
                block, body = message[: self.header_needed], message[self.header_needed :]
                of = self.msg_arg
                await self.nc._process_msg(of["sid"], of["subject"], of["reply"], body, block)

    async def _control_line(self, line: bytes) -> None:
        verb, *words = re.split(rb"[ \t]+", line.strip(b" \t"))
        match verb.upper():
            case b"MSG" | b"HMSG":
                self._expect(words, has_headers=len(verb) > 3)
            case b"PING":
                await self.nc._process_ping()
            case b"PONG":
                await self.nc._process_pong()
            case b"INFO":
                await self.nc._process_info(json.loads(line[4:]))
            case b"-ERR":
                text = line[4:].strip().strip(b"'").decode(errors="replace")
                self.nc.error_came(text)
                await self.nc._process_err(text.lower())
            case b"+OK":
                pass
            case _:
                raise nats.errors.ProtocolError(f"nats: unknown protocol {line[:64]!r}")

    def _expect(self, words: list[bytes], *, has_headers: bool) -> None:
        """Wait for the bytes of a message."""
        try:
            *names, size = words
            self.header_needed = int(names.pop()) if has_headers else 0
            subject, sid, *reply = names
            self.msg_arg = {"subject": subject, "sid": int(sid), "reply": reply[0] if reply else b""}
            self.needed = int(size)
        except (IndexError, ValueError) as error:
            raise nats.errors.ProtocolError("nats: malformed MSG") from error
        self.state = AWAITING_MSG_PAYLOAD


class _Connection(nats.aio.client.Client):
    """A connection of nats-py that passes on raw headers, and accepts blocks of them."""

    def __init__(self, error_came: Callable[[str], None]) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self.error_came = error_came
        """Called with each error of the server, in its original case; nats-py lowers it"""

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        return Block(headers) if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # A subject need not be UTF-8. An exception here would end the reading of this connection.
        text, reply_text = subject.decode(errors="replace"), reply.decode(errors="replace")
        return Msg(_client=self, subject=text, reply=reply_text, data=data, headers=headers, _sid=sid)

    async def publish_block(self, subject: str, data: bytes, reply: str, block: bytes) -> None:
        """Publish with a raw block of headers. Raises what `publish` raises."""
        headers: dict[str, Any] = {_FIRST_LINE.decode(): block}
        await self.publish(subject, data, reply, headers)

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: Mapping[str, Any] | None
    ) -> None:
        block = (headers or {}).get(_FIRST_LINE.decode())
        if not isinstance(block, bytes):
            await super()._send_publish(
                subject, reply, payload, payload_size, None if headers is None else dict(headers)
            )
            return
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(command.hpub_cmd(subject, reply, block, payload))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def _connect_to_server(self, s: Srv) -> None:
        # nats-py leaves the socket open of each attempt that a server refused.
        self.abort()
        await super()._connect_to_server(s)

    async def close(self) -> None:
        if self._flush_queue is not None:  # Otherwise `connect` refused its arguments, and there is nothing to close.
            await super().close()

    def release_senders(self) -> None:
        """Release callers that wait for a lost connection to take what they send."""
        while self._flush_queue is not None and not self._flush_queue.empty():
            waiting = self._flush_queue.get_nowait()
            if not waiting.done():
                waiting.set_result(None)

    def abort(self) -> None:
        """Drop the socket with everything unsent, because a suspended server takes nothing."""
        if (writer := getattr(self._transport, "_io_writer", None)) is not None:
            writer.transport.abort()


# Requests


class Answers:
    """The answers to a request, in order, until the request fails."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._arrived: collections.deque[Msg] = collections.deque()
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def put(self, message: Msg) -> None:
        """Append an answer."""
        self._arrived.append(message)
        self._news.set()

    def fail(self, failure: Exception) -> None:
        """Make the next call raise this, once every arrived answer is taken."""
        self._failure = failure
        self._news.set()

    async def next(self, until_s: float) -> Msg | None:
        """Return the next answer, or None if there is none by then (time of the event loop). Raises the failure."""
        while not self._arrived:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            self._news.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._news.wait()
            except TimeoutError:
                if not self._arrived and self._failure is None:
                    return None
        return self._arrived.popleft()


class NatsClient:
    """A connection to NATS, opened again whenever it breaks, until the server closes it for good."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._connection = _Connection(self._error_came)
        self._asked: dict[str, Answers] = {}
        """Requests by the last word of their reply subject"""
        self._watched: set[Answers] = set()
        self._numbers = itertools.count()
        self._inbox = ""
        self._settled = asyncio.Event()
        """Set while connected, and when the connection is over"""
        self._over = ""
        """Reason why the connection is over; empty while it is not"""
        self._said = ""
        """Last failure of the connection"""
        self._refused = ""
        """The server's error that ended the last connection or attempt; empty while connected"""
        self._deaf = ""
        """Reason why no answer can arrive; empty while one can"""

    # Opening and closing

    async def connect(self, name: str, broker: relay_settings.Nats) -> None:
        """Connect within `timeout_s`. Raises Unreachable, SettingsError."""
        options = _options(broker)
        knocking = self._connection.connect(
            broker.url,
            name=name,
            user=broker.user,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_S,  # type: ignore[arg-type]
            connect_timeout=broker.timeout_s,  # type: ignore[arg-type]
            flush_timeout=broker.timeout_s,
            ping_interval=_PING_S,
            error_cb=self._error,
            disconnected_cb=self._disconnected,
            reconnected_cb=self._reconnected,
            closed_cb=self._closed,
            **options,
        )
        connecting = asyncio.ensure_future(knocking)
        url = relay_settings.without_credentials(broker.url)
        try:
            # With unlimited attempts it also tries without end the first time.
            await asyncio.wait((connecting,), timeout=broker.timeout_s)
            if not connecting.done():
                raise port.Unreachable(
                    f"{url} cannot be used within {broker.timeout_s:g} s: {self._said or 'no answer'}"
                )
            connecting.result()
        except nats.errors.Error as error:
            # Failures that another try may fix are retried inside.
            raise relay_settings.SettingsError(f"broker.url is {url!r}: {_text(error)}") from error
        finally:
            await port.end((connecting,))
        self._inbox = self._connection.new_inbox()
        self._said = self._refused = ""
        self._settled.set()
        await self._sending(self._connection.subscribe(f"{self._inbox}.*", cb=self._answered, pending_bytes_limit=0))

    async def close(self) -> None:
        """Close the connection, within `timeout_s` whatever the server does."""
        closing = asyncio.ensure_future(self._connection.close())
        await asyncio.wait((closing,), timeout=self.timeout_s)
        if not closing.done():
            self._connection.abort()
        await port.end((closing,))

    # Callbacks of nats-py

    async def _error(self, error: Exception) -> None:
        # A socket that breaks after the server's last word says less than that word.
        if not (self._refused and isinstance(error, _BROKEN)):
            self._said = _text(error)
        if type(error) is nats.errors.Error and _DENIED.search(self._said) is None:
            self._refused = self._said
        if self._inbox and _CREDENTIALS_REFUSED.search(self._said):
            # Otherwise it would try for ever with the credentials that it read when it was opened.
            self._end()

    async def _disconnected(self) -> None:
        self._connection.release_senders()
        if self._connection.is_closed:
            self._end()
            return
        self._settled.clear()
        self._fail_all(lambda: Failed(nats_answers.LOST, f"the connection was lost: {self._said or 'no reason given'}"))

    async def _reconnected(self) -> None:
        self._said = self._refused = self._deaf = ""
        self._settled.set()

    async def _closed(self) -> None:
        self._end()

    def _error_came(self, text: str) -> None:
        self._said = text
        if (denied := _DENIED.search(text)) is None:
            self._refused = text
            return
        if denied[1].lower() == "subscription":
            # No answer can arrive then. The server repeats the error after each reconnect.
            self._deaf = text
            self._fail_all(self._denied)
            return
        for each in self._watched:
            # The server quotes the subject like JSON, but for unprintable characters.
            if json.dumps(each.subject, ensure_ascii=False) == denied[2]:
                each.fail(self._denied())

    def _denied(self) -> Failed:
        return Failed(nats_answers.DENIED, f"NATS reports {self._said}: grant the relay's user that permission")

    def _end(self) -> None:
        last = self._connection.last_error or nats.errors.ConnectionClosedError()
        self._over = self._over or self._said or _text(last)
        self._settled.set()
        self._fail_all(self._session_over)

    def _session_over(self) -> port.SessionOver:
        return port.SessionOver(f"the connection to NATS is closed for good: {self._over or self._said}")

    def _fail_all(self, failure: Callable[[], Exception]) -> None:
        for each in self._watched:
            each.fail(failure())

    async def _answered(self, message: Msg) -> None:
        if (answers := self._asked.get(message.subject.rpartition(".")[2])) is not None:
            answers.put(message)

    # Sending

    @property
    def max_payload(self) -> int:
        """The largest size of a message with its headers (bytes)."""
        return self._connection.max_payload

    async def up(self) -> None:
        """Wait until connected, for at most `timeout_s`. Raises Failed, SessionOver."""
        if not self._settled.is_set() and not self._connection.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timeout_s):
                    await self._settled.wait()
        if self._over or self._connection.is_closed:
            raise self._session_over()
        if not self._settled.is_set():
            text = f"there was no connection to NATS within {self.timeout_s:g} s: {self._said or 'no answer'}"
            raise Failed(nats_answers.NOT_CONNECTED, text)

    async def send(self, subject: str, data: bytes, *, reply: str = "", block: bytes | None = None) -> None:
        """Send a message; it may be lost with the connection. Raises Failed, SessionOver."""
        size = len(data) + len(block or b"")
        await self.up()
        if size > self.max_payload:
            text = f"the message has {size} bytes with its headers, and max_payload is {self.max_payload}"
            raise Failed(nats_answers.MAX_PAYLOAD, text)
        if block is None:
            await self._sending(self._connection.publish(subject, data, reply))
        else:
            await self._sending(self._connection.publish_block(subject, data, reply, block))

    async def _sending(self, sent: Awaitable[Any]) -> Any:
        """Wait until a command is sent. Raises Failed, SessionOver."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await sent
        except nats.errors.ConnectionClosedError as error:
            raise self._session_over() from error
        except nats.errors.OutboundBufferLimitError as error:
            raise Failed(nats_answers.NOT_CONNECTED, _text(error)) from error
        except nats.errors.BadSubjectError as error:
            raise Failed(nats_answers.BAD_SUBJECT, _text(error)) from error
        except TimeoutError as error:
            raise Failed(nats_answers.TIMEOUT, f"NATS took nothing for {self.timeout_s:g} s") from error
        except OSError as error:
            raise Failed(nats_answers.LOST, _text(error)) from error

    @contextlib.asynccontextmanager
    async def asking(
        self, subject: str, data: bytes = b"", *, block: bytes | None = None
    ) -> AsyncIterator[Callable[[], Awaitable[Msg]]]:
        """Send a request, and yield a call for its answers: any service may add one.

        The call raises Failed once `timeout_s` has passed since the request was sent, and SessionOver.
        """
        if self._deaf:
            raise Failed(nats_answers.DENIED, f"NATS reports {self._deaf}: grant the relay's user that permission")
        number = str(next(self._numbers))
        with self._watching(subject) as answers:
            self._asked[number] = answers
            try:
                await self.send(subject, data, reply=f"{self._inbox}.{number}", block=block)
                until_s = asyncio.get_running_loop().time() + self.timeout_s

                async def answer() -> Msg:
                    if (message := await answers.next(until_s)) is None:
                        if self._connection.is_closed:
                            raise self._session_over()
                        raise Failed(nats_answers.TIMEOUT, f"no answer within {self.timeout_s:g} s")
                    return message

                yield answer
            finally:
                del self._asked[number]

    async def ask(self, subject: str, data: bytes = b"") -> Msg:
        """Send a request and return the first answer. Raises Failed, also for no responders; SessionOver."""
        async with self.asking(subject, data) as answer:
            message = await answer()
        if status_of(message) == NO_RESPONDERS:
            raise Failed(nats_answers.NO_RESPONDERS, f"NATS has no responder on {subject}")
        return message

    async def api(self, call: str, **request: Any) -> dict[str, Any]:
        """Call JetStream's API. Raises NotThere, Unreachable, SessionOver, ApiError."""
        message = await self.ask(f"$JS.API.{call}", json.dumps(request).encode() if request else b"")
        told: dict[str, Any] = json.loads(message.data)
        if (error := nats_answers.api_error(told.get("error"))) is None:
            return told
        if error.err_code in _NOT_FOUND:
            raise port.NotThere(str(error))
        if error.code in _PASSES or error.err_code in _LIMITS:
            raise Failed(str(error.err_code), f"JetStream cannot do {call}: {error}") from error
        raise error

    @contextlib.contextmanager
    def _watching(self, subject: str) -> Iterator[Answers]:
        answers = Answers(subject)
        self._watched.add(answers)
        try:
            yield answers
        finally:
            self._watched.discard(answers)

    async def listen(self, subject: str) -> Inbox:
        """Create a subject for the answers to many requests to `subject`. Raises Failed, SessionOver."""
        answers = Answers(subject)
        self._watched.add(answers)

        async def came(message: Msg) -> None:
            answers.put(message)

        reply = self._connection.new_inbox()
        await self.up()
        made = await self._sending(self._connection.subscribe(f"{reply}.*", cb=came, pending_bytes_limit=0))
        return Inbox(reply, answers, made)

    async def leave(self, inbox: Inbox) -> None:
        """Take nothing further from this inbox."""
        self._watched.discard(inbox.answers)
        # It is left because something failed.
        with contextlib.suppress(nats.errors.Error):
            await inbox.subscription.unsubscribe()


@dataclasses.dataclass(frozen=True, slots=True)
class Inbox:
    """A subject with one more word for each request, and its answers."""

    subject: str
    answers: Answers
    subscription: Any


@contextlib.asynccontextmanager
async def connected(name: str, broker: relay_settings.Nats) -> AsyncIterator[NatsClient]:
    """Connect, and close the connection at the end. Raises Unreachable, SettingsError."""
    client = NatsClient(broker.timeout_s)
    try:
        await client.connect(name, broker)
        yield client
    finally:
        await client.close()


def stored(told: Mapping[str, Any]) -> port.Message:
    """Parse a message in an answer of STREAM.MSG.GET."""
    block, data = (base64.b64decode(told.get(each) or "") for each in ("hdrs", "data"))
    return message_of(block, data, _ms(told["time"]))


def _options(broker: relay_settings.Nats) -> dict[str, Any]:
    """Read the files of credentials and TLS. Raises SettingsError."""
    options: dict[str, Any] = {"password": relay_settings.secret("broker.password_file", broker.password_file)}
    if (tls := _tls(broker)) is not None:
        options["tls"] = tls
    if (credentials := relay_settings.secret("broker.credentials_file", broker.credentials_file)) is not None:
        seed = _SEED.search(credentials)
        needs = f"broker.credentials_file is {broker.credentials_file!r}; it must have a user's JWT and its key's seed"
        if seed is None or not _JWT.search(credentials):
            # nats-py would read it without end.
            raise relay_settings.SettingsError(needs)
        try:
            nkeys.from_seed(bytearray(seed[1].encode()))
        except (nkeys.NkeysError, ValueError) as error:
            raise relay_settings.SettingsError(f"{needs}: {_text(error)}") from error
        options["user_credentials"] = nats.aio.client.RawCredentials(credentials)
    return options


def _tls(broker: relay_settings.Nats) -> ssl.SSLContext | None:
    """Return the TLS context of connections, or None without TLS. Raises SettingsError."""
    if not (broker.ca_file or broker.cert_file or broker.url.startswith("tls://")):
        return None
    try:
        tls = ssl.create_default_context(cafile=broker.ca_file)
        if broker.cert_file:
            tls.load_cert_chain(broker.cert_file, broker.key_file)
    except OSError as error:
        raise relay_settings.SettingsError(f"broker.ca_file, cert_file or key_file: {error}") from error
    return tls


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
