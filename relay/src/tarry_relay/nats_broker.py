"""NATS JetStream: a stream is the source, another one the retry log, and targets are subjects of streams.

Owns: positions, reading, fetching and publishing there; what its failures mean.
Does not own: when (`tarry_relay.running`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import nats
import nats.errors
import nats.js
import nats.js.errors
from nats.js import api

from tarry.positions import NatsStream1
from tarry_relay import cancelling, port, relay_settings

_OWN_PREFIX = "nats-"
"""Headers of NATS itself, which say how a message was published, and not what it is."""
_ONCE_HEADER = "Nats-Msg-Id"
_TOO_LARGE = 10_054
"""JetStream's code of a message that is larger than its stream allows."""
Given = TypeVar("Given")
Answered = TypeVar("Answered")


class NatsBroker:
    """One connection, which is made again whenever it breaks."""

    def __init__(self, connection: Any, settings: relay_settings.Settings, broker: relay_settings.Nats) -> None:
        self._connection = connection
        self._js = connection.jetstream(timeout=broker.timeout_s)
        self._settings = settings
        self._broker = broker
        self._own_subjects: tuple[str, ...] = ()
        self.log = NatsLog(self._js, settings.source.name, broker)
        self.source = NatsReader(self._js, self.log, settings.relay, broker)
        retry = settings.retry
        self.retries = retry and NatsReader(self._js, NatsLog(self._js, retry.name, broker), settings.relay, broker)
        self.output = NatsOutput(self._js, broker)

    async def learn_own_subjects(self) -> None:
        """Asks which subjects source and retry log have; a stream that is not there has none. Raises Unreachable."""
        subjects: list[str] = []
        for name in self._settings.read_names:
            with contextlib.suppress(port.NotThere):
                subjects += (await _asked(self._js.stream_info(name))).config.subjects or ()
        self._own_subjects = tuple(subjects)

    def position_of(self, text: str) -> tuple[int, int]:
        """The position of a stream sequence, such as `17`."""
        if not re.fullmatch(r"[1-9][0-9]{0,19}", text, re.ASCII) or int(text) >= 2**64:
            raise port.BadPosition(f"{text!r} is no stream sequence: a whole number from 1, as NATS answers a publish")
        (ledger,), (entry,) = NatsStream1.to_positions(int(text))
        return int(ledger), int(entry)

    def comes_back(self, target: str) -> bool:
        """Whether it is a subject of the source or of the retry log."""
        return any(fits(subject, target) for subject in self._own_subjects)

    def own_targets(self) -> Sequence[str]:
        """The subjects of source and retry log, with words where a wildcard stands."""
        examples = [
            re.sub(r"[*>]$", end, subject).replace("*", "any")
            for subject in self._own_subjects
            for end in ("any", "any.any" if subject.endswith(">") else "any")
        ]
        return list(dict.fromkeys(examples))

    async def findings(self) -> AsyncIterator[port.Finding]:
        """Looks at the clock and the streams of source, retry log and targets; changes nothing."""
        name = self._settings.source.name
        source = await self._finding_of(name, "source")
        yield source
        if source.is_good:
            async for each in self._findings_of_source(name):
                yield each
        if self._settings.retry is not None:
            yield await self._finding_of(self._settings.retry.name, "retry")
        for subject in self._settings.named_targets():
            yield await self._finding_of_target(subject)

    async def _findings_of_source(self, name: str) -> AsyncIterator[port.Finding]:
        info = await self.log.info()
        yield await self._finding_of_clock(name)
        limits = info.config.retention == api.RetentionPolicy.LIMITS
        kept = "limits: what is read stays" if limits else f"{info.config.retention}: what is acknowledged is deleted"
        yield port.Finding("retention", limits, f"stream {name}: retention by {kept}")
        direct = bool(info.config.allow_direct)
        yield port.Finding("direct get", direct, f"stream {name}: allow_direct is {'on' if direct else 'off'}")
        limit = [each for each in ("max_msgs", "max_bytes") if (getattr(info.config, each) or -1) > 0]
        text = f"drops its oldest by {' and '.join(limit)}, also what waits" if limit else "drops nothing by size"
        yield port.Finding("size", not limit, f"stream {name}: {text}")

    async def _finding_of_clock(self, stream: str) -> port.Finding:
        """By the time that stands in an answer, which the client library leaves out."""
        asked_at_ms = port.now_ms()
        asked = self._connection.request(f"$JS.API.STREAM.INFO.{stream}", timeout=self._broker.timeout_s)
        told = json.loads((await _asked(asked)).data).get("ts", "")
        try:
            moment = datetime.datetime.fromisoformat(told)
        except ValueError:
            return port.Finding("clock", True, "not looked at, this NATS tells no time")
        return port.finding_of_clock("NATS", int(moment.timestamp() * 1_000), asked_at_ms)

    async def _finding_of(self, stream: str, name: str) -> port.Finding:
        try:
            await _asked(self._js.stream_info(stream))
        except port.NotThere:
            return port.Finding(name, False, f"stream {stream}: is not there; make it")
        return port.Finding(name, True, f"stream {stream}: is there")

    async def _finding_of_target(self, subject: str) -> port.Finding:
        try:
            stream = await _asked(self._js.find_stream_name_by_subject(subject))
            info = await _asked(self._js.stream_info(stream))
        except port.NotThere:
            return port.Finding(
                "target", False, f"subject {subject}: no stream has it, so that nothing can be published; make one"
            )
        window_s = info.config.duplicate_window or 0
        return port.Finding(
            "target", window_s > 0, f"subject {subject}: stream {stream} drops for {window_s:g} s what it has"
        )


