"""Kafka: a topic is the source, another one the retry log, and targets are topics.

Owns: positions, reading and fetching there, and what is looked at before a relay runs.
Does not own: when (`tarry_relay.running`); publishing (`tarry_relay.kafka_output`); how Kafka's client is used
(`tarry_relay.kafka_client`); what is found on the way through a partition (`tarry_relay.reading_on`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import confluent_kafka as kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition, admin

import tarry
from tarry.positions import Kafka1
from tarry_relay import port, relay_settings
from tarry_relay.kafka_client import ClientProperties, ClusterTopics, Event, Thread, failure
from tarry_relay.kafka_output import KafkaOutput
from tarry_relay.kept_messages import Kept
from tarry_relay.reading_on import Search

log = logging.getLogger(__name__)

_NO_OFFSET = KafkaError._AUTO_OFFSET_RESET
# A partition that is to be given up waits so long for a commit that is under way.
_COMMIT_WAIT_S = 1.0
_LOOK_AGAIN_S = 0.1
"""So often it is looked at whether the topic that messages are read from is still the same."""
_REST_S = 1.0
"""A reader that was not asked for so long rests."""
_MESSAGE_BYTES = 500
"""What a message costs in memory beside its key, value and headers."""
_AT_ONCE = 1_000
_AT_ONCE_FOR_NOTHING = 20
"""So many messages are taken of those that came with one that is looked for: what is not kept is read for nothing."""
_POSITION = re.compile(r"(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,18})", re.ASCII)

Pair = tuple[int, int]
"""Partition and offset."""


class Found(NamedTuple):
    """A message, and a moment at which it had been read, by `time.monotonic`."""

    event: Event
    read_until_s: float


class KafkaBroker:
    """One cluster, by a client for each log that is read, one to fetch and one to publish."""

    def __init__(
        self,
        settings: relay_settings.Settings,
        topics: ClusterTopics,
        *,
        source: KafkaReader,
        retries: KafkaReader | None,
        fetched_from: KafkaLog,
        output: KafkaOutput,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self.source = source
        self.retries = retries
        self.log = fetched_from
        self.output = output

    def position_of(self, text: str) -> tuple[int, int]:
        """The position of a partition and an offset, such as `3-17`."""
        found = _POSITION.fullmatch(text)
        try:
            if found is None:
                raise ValueError(text)
            (ledger,), (entry,) = Kafka1.to_positions(int(found[1]), int(found[2]))
        except (ValueError, tarry.InvalidArgument):
            raise port.BadPosition(f"{text!r} is no partition and offset, as Kafka answers a publish: 3-17") from None
        return int(ledger), int(entry)

    def comes_back(self, target: str) -> bool:
        """Whether it is the source or the retry log."""
        return target in self._settings.read_names

    def own_targets(self) -> Sequence[str]:
        """The topics of source and retry log."""
        return self._settings.read_names

    async def findings(self) -> AsyncIterator[port.Finding]:
        """Looks at the topics of source, retry log and targets; changes nothing."""
        source = await self._finding_of("source", self._settings.source.name)
        yield source
        if source.is_good:
            async for each in self._findings_of_source(self._settings.source.name):
                yield each
        if self._settings.retry is not None:
            yield await self._finding_of("retry", self._settings.retry.name)
        for target in self._settings.named_targets():
            yield await self._finding_of("target", target)

    async def _findings_of_source(self, name: str) -> AsyncIterator[port.Finding]:
        told = await self._topics.settings(name)
        policy = told.get("cleanup.policy", "")
        keeps = "compact" not in policy
        text = f"cleanup.policy is {policy}"
        yield port.Finding("compaction", keeps, f"topic {name}: {text}{'' if keeps else ', which drops what waits'}")
        size = int(told.get("retention.bytes") or -1)
        text = (
            f"drops its oldest beyond {size} bytes a partition, also what waits"
            if size >= 0
            else "drops nothing by size"
        )
        yield port.Finding("size", size < 0, f"topic {name}: {text}")
        unclean = told.get("unclean.leader.election.enable") == "true"
        text = "may lose its end and give its offsets again" if unclean else "does not lose its end"
        yield port.Finding("elections", not unclean, f"topic {name}: {text}")
        clock = "the broker" if told.get("message.timestamp.type") == "LogAppendTime" else "the producer"
        yield port.Finding("clock", True, f"topic {name}: delays count from the time that {clock} has given")

    async def _finding_of(self, name: str, topic: str) -> port.Finding:
        try:
            partitions = await self._topics.partitions(topic)
        except port.NotThere:
            return port.Finding(name, False, f"topic {topic}: is not there; make it")
        return port.Finding(name, True, f"topic {topic}: has {partitions} partitions")


class KafkaLog:
    """A topic by its partitions and offsets."""

    def __init__(
        self,
        topic: str,
        topics: ClusterTopics,
        properties: ClientProperties,
        kept: Kept[Found],
        timeout_s: float,
    ) -> None:
        self._topic = topic
        self._topics = topics
        self._consumer = kafka.Consumer(properties.fetcher(topic))
        self._kept = kept
        self._timeout_s = timeout_s
        self._at_once = _AT_ONCE if kept.keeps else _AT_ONCE_FOR_NOTHING
        self._thread = Thread("fetch")
        self._partitions = 0
        """So many it has at least."""
        self._fetched = 0
        self._kept_ones = 0
        self._read_for_it = 0

    async def generation(self) -> str:
        """The topic's id."""
        return await self._topics.generation(self._topic)

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """The first offset that each partition still has."""
        return await self._topics.first_offsets(self._topic, ledgers)

    async def kept_ms(self) -> int | None:
        """The `retention.ms` of the topic."""
        ms = int((await self._topics.settings(self._topic)).get("retention.ms") or -1)
        return None if ms < 0 else ms

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        """The messages at these positions: what was kept, and the rest by reading all their partitions on; None for
        one that is gone for good. The cluster is asked for the generation, unless it was since they were read.
        """
        ledgers, entries = zip(*positions, strict=True)
        records = Kafka1.from_positions(list(ledgers), list(entries))
        pairs = list(zip(records.partition.tolist(), records.offset.tolist(), strict=True))
        found: dict[Pair, Found] = {}
        wanted: dict[int, list[int]] = {}
        for pair in dict.fromkeys(pairs):
            if (kept := self._kept.take(pair)) is None:
                wanted.setdefault(pair[0], []).append(pair[1])
            else:
                found[pair] = kept
        self._fetched += len(pairs)
        self._kept_ones += len(found)
        try:
            if wanted:
                await self._look_for(wanted, found)
            read_until_s = time.monotonic() if wanted else max(each.read_until_s for each in found.values())
            await self._topics.confirm(self._topic, generation, read_until_s)
        except port.Unreachable:
            for pair, kept in found.items():
                self._kept.keep(pair, kept, _size(kept.event))
            raise
        return [_message(found[pair].event) if pair in found else None for pair in pairs]

    async def close(self) -> None:
        """Waits for what is under way, and leaves."""
        await self._thread.end(self._consumer.close)
        if self._fetched:
            told = {"of_these_kept": self._kept_ones, "read_for_the_rest": self._read_for_it}
            log.info("has fetched", extra={"messages": self._fetched, **told})

    async def _look_for(self, wanted: Mapping[int, Sequence[int]], found: dict[Pair, Found]) -> None:
        """Adds what is found at these offsets of each partition."""
        if max(wanted) >= self._partitions:
            self._partitions = await self._topics.partitions(self._topic)
        # A partition that the topic does not have never had what is looked for.
        searches = {each: Search(of) for each, of in wanted.items() if each < self._partitions}
        if searches:
            await self._thread.call(self._read_on, searches, found)

    def _read_on(self, searches: dict[int, Search], found: dict[Pair, Found]) -> None:
        """Reads all partitions on until each search is over. Raises KafkaException, NotThere, Unreachable."""
        self._begin(searches)
        try:
            comes_by_s = time.monotonic() + self._timeout_s
            while searches:
                first: Event | None = self._consumer.poll(0.1)
                if first is not None:
                    events = [first, *self._consumer.consume(self._at_once, 0)]
                    reached = {event.partition(): self._take(event, searches, found) for event in events}
                    self._go_on(searches, reached)
                    comes_by_s = time.monotonic() + self._timeout_s
                elif time.monotonic() > comes_by_s:
                    raise port.Unreachable(f"topic {self._topic}: nothing was read for {self._timeout_s:g} s")
        finally:
            self._consumer.unassign()

    def _take(self, event: Event, searches: Mapping[int, Search], found: dict[Pair, Found]) -> int | None:
        """Finds a message, or keeps it; up to where its partition was read."""
        pair: Pair = (event.partition(), event.offset())
        search = searches.get(pair[0])
        if event.error() is not None:
            return self._look(event, search)
        self._read_for_it += 1
        read = Found(event, time.monotonic())
        if search is not None and search.meets(pair[1]):
            found[pair] = read
        else:
            self._kept.keep(pair, read, _size(event))
        return pair[1]

    def _begin(self, searches: Mapping[int, Search]) -> None:
        self._consumer.incremental_assign(
            [TopicPartition(self._topic, partition, search.next or 0) for partition, search in searches.items()]
        )

    def _go_on(self, searches: dict[int, Search], reached: Mapping[int, int | None]) -> None:
        """Ends searches that are over, and jumps where the next offset is far, or reading has stopped (None)."""
        for partition, offset in reached.items():
            search = searches.get(partition)
            if search is None or not (search.next is None or offset is None or search.jumps(offset)):
                continue
            self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])
            if search.next is None:
                del searches[partition]
            else:
                self._begin({partition: search})

    def _look(self, event: Event, search: Search | None) -> int | None:
        """Looks where a partition begins and ends, of which the end was reached, or which has not the offset that was
        asked for; up to where it was read. Raises KafkaException, NotThere, Unreachable.
        """
        error, reached = event.error(), None
        if error.code() not in (KafkaError._PARTITION_EOF, _NO_OFFSET):
            raise failure(error)
        if search is not None and error.code() == KafkaError._PARTITION_EOF:
            reached = event.offset()
            search.begins_at(reached)
        if search is not None and search.next is not None:
            # Asked for, a leader that is new refuses to name its end before it knows it. What it read may not know it.
            asked = TopicPartition(self._topic, event.partition())
            first, end = self._consumer.get_watermark_offsets(asked, timeout=self._timeout_s)
            search.begins_at(first)
            search.ends_at(end)
        return reached


