"""Adapts NATS JetStream: a stream is the source, another one the retry log, and targets are subjects of streams.

Contents: `NatsBroker` with names and findings, `NatsLog`, `NatsReader`, `NatsOutput`, and `opened`. Tables:
`nats_judgement`, `nats_answers`. Protocol: `nats_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tarry.positions import NatsStream1
from tarry_relay import nats_answers, nats_client, nats_judgement, port, relay_settings
from tarry_relay.memory_shares import ROWS_FIRST, portion_bytes
from tarry_relay.nats_answers import ApiError, Failed
from tarry_relay.nats_client import NatsClient
from tarry_relay.port import Finding, Grade

_NO_MESSAGE = 10_037
"""JetStream's code for a sequence that a stream does not have"""
_ACK_PREFIX = "$JS.ACK."
_ACK_WORDS = 9
"""Words of the reply subject of a message; two or three more if the server names domain and account"""
_ENDS = re.compile(r"404|408|409 (Batch Completed|Exceeded MaxAckPending|Message Size Exceeds MaxBytes)")
"""Statuses that end a pull without a fault"""
_HEARTBEAT = 100
_QUIET_S = 0.1
"""Time without another message after which a portion is complete (seconds)"""
_RETRY_READER = "tarry-relay reads the failures of topic "
"""Beginning of the description of a retry log's consumer; the topic follows"""
_FLIGHT_BYTES = 32 * 2**20
"""Bytes of messages in flight; the server closes a connection that has more than 64 MiB to take"""
_PULL_BYTES = 8 * 2**20
"""Bytes that one pull may bring, if no message can be that large alone"""
_STREAMS_MAX = 10_000
"""Targets whose streams are remembered"""
Given = TypeVar("Given")
Answered = TypeVar("Answered")