class NatsLog(port.FirstGeneration):
    """A stream by its sequence numbers."""

    def __init__(self, js: Any, stream: str, broker: relay_settings.Nats) -> None:
        self._js = js
        self.stream = stream
        self._in_flight = broker.in_flight

    async def info(self) -> Any:
        """What NATS says of the stream. Raises NotThere, Unreachable."""
        try:
            return await _asked(self._js.stream_info(self.stream))
        except port.NotThere as error:
            raise port.NotThere(f"stream {self.stream}: {error}") from error

    async def _generation_now(self) -> str:
        """The moment at which the stream was made."""
        return f"{(await self.info()).created:%Y%m%dT%H%M%S.%f}Z"

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        """The messages at these positions, by direct gets, many in flight; None for one that is gone for good."""
        ledgers, entries = zip(*positions, strict=True)
        sequences = NatsStream1.from_positions(list(ledgers), list(entries)).tolist()
        found = await _each(self._fetch_one, sequences, self._in_flight)
        port.must_be_same(f"stream {self.stream}", generation, await self.generation())
        return found

    async def _fetch_one(self, sequence: int) -> port.Message | None:
        for direct in (True, False):
            try:
                found = await _asked(self._js.get_msg(self.stream, sequence, direct=direct))
            except port.NotThere:
                continue  # A replica that is behind says so, too; the second time it is the leader who does.
            return _message(found.data or b"", found.headers)
        return None

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """The first sequence number that the stream still has, for each of the ledgers."""
        first = (await self.info()).state.first_seq
        return dict.fromkeys(ledgers, int(first))

    async def kept_ms(self) -> int | None:
        """The `max_age` of the stream."""
        age_s = (await self.info()).config.max_age
        return int(age_s * 1_000) if age_s else None