class KafkaReader:
    """A member of a group, which relays share. A partition is read by one of them. The name of the group has the id of
    the topic: a relay that has not noticed yet that the topic is another one commits nothing there.
    """

    def __init__(
        self,
        topic: str,
        generation: str,
        topics: ClusterTopics,
        properties: ClientProperties,
        timeout_s: float,
        kept: Kept[Found] | None = None,
    ) -> None:
        """`kept`: gets what is read."""
        self._topic = topic
        self._generation = generation
        self._topics = topics
        self._timeout_s = timeout_s
        self._kept = kept
        self._consumer = kafka.Consumer({**properties.reader(topic, generation), "error_cb": self._failed})
        self._polling = Thread(f"read-{topic}")
        self._committing = Thread(f"commit-{topic}")
        # A partition that comes back is another lane: it begins at what was committed.
        self._lanes: dict[int, tuple[int, int]] = {}
        self._lanes_made = 0
        self._giving_up = threading.Lock()
        self._lost: list[tuple[int, int]] = []
        self._early: deque[Event] = deque()
        """What came while nothing more could be taken."""
        self._held: port.Portion | None = None
        """Read, and not yet known to be of the topic that it should be of."""
        self._has_joined = False
        self._is_resting = False
        self._is_away = False
        self._asked_at_s = time.monotonic()
        self._looks_at_s = 0.0

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        """Reads what comes next in the partitions that are this relay's now."""
        if self._held is None:
            self._held = await self._polling.call(self._poll, rows_max, wait_s)
        if self._held.read and self._looks_at_s <= time.monotonic():
            await self._look_whether_same()
        portion, self._held = self._held, None
        if self._kept is not None:
            for each in portion.read:
                read = Found(each.receipt, self._asked_at_s)
                self._kept.keep((each.ledger_id, each.entry_id), read, _size(each.receipt))
        return portion

    async def commit(self, read: Sequence[port.Read]) -> None:
        """Commits the offset behind the last of them; nothing, where the partition is another relay's by now."""
        last = read[-1]
        behind = TopicPartition(
            self._topic, last.ledger_id, last.entry_id + 1, leader_epoch=last.receipt.leader_epoch()
        )
        await self._committing.call(self._commit, last.lane, behind)

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """What lies before the offset that the group has committed in its partition."""
        asked = [TopicPartition(self._topic, each) for each in {ledger for ledger, _ in positions}]
        found = await self._committing.call(self._consumer.committed, asked, self._timeout_s)
        behind = {each.partition: each.offset for each in found if each.error is None}
        return [entry < behind.get(ledger, 0) for ledger, entry in positions]

    async def keep_place(self) -> None:
        """Keeps its place in the group while it is not read, without end: who does not ask is left out of it."""
        while True:
            await asyncio.sleep(_REST_S)
            if self._has_joined and self._asked_at_s + _REST_S < time.monotonic():
                with contextlib.suppress(port.Unreachable, port.NotThere):
                    await self._polling.call(self._rest)

    async def close(self) -> None:
        """Waits for what is under way, and leaves the group."""
        await self._committing.end()
        await self._polling.end(self._consumer.close)

    async def _look_whether_same(self) -> None:
        """An id does not come back: where it is as before, all that was read until now is of the topic that has it."""
        looked_at_s = time.monotonic()
        port.must_be_same(f"topic {self._topic}", self._generation, await self._topics.generation(self._topic))
        self._looks_at_s = looked_at_s + _LOOK_AGAIN_S

    # In the thread of the consumer.

    def _poll(self, rows_max: int, wait_s: float) -> port.Portion:
        """Message by message: each is of the lane that its partition has after the call that gave it."""
        self._take_part()
        read: list[port.Read] = []
        event: Event | None = self._early.popleft() if self._early else self._consumer.poll(wait_s)
        while event is not None:
            if event.error() is not None and read:
                self._early.append(event)
                break
            if event.error() is not None:
                self._look(event)
            elif (lane := self._lanes.get(event.partition())) is not None:
                read.append(_read(event, lane))
            if len(read) >= rows_max:
                break
            event = self._early.popleft() if self._early else self._consumer.poll(0)
        self._asked_at_s = time.monotonic()
        if not read and self._is_away:
            self._consumer.list_topics(self._topic, timeout=self._timeout_s)
            self._is_away = False
        lost, self._lost = self._lost, []
        return port.Portion([each for each in read if self._lanes.get(each.ledger_id) == each.lane], lost)

    def _take_part(self) -> None:
        if not self._has_joined:
            self._consumer.subscribe(
                [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
            )
            self._has_joined = True
        if self._is_resting:
            self._is_resting = False
            self._consumer.resume(self._partitions())

    def _rest(self) -> None:
        if not self._is_resting:
            self._is_resting = True
            self._consumer.pause(self._partitions())
        event = self._consumer.poll(0)
        if event is not None:
            self._early.append(event)

    def _assigned(self, consumer: kafka.Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        # A pause is of the partition, and is still there when it comes back.
        (consumer.pause if self._is_resting else consumer.resume)(partitions)
        for each in partitions:
            self._lanes_made += 1
            self._lanes[each.partition] = each.partition, self._lanes_made
        self._looks_at_s = 0.0
        log.info("reads partitions", extra={"topic": self._topic, "partitions": sorted(self._lanes)})

    def _revoked(self, consumer: kafka.Consumer, partitions: list[TopicPartition]) -> None:
        # A commit that was sent ends before another relay has the partition, or it would undo the other's. One that was
        # not is held back by Kafka's client until this call returns.
        is_over = self._giving_up.acquire(timeout=_COMMIT_WAIT_S)
        try:
            for each in partitions:
                lane = self._lanes.pop(each.partition, None)
                if lane is not None:
                    self._lost.append(lane)
        finally:
            if is_over:
                self._giving_up.release()

    def _failed(self, error: KafkaError) -> None:
        if error.code() in (KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION):
            self._is_away = True

    def _look(self, event: Event) -> None:
        """Raises NotThere, Unreachable."""
        error = event.error()
        if error.code() == KafkaError._MAX_POLL_EXCEEDED or event.partition() not in self._lanes:
            log.warning("Kafka says", extra={"topic": self._topic, "error": error.str()})
        elif error.code() != _NO_OFFSET:
            raise failure(error)
        else:
            self._begin(event)

    def _begin(self, event: Event) -> None:
        """Begins a partition at its first offset: nothing was committed, or what comes next is not there."""
        partition = TopicPartition(self._topic, event.partition(), kafka.OFFSET_BEGINNING)
        self._consumer.incremental_unassign([partition])
        self._consumer.incremental_assign([partition])
        self._looks_at_s = 0.0
        fields = {"topic": self._topic, "partition": event.partition()}
        if event.offset() is None or event.offset() < 0:
            log.info("reads a partition from its first offset", extra=fields)
        else:
            fields["offset"] = event.offset()
            log.error("the log has not what was to be read next; it is read from its first offset", extra=fields)

    def _partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self._topic, each) for each in self._lanes]

    # In another thread, so that a commit does not wait for what is read next.

    def _commit(self, lane: Hashable, behind: TopicPartition) -> None:
        with self._giving_up:
            if self._lanes.get(behind.partition) == lane:
                for each in self._consumer.commit(offsets=[behind], asynchronous=False) or ():
                    if each.error is not None:
                        raise KafkaException(each.error)