class NatsBroker:
    """One connection, which is opened again whenever it breaks."""

    def __init__(self, client: NatsClient, settings: relay_settings.Settings, broker: relay_settings.Nats) -> None:
        self._client = client
        self._settings = settings
        self._own_subjects: dict[str, Sequence[str]] = {}
        """Stream that the relay reads -> its subjects, as they were last seen"""
        bytes_max = portion_bytes(settings.relay.memory_bytes)
        self._source = NatsLog(client, settings.source.name, broker, self._own_subjects, bytes_max)
        self.log = self._source
        self.source = NatsReader(client, self._source, settings.relay, broker)
        self._retry_log: NatsLog | None = None
        self.retries: NatsReader | None = None
        if settings.retry is not None:
            self._retry_log = NatsLog(client, settings.retry.name, broker, self._own_subjects, bytes_max)
            description = f"{_RETRY_READER}{settings.relay.topic}"
            self.retries = NatsReader(client, self._retry_log, settings.relay, broker, description)
        self.output = NatsOutput(client, broker)

    async def learn_own_subjects(self) -> None:
        """Ask for the subjects of source and retry log; a stream that does not exist has none. Raises Unreachable."""
        for log in (self._source, self._retry_log):
            if log is not None:
                with contextlib.suppress(port.NotThere):
                    await log.info()

    def header_key(self, name: str) -> str:
        """Return a header's name in lower case, because clients of NATS read any case."""
        return nats_client.header_key(name)

    def position_of(self, text: str) -> tuple[int, int]:
        """Return the position of a stream sequence, such as `17`. Raises BadPosition."""
        return nats_judgement.position_of(text)

    def position_fault(self, ledger_id: int, entry_id: int) -> str:
        """Return the reason why (ledger, entry) cannot be a position of a stream; empty if it can."""
        return nats_judgement.position_fault(ledger_id, entry_id)

    def target_fault(self, target: str) -> str:
        """Return the reason why no message can be published to a subject; empty if one can."""
        return nats_judgement.target_fault(target)

    def message_fault(self, message: port.Message) -> str:
        """Return the reason why a message's headers do not fit next to those of the relay; empty if they do."""
        return nats_judgement.headers_fault(message.body.headers_size)

    def comes_back(self, target: str) -> bool:
        """Return whether a target is a subject of the source or of the retry log."""
        return any(nats_judgement.fits(each, target) for subjects in self._own_subjects.values() for each in subjects)

    def own_targets(self) -> Sequence[str]:
        """Return the subjects of source and retry log, with words in place of wildcards."""
        return nats_judgement.examples(each for subjects in self._own_subjects.values() for each in subjects)

    async def must_answer(self) -> None:
        """Ask JetStream for the source, within `broker.timeout_s`. Raises Unreachable, SessionOver, NotThere."""
        try:
            async with asyncio.timeout(self._client.timeout_s):
                await self._source.info()
        except TimeoutError as error:
            raise Failed(nats_answers.TIMEOUT, f"no answer within {self._client.timeout_s:g} s") from error

    async def findings(self) -> AsyncIterator[Finding]:
        """Judge the streams of source, retry log and targets, and the clock; change nothing."""
        clock: Finding | None = None
        if fault := self._name_fault():
            yield fault
        else:
            asked_at_ms = port.now_ms()
            try:
                for each in await self.source_findings():
                    yield each
                clock = _finding_of_clock(self._source.told_at, asked_at_ms)
            except port.NotThere:
                yield _missing("source", self._source.stream)
        if self._retry_log is not None:
            for each in await self._findings_of_retries(self._retry_log):
                yield each
        if clock is not None:
            yield clock
        for subject in self._settings.named_targets():
            yield await self._finding_of_target(subject)

    async def source_findings(self) -> Sequence[Finding]:
        """Judge again whether the source can drop a payload before its delivery. Raises NotThere, Unreachable."""
        stream = self._source.stream
        config = (await self._source.info())["config"]
        there = Finding("source", Grade.OK, f"stream {stream}: exists")
        return [there, *nats_judgement.judge_source(stream, config)]

    def _name_fault(self) -> Finding | None:
        if fault := nats_judgement.name_fault(self._source.stream):
            return Finding("source", Grade.WRONG, f"source.name: {fault}; take another name")
        # The consumer's name also contains the generation.
        if fault := nats_judgement.name_fault(self._settings.relay.subscription, nats_judgement.NAME_BYTES_MAX - 32):
            return Finding("source", Grade.WRONG, f"relay.subscription: {fault}; take another name")
        return None

    async def _findings_of_retries(self, log: NatsLog) -> Sequence[Finding]:
        if fault := nats_judgement.name_fault(log.stream):
            return [Finding("retry", Grade.WRONG, f"retry.name: {fault}; take another name")]
        try:
            config = (await log.info())["config"]
            others = await self._other_retry_readers(log)
        except port.NotThere:
            return [_missing("retry", log.stream)]
        there = Finding("retry", Grade.OK, f"stream {log.stream}: exists")
        return [there, *others, *nats_judgement.durability(f"stream {log.stream}:", config)]

    async def _other_retry_readers(self, log: NatsLog) -> Sequence[Finding]:
        """Return a finding for each relay of another topic or subscription that reads this retry log."""
        relay = self._settings.relay
        own_name = durable_of(relay.subscription, await log.generation())
        found = []
        consumers: list[Mapping[str, Any]] = []
        while page := (await self._client.api(f"CONSUMER.LIST.{log.stream}", offset=len(consumers)))["consumers"]:
            consumers += page
        for each in consumers:
            description, name = each["config"].get("description", ""), each["name"]
            topic = description.removeprefix(_RETRY_READER)
            if topic != description and (topic, name) != (relay.topic, own_name):
                reads = (
                    f"consumer {name} of a relay with topic {topic} reads it, too, so failures go to the wrong relay"
                )
                does = "give each relay a retry log of its own, and delete the consumer if that relay is gone"
                found.append(Finding("retry readers", Grade.WRONG, f"stream {log.stream}: {reads}; {does}"))
        return found

    async def _finding_of_target(self, subject: str) -> Finding:
        if fault := nats_judgement.target_fault(subject):
            return Finding("target", Grade.WRONG, f"subject {fault}; take another one")
        streams = await streams_of(self._client, subject)
        if not streams:
            text = f"subject {subject}: no stream has it, so nothing can be published; create one"
            return Finding("target", Grade.MISSING, text)
        (stream, *_) = streams
        try:
            config = (await self._client.api(f"STREAM.INFO.{stream}"))["config"]
        except port.NotThere:
            return _missing("target", stream)
        return nats_judgement.judge_target(subject, stream, config)