class NatsReader:
    """A durable pull consumer, which relays share. Its name has the generation of its stream: a relay that has not
    noticed yet that the stream is another one can neither read nor acknowledge anything there.
    """

    def __init__(self, js: Any, log: NatsLog, relay: relay_settings.Relay, broker: relay_settings.Nats) -> None:
        self._js = js
        self._log = log
        self._subscription = relay.subscription
        self._asks_for = api.ConsumerConfig(
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=broker.ack_wait_s,
            # Of all relays together, and each holds as much as it reads ahead.
            max_ack_pending=16 * relay.read_ahead,
        )
        self._ack_wait_s = broker.ack_wait_s
        self._pulled: Any = None
        now_s = time.monotonic()
        self._asked_at_s = (now_s, now_s)
        """When the last two reads began: what came too late for one is given by the next."""

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        """Fetches what comes next; nothing when nothing came within `wait_s`."""
        if self._pulled is None:
            await self._join()
        self._asked_at_s = (self._asked_at_s[1], time.monotonic())
        try:
            found = await _asked(self._pulled.fetch(rows_max, timeout=wait_s), may_time_out=True)
        except (port.NotThere, port.Unreachable):
            # The consumer may be gone, with the stream or alone; the next time says which.
            await self._leave()
            raise
        return port.Portion([self._read(message) for message in found or ()])

    async def commit(self, read: Sequence[port.Read]) -> None:
        """Acknowledges messages, each by itself: what lies between may be another relay's."""
        for each in read:
            # A call that has failed half way is made again, and the client refuses a second acknowledgement.
            if not each.receipt.is_acked:
                await _asked(each.receipt.ack())

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """By the floor of the consumer, up to which everything is acknowledged; what lies above it NATS tells not."""
        durable = self._durable_of(await self._log.first_generation())
        told = await _asked(self._js.consumer_info(self._log.stream, durable))
        floor = 0 if told.ack_floor is None else int(told.ack_floor.stream_seq)
        return [entry <= floor for _, entry in positions]

    async def _join(self) -> None:
        """Makes the consumer, or takes the one that is there: it went with its stream, if that was made anew."""
        stream, generation = self._log.stream, await self._log.first_generation()
        durable = self._durable_of(generation)
        await _asked(self._js.add_consumer(stream, self._asks_for, durable_name=durable))
        if (now := await self._log.generation()) != generation:
            # It stands beside another stream, which no relay of this generation is to read.
            await _asked(self._js.delete_consumer(stream, durable))
            port.must_be_same(f"stream {stream}", generation, now)
        self._pulled = await _asked(self._js.pull_subscribe_bind(durable, stream))

    def _durable_of(self, generation: str) -> str:
        """A name of a consumer has no full stop."""
        return f"{self._subscription}@{generation.replace('.', '_')}"

    async def _leave(self) -> None:
        pulled, self._pulled = self._pulled, None
        # It is left because it does not answer.
        with contextlib.suppress(nats.errors.Error):
            await pulled.unsubscribe()

    def _read(self, message: Any) -> port.Read:
        about = message.metadata
        (ledger,), (entry,) = NatsStream1.to_positions(about.sequence.stream)
        return port.Read(
            int(ledger),
            int(entry),
            _message(message.data, message.headers),
            lane=self._log.stream,
            sent_at_ms=int(about.timestamp.timestamp() * 1_000),
            receipt=message,
            alone_until_s=self._asked_at_s[0] + self._ack_wait_s if about.num_delivered == 1 else 0.0,
        )


class NatsOutput:
    """Subjects, each in a stream that drops what it has within its duplicate window."""

    def __init__(self, js: Any, broker: relay_settings.Nats) -> None:
        self._js = js
        self._in_flight = broker.in_flight

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[port.Produced]:
        """Publishes messages, many in flight; what is confirmed is durable."""
        return await _each(self._produce_one, messages, self._in_flight)

    async def _produce_one(self, outgoing: port.Outgoing) -> port.Produced:
        data, headers = (b"", {}) if outgoing.message is None else outgoing.message.body
        headers = {**headers, **outgoing.own_headers, _ONCE_HEADER: outgoing.once_id}
        try:
            await self._js.publish(outgoing.target, data if outgoing.has_body else b"", headers=headers)
        except (nats.errors.MaxPayloadError, nats.errors.BadSubjectError) as error:
            return port.Produced(refused=f"{outgoing.target}: {_text(error)}")
        except nats.js.errors.APIError as error:
            text = f"{outgoing.target}: {_text(error)}"
            return port.Produced(refused=text) if error.err_code == _TOO_LARGE else port.Produced(failed=text)
        except nats.js.errors.NoStreamResponseError:
            return port.Produced(failed=f"{outgoing.target}: no stream has this subject, or it is starting")
        except (nats.errors.Error, OSError) as error:
            return port.Produced(failed=f"{outgoing.target}: {_text(error)}")
        return port.Produced()