@contextlib.asynccontextmanager
async def opened(settings: relay_settings.Settings, broker: relay_settings.Kafka) -> AsyncIterator[KafkaBroker]:
    """Connects. Raises SettingsError, Unreachable."""
    relay, source = settings.relay, settings.source.name
    properties = ClientProperties(broker, relay.subscription, relay.id)
    kept: Kept[Found] = Kept(broker.kept_bytes)
    async with contextlib.AsyncExitStack() as stack:
        with _refused_settings():
            client = admin.AdminClient(properties.shared())
            topics = ClusterTopics(client, broker.timeout_s)
            fetched_from = KafkaLog(source, topics, properties, kept, broker.timeout_s)
        stack.push_async_callback(fetched_from.close)
        output = KafkaOutput(source, properties, broker)
        stack.push_async_callback(output.close)
        try:
            await asyncio.to_thread(client.list_topics, timeout=broker.timeout_s)
        except KafkaException as error:
            told, text = relay_settings.without_credentials(broker.url), error.args[0].str()
            raise port.Unreachable(f"{told} cannot be used within {broker.timeout_s:g} s: {text}") from error
        generations = [await _generation_now(topics, name) for name in settings.read_names]
        with _refused_settings():
            readers = [
                KafkaReader(name, generation, topics, properties, broker.timeout_s, kept if name == source else None)
                for name, generation in zip(settings.read_names, generations, strict=True)
            ]
        for each in readers:
            stack.push_async_callback(each.close)
            keeping = asyncio.create_task(each.keep_place())
            stack.callback(keeping.cancel)
        yield KafkaBroker(
            settings,
            topics,
            source=readers[0],
            retries=readers[1] if len(readers) > 1 else None,
            fetched_from=fetched_from,
            output=output,
        )


@contextlib.contextmanager
def _refused_settings() -> Iterator[None]:
    """Raises SettingsError for what Kafka's client refuses."""
    try:
        yield
    except KafkaException as error:
        raise relay_settings.SettingsError(f"broker: {error.args[0].str()}") from error


async def _generation_now(topics: ClusterTopics, topic: str) -> str:
    """Empty: it is not there, and what begins to read it when it is finds out. Raises Unreachable."""
    try:
        return await topics.generation(topic)
    except port.NotThere:
        return ""


def _read(event: Event, lane: tuple[int, int]) -> port.Read:
    (ledger,), (entry,) = Kafka1.to_positions(event.partition(), event.offset())
    _, sent_at_ms = event.timestamp()
    return port.Read(int(ledger), int(entry), _message(event), lane, max(0, sent_at_ms), receipt=event)


def _message(event: Event) -> port.Message:
    """Of headers with one name the last one is read, and all are published again."""
    headers = event.headers() or []
    told = {name: value.decode(errors="replace") for name, value in headers if value is not None}
    return port.Message(told, (event.key(), event.value(), headers))


def _size(event: Event) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in event.headers() or ())
    return _MESSAGE_BYTES + len(event.key() or b"") + len(event.value() or b"") + headers