class NatsLog(port.FirstGeneration):
    """A stream, by sequence number."""

    tells_limits = True

    def __init__(
        self,
        client: NatsClient,
        stream: str,
        broker: relay_settings.Nats,
        own_subjects: dict[str, Sequence[str]],
        bytes_max: int,
    ) -> None:
        """Bring about `bytes_max` a fetch."""
        self._client = client
        self.stream = stream
        self._bytes_max = bytes_max
        self._flight = _Flight(broker.in_flight, min(_FLIGHT_BYTES, bytes_max))
        self._expected = client.max_payload
        """Expected size of the next message, from earlier ones (bytes)"""
        self._own_subjects = own_subjects
        self._allow_direct = True
        self.told_at = ""
        """Server's clock in the last answer, RFC 3339; empty if it named none"""

    async def info(self) -> Mapping[str, Any]:
        """Return NATS's description of the stream, with every field. Raises NotThere, Unreachable, SessionOver."""
        if fault := nats_judgement.name_fault(self.stream):
            # NATS would not answer.
            raise port.NotThere(f"stream {fault}")
        try:
            told = await self._client.api(f"STREAM.INFO.{self.stream}")
        except port.NotThere as error:
            raise port.NotThere(f"stream {self.stream}: {error}") from error
        self._allow_direct = bool(told["config"].get("allow_direct"))
        self._own_subjects[self.stream] = told["config"].get("subjects") or ()
        self.told_at = told.get("ts", "")
        return told

    async def _generation_now(self) -> str:
        """Return the moment of the stream's creation, to the µs."""
        made = datetime.datetime.fromisoformat((await self.info())["created"]).astimezone(datetime.UTC)
        return f"{made:%Y%m%dT%H%M%S.%f}Z"

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        """Return the messages at these positions by direct gets, many in flight.

        Returns None for one that is gone for good, and NOT_YET once a portion is full.
        """
        ledgers, entries = zip(*positions, strict=True)
        sequences = NatsStream1.from_positions(list(ledgers), list(entries)).tolist()
        failures: list[Exception] = []
        came = came_bytes = 0

        async def fetch_one(sequence: int) -> port.Message | None:
            nonlocal came, came_bytes
            if failures:
                raise failures[0]
            if came_bytes >= self._bytes_max:
                return port.NOT_YET
            try:
                message = await self._fetch_one(sequence)
            except port.Unreachable as error:
                failures.append(error)
                raise
            came += 1
            came_bytes += 0 if message is None else message.size_bytes
            return message

        def expected(_: int) -> int:
            # Messages of an earlier call may have been smaller: the first ones of each call show the present size.
            return self._expected if came else max(self._expected, self._bytes_max // ROWS_FIRST)

        found: list[port.Message | None] = []
        for each in await _gathered(fetch_one, sequences, self._flight, expected):
            if isinstance(each, port.Unreachable):
                # All messages together may have been too large for the connection.
                self._expected = self._client.max_payload
                found.append(port.NOT_YET)
            elif isinstance(each, Exception):
                raise each
            else:
                found.append(each)
        if failures and all(each is port.NOT_YET for each in found):
            raise failures[0]
        port.must_be_same(f"stream {self.stream}", generation, await self.generation())
        return found

    async def _fetch_one(self, sequence: int) -> port.Message | None:
        if self._allow_direct:
            asked = json.dumps({"seq": sequence}).encode()
            async with self._client.asking(f"$JS.API.DIRECT.GET.{self.stream}", asked) as answer:
                found = await answer()
            if nats_client.sequence_of(found) == sequence:
                return self._fetched(nats_client.fetched(found))
        # A replica that lags behind has no message either, but its leader knows.
        try:
            told = await self._client.api(f"STREAM.MSG.GET.{self.stream}", seq=sequence)
        except ApiError as error:
            if error.err_code != _NO_MESSAGE:
                raise
            return None
        return self._fetched(nats_client.stored(told["message"]))

    def _fetched(self, message: port.Message) -> port.Message:
        self._expected = max(message.size_bytes, self._expected * 7 // 8)
        return message

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """Return the first sequence number that the stream still has, for each of the ledgers."""
        first = (await self.info())["state"]["first_seq"]
        return dict.fromkeys(ledgers, int(first))

    async def kept_ms(self) -> int | None:
        """Return the `max_age` of the stream (ms), or None if it has none."""
        age_ns = (await self.info())["config"].get("max_age") or 0
        return int(age_ns) // 1_000_000 or None


class NatsReader:
    """A durable pull consumer, which relays share.

    Its name contains the generation of its stream: a relay that has not noticed yet that the stream is another one can
    neither read nor acknowledge anything there.
    """

    commits_in_order = False

    def __init__(
        self,
        client: NatsClient,
        log: NatsLog,
        relay: relay_settings.Relay,
        broker: relay_settings.Nats,
        description: str = "",
    ) -> None:
        self._client = client
        self._log = log
        self._subscription = relay.subscription
        # For all relays together, each of which holds as much as it reads ahead
        self._max_ack_pending = 16 * relay.read_ahead
        self._pull_bytes = min(_PULL_BYTES, portion_bytes(relay.memory_bytes))
        self._ack_wait_s = broker.ack_wait_s
        self._description = description
        self.hold_every_s: float | None = broker.ack_wait_s / 3
        self._inbox: nats_client.Inbox | None = None
        self._pull: _Pull | None = None
        """The unfinished pull"""
        self._pulls = itertools.count(1)

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        """Return the next messages; an empty portion if none comes within `wait_s`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        try:
            inbox = self._inbox = self._inbox or await self._join()
            await self._ask_for(inbox, rows_max, wait_s, no_wait=True)
            read = await self._come(inbox, rows_max, until_s)
            if not read and self._pull is None and (left_s := until_s - loop.time()) > 0:
                # Servers differ in whether a pull without waiting waits for its first message. A full consumer refuses
                # one, and so is one refused whose first message is too large. This pull asks for one message, because
                # another would wait here until the next call.
                await self._ask_for(inbox, 1, left_s, no_wait=False)
                read = await self._come(inbox, 1, until_s)
        except port.Unreachable:
            # The consumer may be gone, with the stream or alone; the next call finds out.
            left, self._inbox, self._pull = self._inbox, None, None
            if left is not None:
                await self._client.leave(left)
            raise
        return port.Portion(read)

    async def commit(self, read: Sequence[port.Read]) -> None:
        """Acknowledge messages one by one, because others between them may be another relay's.

        Waits until NATS has the last.
        """
        if not read:
            return
        *others, last = (each.receipt for each in read)
        for receipt in others:
            await self._client.send(receipt, b"")
        await self._client.ask(last)

    async def hold(self, read: Sequence[port.Read]) -> None:
        """Report to NATS that these are in progress, which restarts `ack_wait_s` before it redelivers them."""
        for each in read:
            await self._client.send(each.receipt, b"+WPI")

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """Return which lie below the consumer's floor, up to which everything is acknowledged.

        NATS does not report which are acknowledged above it.
        """
        durable = durable_of(self._subscription, await self._log.first_generation())
        told = await self._client.api(f"CONSUMER.INFO.{self._log.stream}.{durable}")
        floor = int(told["ack_floor"]["stream_seq"])
        return [entry <= floor for _, entry in positions]

    async def _join(self) -> nats_client.Inbox:
        """Create the consumer, or take the existing one. It is gone if its stream was deleted."""
        stream, generation = self._log.stream, await self._log.first_generation()
        durable = durable_of(self._subscription, generation)
        allowed = nats_judgement.max_ack_pending((await self._log.info())["config"], self._max_ack_pending)
        asks_for = {
            "durable_name": durable,
            "description": self._description,
            "ack_policy": "explicit",
            "ack_wait": int(self._ack_wait_s * 1e9),
            "max_ack_pending": allowed,
        }
        call = f"CONSUMER.DURABLE.CREATE.{stream}.{durable}"
        await self._client.api(call, stream_name=stream, config=asks_for)
        if (now := await self._log.generation()) != generation:
            # It belongs to another stream, which no relay of this generation may read.
            await self._client.api(f"CONSUMER.DELETE.{stream}.{durable}")
            port.must_be_same(f"stream {stream}", generation, now)
        return await self._client.listen(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}")

    async def _ask_for(self, inbox: nats_client.Inbox, rows_max: int, wait_s: float, *, no_wait: bool) -> None:
        """Send a pull, unless the last one has not ended, which then continues."""
        now_s = time.monotonic()
        if self._pull is not None and now_s < self._pull.given_up_s:
            return
        asked: dict[str, Any] = {"batch": rows_max, "expires": max(1_000_000, int(wait_s * 1e9))}
        if no_wait:
            asked |= {"no_wait": True, "max_bytes": max(self._pull_bytes, 2 * self._client.max_payload)}
        reply = f"{inbox.subject}.{next(self._pulls)}"
        self._pull = _Pull(reply, rows_max, now_s, now_s + wait_s + self._client.timeout_s)
        await self._client.send(inbox.answers.subject, json.dumps(asked).encode(), reply=reply)

    async def _come(self, inbox: nats_client.Inbox, rows_max: int, until_s: float) -> list[port.Read]:
        """Return what arrives for the pull, until it ends, or has brought something and then nothing for a moment."""
        loop = asyncio.get_running_loop()
        read: list[port.Read] = []
        while self._pull is not None and len(read) < rows_max:
            wait_until_s = (loop.time() if read else max(until_s, loop.time())) + _QUIET_S
            try:
                message = await inbox.answers.next(wait_until_s)
                if message is None:
                    break
                if message.reply.startswith(_ACK_PREFIX):
                    read.append(self._read_of(message, self._pull))
                    self._pull.left -= 1
                elif message.subject == self._pull.reply:
                    self._pull.end(message)
            except port.Unreachable:
                self._pull = None
                if not read:
                    raise
            else:
                if self._pull.left <= 0:
                    self._pull = None
        return read

    def _read_of(self, message: Any, pull: _Pull) -> port.Read:
        words = message.reply.split(".")
        # $JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<delivered>.<sequence>.<of consumer>.<time>.<pending>[.<any>]
        first = 2 if len(words) == _ACK_WORDS else 4
        delivered, sequence, _, sent_ns = (int(each) for each in words[first + 2 : first + 6])
        (ledger,), (entry,) = NatsStream1.to_positions(sequence)
        return port.Read(
            int(ledger),
            int(entry),
            nats_client.message_of(nats_client.raw_block(message), message.data, sent_ns // 1_000_000),
            lane=self._log.stream,
            receipt=message.reply,
            alone_until_s=pull.sent_s + self._ack_wait_s if delivered == 1 else 0.0,
        )


@dataclasses.dataclass(slots=True)
class _Pull:
    """An unfinished request for messages."""

    reply: str
    left: int
    """Messages that may still arrive; 0 once it has ended"""
    sent_s: float
    """Time when it was sent, by `time.monotonic`: its messages were not delivered before"""
    given_up_s: float
    """Time until which its end is awaited, by `time.monotonic`"""

    def end(self, status: Any) -> None:
        """Process a status. Raises Failed if it reports more than that there is nothing."""
        code, said = nats_client.status_of(status), nats_client.description_of(status)
        if code == _HEARTBEAT:
            return
        self.left = 0
        if not _ENDS.match(said):
            known = nats_answers.NO_RESPONDERS if code == nats_client.NO_RESPONDERS else said
            raise Failed(known, f"the consumer does not give messages: {said or 'no reason given'}")


class NatsOutput:
    """Subjects, each in a stream that drops repeats within its duplicate window."""

    def __init__(self, client: NatsClient, broker: relay_settings.Nats) -> None:
        self._client = client
        self._flight = _Flight(broker.in_flight)
        self._streams: dict[str, Sequence[str]] = {}
        """Target -> the streams that have it, as of JetStream's last answer"""

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[port.Produced]:
        """Publish messages, many in flight; confirmed ones are durable.

        A message is taken when the stream that has its target confirms it: any service may answer on a subject.
        """
        await self._client.up()
        streams, unsent = await self._streams_of({each.target for each in messages})
        sent = [each for each in messages if each.target in streams]
        outcomes = await self._publish_all(sent, streams)
        doubtful = {
            each.target
            for each, outcome in zip(sent, outcomes, strict=True)
            if isinstance(outcome, Failed) and outcome.code in (nats_answers.NO_RESPONDERS, nats_answers.NOT_JETSTREAM)
        }
        for target in doubtful:
            self._streams.pop(target, None)
        now, gone = await self._streams_of(doubtful)
        said = iter(zip(sent, outcomes, strict=True))
        return [
            nats_answers.produced_nothing(each.target, unsent[each.target])
            if each.target in unsent
            else _produced(*next(said), now, gone)
            for each in messages
        ]

    async def _publish_all(
        self, messages: Sequence[port.Outgoing], streams: Mapping[str, Sequence[str]]
    ) -> Sequence[Exception | None]:
        """Publish messages until the connection fails, or for each target until it does not answer."""
        stopped: dict[str, Exception] = {}
        everywhere = ""

        async def publish(outgoing: port.Outgoing) -> None:
            if (reason := stopped.get(everywhere) or stopped.get(outgoing.target)) is not None:
                raise Failed(nats_answers.NOT_SENT, f"not sent, since those before it have failed: {reason}")
            try:
                await self._publish(outgoing, streams[outgoing.target])
            except port.SessionOver as error:
                stopped[everywhere] = error
                raise
            except Failed as error:
                if error.code in (nats_answers.LOST, nats_answers.NOT_CONNECTED):
                    stopped[everywhere] = error
                elif error.code == nats_answers.TIMEOUT:
                    stopped[outgoing.target] = error
                raise

        return await _gathered(publish, messages, self._flight, _size_of)

    async def _streams_of(
        self, targets: Collection[str]
    ) -> tuple[Mapping[str, Sequence[str]], Mapping[str, Exception]]:
        """Return the streams that have each target, and for other targets why they cannot be published to now."""
        if len(self._streams) > _STREAMS_MAX:
            self._streams.clear()
        found = {target: self._streams[target] for target in targets if target in self._streams}
        failed: dict[str, Exception] = {}
        unknown = [target for target in targets if target not in found]
        answers = await _gathered(lambda target: streams_of(self._client, target), unknown, self._flight, lambda _: 0)
        for target, answer in zip(unknown, answers, strict=True):
            if isinstance(answer, port.SessionOver):
                raise answer
            if isinstance(answer, Exception):
                failed[target] = answer
            elif answer:
                found[target] = self._streams[target] = answer
            else:
                failed[target] = Failed(nats_answers.NO_STREAM, "no stream has this subject")
        return found, failed

    async def _publish(self, outgoing: port.Outgoing, streams: Sequence[str]) -> None:
        """Publish a message until one of these streams has taken it. Raises Failed, ApiError, SessionOver."""
        data = b"" if outgoing.message is None else outgoing.message.body.data
        other: str | None = None
        async with self._client.asking(outgoing.target, data, block=nats_client.block_of(outgoing)) as answer:
            while True:
                try:
                    message = await answer()
                except Failed as error:
                    if error.code == nats_answers.TIMEOUT and other is not None:
                        raise _OfAnotherStream(other, streams) from error
                    raise
                if nats_client.status_of(message) == nats_client.NO_RESPONDERS:
                    raise Failed(nats_answers.NO_RESPONDERS, "no stream takes it now: it starts, or has no leader")
                told = nats_answers.read_answer(message.data)
                if told is not None and told.stream in streams:
                    if told.error is not None:
                        raise told.error
                    return
                other = "" if told is None else told.stream


class _OfAnotherStream(Failed):
    """An answer to a publish by something else: a stream of that name, or a service if it is empty."""

    def __init__(self, stream: str, streams: Sequence[str]) -> None:
        who = f"stream {stream!r}" if stream else "a service"
        super().__init__(nats_answers.NOT_JETSTREAM, f"{who} answered, and not stream {' or '.join(streams)}")
        self.stream = stream


@contextlib.asynccontextmanager
async def opened(settings: relay_settings.Settings, broker: relay_settings.Nats) -> AsyncIterator[NatsBroker]:
    """Connect. Raises Unreachable, SettingsError."""
    async with nats_client.connected(f"tarry-relay {settings.relay.id}", broker) as client:
        made = NatsBroker(client, settings, broker)
        await made.learn_own_subjects()
        yield made


def durable_of(subscription: str, generation: str) -> str:
    """Return the name of a consumer, which has no full stop."""
    return f"{subscription}@{generation.replace('.', '_')}"


async def streams_of(client: NatsClient, subject: str) -> Sequence[str]:
    """Ask which streams have a subject. Raises Unreachable, SessionOver, ApiError."""
    return tuple((await client.api("STREAM.NAMES", subject=subject)).get("streams") or ())


def _produced(
    outgoing: port.Outgoing,
    outcome: Exception | None,
    streams: Mapping[str, Sequence[str]],
    gone: Mapping[str, Exception],
) -> port.Produced:
    """Return the result of a message, by JetStream's present streams for the targets in doubt."""
    target = outgoing.target
    if outcome is None:
        return port.Produced()
    if isinstance(outcome, _OfAnotherStream) and outcome.stream in streams.get(target, ()):
        return port.Produced()
    if isinstance(outcome, Failed) and outcome.code == nats_answers.NO_RESPONDERS:
        # A stream without a leader does not answer either.
        missing = gone.get(target)
        if isinstance(missing, Failed) and missing.code == nats_answers.NO_STREAM:
            return nats_answers.produced(target, missing)
    return nats_answers.produced(target, outcome)


def _size_of(outgoing: port.Outgoing) -> int:
    if outgoing.message is None:
        return 0
    return outgoing.message.size_bytes


def _missing(name: str, stream: str) -> Finding:
    return Finding(name, Grade.MISSING, f"stream {stream}: does not exist; create it")


def _finding_of_clock(told: str, asked_at_ms: int) -> Finding:
    try:
        moment = datetime.datetime.fromisoformat(told)
    except ValueError:
        return Finding("clock", Grade.WARNING, "NATS: does not say its time; compare the clocks of both machines")
    return port.finding_of_clock("NATS", int(moment.timestamp() * 1_000), asked_at_ms)


class _Flight:
    """A limit on what is in flight, by number and by bytes; anything larger than the limit goes alone."""

    def __init__(self, number_max: int, bytes_max: int = _FLIGHT_BYTES) -> None:
        self._number_max = number_max
        self._bytes_max = bytes_max
        self._number = self._bytes = 0
        self._has_left = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Wait until there is room for this many bytes."""
        while self._number >= self._number_max or (self._number and self._bytes + size > self._bytes_max):
            self._has_left.clear()
            await self._has_left.wait()
        self._number += 1
        self._bytes += size

    def leave(self, size: int, _: object = None) -> None:
        """Release the room."""
        self._number -= 1
        self._bytes -= size
        self._has_left.set()


async def _gathered(
    call: Callable[[Given], Awaitable[Answered]],
    given: Iterable[Given],
    flight: _Flight,
    size_of: Callable[[Given], int],
) -> list[Answered | Exception]:
    """Return the answers to many calls, or what each has raised, once all have ended."""

    async def one(value: Given) -> Answered | Exception:
        try:
            return await call(value)
        except Exception as error:  # noqa: BLE001 - it is the answer to this one alone
            return error

    tasks: list[asyncio.Task[Answered | Exception]] = []
    try:
        for value in given:
            size = size_of(value)
            await flight.enter(size)
            task = asyncio.create_task(one(value))
            # A task that is cancelled before it begins runs none of its code.
            task.add_done_callback(functools.partial(flight.leave, size))
            tasks.append(task)
        return await asyncio.gather(*tasks)
    finally:
        await port.end(tasks)