@contextlib.asynccontextmanager
async def opened(settings: relay_settings.Settings, broker: relay_settings.Nats) -> AsyncIterator[NatsBroker]:
    """Connects. Raises Unreachable, SettingsError."""
    connection = await _connected(f"tarry-relay {settings.relay.id}", broker)
    try:
        made = NatsBroker(connection, settings, broker)
        await made.learn_own_subjects()
        yield made
    finally:
        await connection.close()


async def _connected(name: str, broker: relay_settings.Nats) -> Any:
    """A connection to the server. Raises Unreachable, SettingsError."""
    tls = _tls(broker)
    more: dict[str, Any] = {} if tls is None else {"tls": tls}
    password = relay_settings.secret("broker.password_file", broker.password_file)
    relay_settings.secret("broker.credentials_file", broker.credentials_file)
    refusal = ""

    async def refused(error: Exception) -> None:
        """Why it knocks again. Of what comes later each call tells what it has failed with."""
        nonlocal refusal
        refusal = _text(error)

    knocking = nats.connect(
        broker.url,
        name=name,
        user=broker.user,
        password=password,
        user_credentials=broker.credentials_file,
        allow_reconnect=True,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.2,
        connect_timeout=broker.timeout_s,
        error_cb=refused,
        **more,
    )
    connecting = asyncio.ensure_future(knocking)
    try:
        # With attempts without end it knocks without end the first time, too.
        await asyncio.wait((connecting,), timeout=broker.timeout_s)
        if not connecting.done():
            raise port.Unreachable("no answer")
        return await _asked(connecting)
    except port.Unreachable as error:
        told = relay_settings.without_credentials(broker.url)
        raise port.Unreachable(f"{told} cannot be used within {broker.timeout_s:g} s: {refusal or error}") from error
    finally:
        await cancelling.end((connecting,))


def _tls(broker: relay_settings.Nats) -> ssl.SSLContext | None:
    """What its connections are made with; None: not by TLS. Raises SettingsError."""
    if not (broker.ca_file or broker.cert_file or broker.url.startswith("tls://")):
        return None
    try:
        tls = ssl.create_default_context(cafile=broker.ca_file)
        if broker.cert_file:
            tls.load_cert_chain(broker.cert_file, broker.key_file)
    except OSError as error:
        raise relay_settings.SettingsError(f"broker.ca_file, cert_file or key_file: {error}") from error
    return tls


async def _asked(answer: Awaitable[Any], *, may_time_out: bool = False) -> Any:
    """What NATS answers. Raises Unreachable, NotThere. `may_time_out`: None when nothing came in time."""
    try:
        return await answer
    except nats.js.errors.NotFoundError as error:
        raise port.NotThere(_text(error)) from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        if may_time_out and isinstance(error, (nats.errors.TimeoutError, TimeoutError)):
            return None
        raise port.Unreachable(_text(error)) from error


async def _each(call: Callable[[Given], Awaitable[Answered]], given: Iterable[Given], in_flight: int) -> list[Answered]:
    """The answers to many calls, of which so many are under way at once; the first failure, when all have ended."""
    room = asyncio.Semaphore(in_flight)

    async def one(value: Given) -> Answered:
        async with room:
            return await call(value)

    answers = await asyncio.gather(*map(one, given), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def fits(subject: str, target: str) -> bool:
    """Whether a target is one of those that a subject of a stream stands for: `*` is one word, `>` one or more."""
    words, own = subject.split("."), target.split(".")
    if words[-1] == ">":
        words, own = words[:-1], own[: len(words) - 1] if len(own) >= len(words) else []
    return len(words) == len(own) and all(word in ("*", each) for word, each in zip(words, own, strict=True))


def _message(data: bytes, headers: Mapping[str, str] | None) -> port.Message:
    own = {name: text for name, text in (headers or {}).items() if not name.lower().startswith(_OWN_PREFIX)}
    return port.Message(own, (data, own))


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
