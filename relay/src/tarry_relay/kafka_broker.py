"""Reads and fetches from Kafka: a topic is the source, another one the retry log, and targets are topics.

The session: `KafkaBroker`, `opened`. Fetching by position: `KafkaLog`, with what was `Kept`. Reading on: `KafkaReader`.
Clients and publishing: `kafka_client`. Meanings of answers: `kafka_answers`. Names and settings: `kafka_judgement`.
Searches: `pacing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import confluent_kafka as kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition, admin

from tarry_relay import kafka_answers, kafka_judgement, port, relay_settings
from tarry_relay.kafka_client import (
    ClientProperties,
    ClusterTopics,
    Event,
    KafkaOutput,
    Record,
    Thread,
    Turns,
    Untold,
    ended_within,
)
from tarry_relay.memory_shares import portion_bytes
from tarry_relay.pacing import Search

log = logging.getLogger(__name__)

Content = TypeVar("Content")
_NO_OFFSET = KafkaError._AUTO_OFFSET_RESET
_COMMIT_WAIT_S = 1.0
"""Wait for the commit of a partition that is given up (seconds)"""
_LOOK_AGAIN_S = 0.1
"""Pause between checks that the topic is still the same (seconds)"""
_REST_S = 1.0
"""Time without a read after which a reader rests (seconds)"""
_POLL_S = 0.1
"""Longest poll, so that a reader can end, and that calls of other threads do not wait for long (seconds)"""
_GIVE_WAY_S = 1.0
"""Longest wait of a poll for calls of other threads (seconds): one may wait for what the poll reports"""
_AT_ONCE = 1_000
_AT_ONCE_FOR_NOTHING = 20
"""Messages to take together; few if passed ones are not kept, because these are read in vain"""

Pair = tuple[int, int]
"""Partition and offset"""


_READ_AHEAD_BYTES_MAX = 16 * 2**20
"""Bytes that each consumer reads ahead at most; a relay has three consumers, one of them for the retry log"""


class Kept(Generic[Content]):
    """A cache of messages by position, from which the oldest go first. Several threads may use it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._messages: dict[Pair, tuple[Content, int]] = {}
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        """True if there is room for anything."""
        return self._bytes_max > 0

    def keep(self, position: Pair, message: Content, size: int) -> None:
        """Keep a message of this size (bytes), if there is room for it at all."""
        with self._lock:
            self._drop(position)
            if size > self._bytes_max:
                return
            self._messages[position] = message, size
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._messages)))

    def take(self, position: Pair) -> Content | None:
        """Remove and return the message, or None if it is not kept."""
        with self._lock:
            return self._drop(position)

    def _drop(self, position: Pair) -> Content | None:
        found = self._messages.pop(position, None)
        if found is None:
            return None
        message, size = found
        self._bytes -= size
        return message


class Found(NamedTuple):
    """A message, and a moment by which it had been read, by `time.monotonic`."""

    record: Record
    read_until_s: float


class KafkaBroker:
    """A session with a cluster: a client for each log that is read, one to fetch and one to publish."""

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

    def header_key(self, name: str) -> str:
        """Return a header's name in lower case."""
        return kafka_judgement.header_key(name)

    def position_of(self, text: str) -> tuple[int, int]:
        """Return the position of a partition and an offset, such as `3-17`. Raises BadPosition."""
        return kafka_judgement.position_of(text)

    def position_fault(self, ledger_id: int, entry_id: int) -> str:
        """Return the reason why (ledger, entry) cannot be a (partition, offset); empty if it can."""
        return kafka_judgement.position_fault(ledger_id, entry_id)

    def target_fault(self, target: str) -> str:
        """Return the reason why a name cannot be a topic to publish to; empty if it can."""
        return kafka_judgement.target_fault(target)

    def message_fault(self, message: port.Message) -> str:
        """Return the reason why a message cannot be published again; empty if it can."""
        return kafka_judgement.message_fault(message.body.size, has_headers=message.body.headers is not None)

    def comes_back(self, target: str) -> bool:
        """Return whether the target is the source or the retry log."""
        return target in self._settings.read_names

    def own_targets(self) -> Sequence[str]:
        """Return the topics of source and retry log."""
        return self._settings.read_names

    async def must_answer(self) -> None:
        """Ask for the committed offsets of the source's group, and for the end of one of its partitions.

        Raises Unreachable, SessionOver, NotThere.
        """
        await self.source.must_answer()

    async def findings(self) -> AsyncIterator[port.Finding]:
        """Judge the topics of source, retry log and targets; change nothing."""
        source = self._settings.source.name
        found = await self._finding_of("source", source)
        yield found
        settings: Mapping[str, str] | None = None
        if found.grade is port.Grade.OK:
            settings, of_source = await self._judged_source()
            for each in of_source:
                yield each
        if self.retries is not None and self._settings.retry is not None:
            found = await self._finding_of("retry", self._settings.retry.name)
            yield found
            others = await self.retries.finding_of_other_readers() if found.grade is port.Grade.OK else None
            if others is not None:
                yield others
        if settings is not None:
            yield kafka_judgement.finding_of_clock(source, settings)
        for target in self._settings.named_targets():
            yield await self._finding_of("target", target)

    async def source_findings(self) -> Sequence[port.Finding]:
        """Judge again whether the source can drop a payload before its delivery. Raises NotThere, Unreachable."""
        return (await self._judged_source())[1]

    async def _judged_source(self) -> tuple[Mapping[str, str] | None, Sequence[port.Finding]]:
        """Return the settings of the source, or None if Kafka withholds them, and what they mean."""
        name = self._settings.source.name
        try:
            settings = await self._topics.settings(name)
        except Untold as error:
            text = f"{error}, so it is unknown how long it keeps messages; grant the relay's user DescribeConfigs"
            return None, [port.Finding("settings", port.Grade.WARNING, text)]
        return settings, kafka_judgement.findings_of_source(name, settings)

    async def _finding_of(self, name: str, topic: str) -> port.Finding:
        judge = kafka_judgement.target_fault if name == "target" else kafka_judgement.topic_fault
        if fault := judge(topic):
            return port.Finding(name, port.Grade.WRONG, f"topic {topic[:250]!r}: {fault}; take another name")
        try:
            partitions = await self._topics.partitions(topic)
        except port.NotThere:
            return port.Finding(name, port.Grade.MISSING, f"topic {topic}: does not exist; create it")
        except Untold as error:
            text = f"{error}, so it is unknown whether it exists; grant the relay's user Describe"
            return port.Finding(name, port.Grade.WARNING, text)
        return port.Finding(name, port.Grade.OK, f"topic {topic}: has {partitions} partitions")


class KafkaLog:
    """The source, by partition and offset."""

    def __init__(
        self,
        topic: str,
        topics: ClusterTopics,
        properties: ClientProperties,
        kept: Kept[Found],
        timeout_s: float,
        bytes_max: int,
    ) -> None:
        """Use the cache `kept` of messages read lately; a fetch brings about `bytes_max`."""
        self._topic = topic
        self._topics = topics
        self._consumer = kafka.Consumer(properties.fetcher(topic))
        self._kept = kept
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._at_once = _AT_ONCE if kept.keeps else _AT_ONCE_FOR_NOTHING
        self._thread = Thread("fetch", properties.errors)
        self._partitions = 0
        """Lower bound on its number of partitions"""
        self._found_bytes = 0
        """Bytes that the present call has found"""
        self._fetched = 0
        self._kept_ones = 0
        self._read_for_it = 0
        self._is_closing = False
        self.tells_limits = True
        """False once Kafka has withheld the settings of the topic for lack of permission"""

    async def generation(self) -> str:
        """Return the topic's id."""
        return await self._topics.generation(self._topic)

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """Return the first offset that each partition still has."""
        return await self._topics.first_offsets(self._topic, ledgers)

    async def kept_ms(self) -> int | None:
        """Return `retention.ms` of the topic, or None if it is -1 or withheld."""
        try:
            settings = await self._topics.settings(self._topic)
        except Untold:
            self.tells_limits = False
            return None
        self.tells_limits = True
        return kafka_judgement.kept_ms(settings)

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        """Return the messages at these ascending positions.

        Returns None for one that is gone or never existed, and NOT_YET once a portion is full. What is not kept is
        found by reading its partition on, all partitions at once. The cluster is asked for the generation, unless it
        was since then. Raises NotThere, Unreachable, SessionOver.
        """
        found: dict[Pair, Found] = {}
        wanted: dict[int, list[int]] = {}
        pairs = [(int(ledger), int(entry)) for ledger, entry in positions]
        for pair in dict.fromkeys(pairs):
            if (kept := self._kept.take(pair)) is not None:
                found[pair] = kept
            elif not kafka_judgement.position_fault(*pair):
                wanted.setdefault(pair[0], []).append(pair[1])
        self._fetched += len(pairs)
        self._kept_ones += len(found)
        left: Mapping[int, Search] = {}
        try:
            if wanted:
                try:
                    left = await self._look_for(wanted, found)
                except port.Unreachable:
                    if not found:
                        raise
                    left = {partition: Search(offsets) for partition, offsets in wanted.items()}
            kept_until_s = max((each.read_until_s for each in found.values()), default=0.0)
            await self._topics.confirm(self._topic, generation, time.monotonic() if wanted else kept_until_s)
        except (port.Unreachable, port.SessionOver):
            for pair, kept in found.items():
                self._kept.keep(pair, kept, kept.record.memory_bytes)
            raise
        return [_fetched(pair, found.get(pair), left.get(pair[0])) for pair in pairs]

    async def close(self) -> None:
        """End, or leave the client behind."""
        await ended_within({"fetch": self.end})

    def end(self) -> None:
        """Block until the call in flight has returned, and leave."""
        self._is_closing = True
        self._thread.end()
        self._thread.join()
        self._consumer.close()
        if self._fetched:
            told = {"of_these_kept": self._kept_ones, "read_for_the_rest": self._read_for_it}
            log.info("has fetched", extra={"messages": self._fetched, **told})

    async def _look_for(self, wanted: Mapping[int, Sequence[int]], found: dict[Pair, Found]) -> Mapping[int, Search]:
        """Add what is found at these offsets of each partition; return the unfinished searches."""
        if max(wanted) >= self._partitions:
            self._partitions = await self._topics.partitions(self._topic)
        # A partition that the topic lacks never had the message.
        searches = {each: Search(of) for each, of in wanted.items() if each < self._partitions}
        if searches:
            await self._thread.call(self._read_on, searches, found)
        return searches

    # In the thread

    def _read_on(self, searches: dict[int, Search], found: dict[Pair, Found]) -> None:
        """Read all partitions on until each search is over, or a portion is full.

        Raises KafkaException, NotThere, Unreachable.
        """
        self._begin(searches)
        self._found_bytes = sum(each.record.memory_bytes for each in found.values())
        try:
            comes_by_s = time.monotonic() + self._timeout_s
            while searches and self._found_bytes < self._bytes_max:
                first: Event | None = self._consumer.poll(0.1)
                if first is not None:
                    events = [first, *self._consumer.consume(self._at_once, 0)]
                    reached = {event.partition(): self._take(event, searches, found) for event in events}
                    self._go_on(searches, reached)
                    comes_by_s = time.monotonic() + self._timeout_s
                elif time.monotonic() > comes_by_s or self._is_closing:
                    raise port.Unreachable(f"topic {self._topic}: nothing was read for {self._timeout_s:g} s")
        finally:
            self._consumer.unassign()

    def _take(self, event: Event, searches: Mapping[int, Search], found: dict[Pair, Found]) -> int | None:
        """Find a message, or keep it; return the offset up to which its partition was read."""
        search = searches.get(event.partition())
        if event.error() is not None:
            return self._look(event, search)
        pair: Pair = (event.partition(), event.offset())
        self._read_for_it += 1
        read = Found(Record.of(event), time.monotonic())
        if search is not None and search.meets(pair[1]):
            found[pair] = read
            self._found_bytes += read.record.memory_bytes
        else:
            self._kept.keep(pair, read, read.record.memory_bytes)
        return pair[1]

    def _begin(self, searches: Mapping[int, Search]) -> None:
        self._consumer.incremental_assign(
            [TopicPartition(self._topic, partition, search.next or 0) for partition, search in searches.items()]
        )

    def _go_on(self, searches: dict[int, Search], reached: Mapping[int, int | None]) -> None:
        """End finished searches, and jump if the next offset is far, or if reading has stopped (None)."""
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
        """Ask for the first and last offset of a partition whose end was reached, or which lacks the requested offset.

        Returns the offset up to which it was read. Raises KafkaException, NotThere, Unreachable.
        """
        error, reached = event.error(), None
        if error.code() not in (KafkaError._PARTITION_EOF, _NO_OFFSET):
            raise kafka_answers.failure(error)
        if search is not None and error.code() == KafkaError._PARTITION_EOF:
            reached = event.offset()
            search.begins_at(reached)
        if search is not None and search.next is not None:
            # A new leader refuses to name its end before it knows it, but its messages may stop short of that.
            first, end = _ends(self._consumer, TopicPartition(self._topic, event.partition()), self._timeout_s)
            search.begins_at(first)
            search.ends_at(end)
        return reached


class KafkaReader:
    """A member of the group of relays that share the partitions of a topic.

    The name of the group contains the id of the topic, so a relay that has not noticed yet that the topic is another
    one commits nothing there.
    """

    commits_in_order = True
    hold_every_s: float | None = None

    def __init__(
        self,
        topic: str,
        generation: str,
        topics: ClusterTopics,
        properties: ClientProperties,
        timeout_s: float,
        bytes_max: int,
        kept: Kept[Found] | None = None,
        failures_of: str = "",
    ) -> None:
        """Bring about `bytes_max` a call, and cache messages in `kept`.

        For a retry log, `failures_of` is the topic of the relay.
        """
        self._topic = topic
        self._group = properties.reader_group(topic, generation)
        self._failures_of = failures_of
        self._metadata = kafka_judgement.retry_reader(failures_of) if failures_of else ""
        self._generation = generation
        self._topics = topics
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._kept = kept
        self._errors = properties.errors
        self._consumer = kafka.Consumer({**properties.reader(topic, generation), "error_cb": self._failed})
        self._polling = Thread(f"read-{topic}", self._errors)
        self._committing = Thread(f"commit-{topic}", self._errors)
        # A commit that a silent broker does not answer blocks its thread without end.
        self._asking = Thread(f"ask-{topic}", self._errors)
        self._turns = Turns()
        # A partition that returns is another lane: it begins at the committed offset.
        self._lanes: dict[int, tuple[int, int]] = {}
        self._lanes_made = 0
        self._giving_up = threading.Lock()
        self._lost: list[tuple[int, int]] = []
        self._early: deque[Event] = deque()
        """Events that arrived when no more could be taken"""
        self._held: port.Portion | None = None
        """Read but not passed on: it may not be known yet to be of the right topic"""
        self._has_joined = False
        self._is_resting = False
        self._is_away = False
        self._is_closing = False
        self._trouble = ""
        """Last error that kept the group from reading; Kafka reports it only once"""
        self._questions = itertools.count()
        self._asked_at_s = time.monotonic()
        self._looks_at_s = 0.0

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        """Return the next messages of the partitions that this relay has now."""
        while self._held is None:
            await self._polling.call(self._poll, rows_max, wait_s)
        if self._held.read and self._looks_at_s <= time.monotonic():
            await self._look_whether_same()
        portion, self._held = self._held, None
        if self._kept is not None:
            for each in portion.read:
                if each.message is not None:
                    record = Record(each.message.body, each.message.sent_at_ms, each.receipt)
                    self._kept.keep(each.position, Found(record, self._asked_at_s), record.memory_bytes)
        return portion

    async def commit(self, read: Sequence[port.Read]) -> None:
        """Commit the offset after the last of them; do nothing if another relay has the partition by now."""
        last = read[-1]
        behind = TopicPartition(
            self._topic,
            last.ledger_id,
            last.entry_id + 1,
            metadata=self._metadata,
            leader_epoch=last.receipt,
        )
        await self._committing.call(self._commit, last.lane, behind)

    async def hold(self, read: Sequence[port.Read]) -> None:
        """Do nothing: the partition stays with its member, and polled messages are not delivered again."""

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """Return for each position whether it lies before the group's committed offset of its partition."""
        ledgers = {ledger for ledger, entry in positions if not kafka_judgement.position_fault(ledger, entry)}
        asked = [TopicPartition(self._topic, each) for each in ledgers]
        found = await self._committing.call(self._committed, asked) if asked else []
        behind = {each.partition: each.offset for each in found if each.error is None}
        return [0 <= entry < behind.get(ledger, 0) for ledger, entry in positions]

    async def must_answer(self) -> None:
        """Ask the coordinator of the group, and the leader of one of the partitions, or any broker if there is none.

        Raises Unreachable within the timeout, SessionOver, NotThere.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._asking.call(self._ask)
        except (TimeoutError, port.Unreachable) as error:
            text = str(error) or f"topic {self._topic}: no answer within {self._timeout_s:g} s"
            raise port.Unreachable(f"{text}; before: {self._trouble}" if self._trouble else text) from error
        if self._trouble and not self._lanes:
            # Kafka answers, but lets the relay read nothing.
            raise port.Unreachable(f"topic {self._topic}: {self._trouble}")

    async def finding_of_other_readers(self) -> port.Finding | None:
        """Judge whether another relay also reads this retry log; return None if none does. Raises Unreachable."""
        if not self._generation:
            # It did not exist when the session was opened, which ends with the first read.
            return None
        committed = await self._topics.committed_metadata(self._topic, self._generation)
        return kafka_judgement.finding_of_retry_readers(self._topic, committed, self._group, self._failures_of)

    async def keep_place(self) -> None:
        """Poll without end while there are no reads, because the group removes a member that does not poll."""
        while True:
            await asyncio.sleep(_REST_S)
            if self._has_joined and self._asked_at_s + _REST_S < time.monotonic():
                # The next awaited call reports a session that is over.
                with contextlib.suppress(port.Unreachable, port.NotThere, port.SessionOver):
                    await self._polling.call(self._rest)

    async def close(self) -> None:
        """Leave the group, or leave the client behind."""
        await ended_within({self._topic: self.end})

    def end(self) -> None:
        """Block until the calls in flight have returned, and leave the group."""
        self._is_closing = True
        threads = (self._committing, self._asking, self._polling)
        for each in threads:
            each.end()
        # Closing the client while another thread uses it would crash it.
        for each in threads:
            each.join()
        self._consumer.close()

    async def _look_whether_same(self) -> None:
        """Check the topic's id, which never returns: all that was read until now is of the topic that has it."""
        looked_at_s = time.monotonic()
        port.must_be_same(f"topic {self._topic}", self._generation, await self._topics.generation(self._topic))
        self._looks_at_s = looked_at_s + _LOOK_AGAIN_S

    # In the thread of the consumer

    def _poll(self, rows_max: int, wait_s: float) -> None:
        """Take message by message.

        Each belongs to the lane that its partition has after the call that returned it.
        """
        if self._held is not None:
            # A cancelled call has read it. If it were dropped, the next commit would skip it.
            return
        self._take_part()
        read: list[port.Read] = []
        try:
            self._take(read, rows_max, wait_s)
        finally:
            # Also if a call failed after the first message
            if read:
                self._hand_on(read)
        self._asked_at_s = time.monotonic()
        if not read and self._is_away:
            self._consumer.list_topics(self._topic, timeout=self._timeout_s)
            self._is_away = False
        if not read:
            self._hand_on(read)

    def _take(self, read: list[port.Read], rows_max: int, wait_s: float) -> None:
        """Add what arrives. Raises NotThere, Unreachable, SessionOver for an error that comes first."""
        event = self._early.popleft() if self._early else self._wait_for_one(wait_s)
        size_bytes = 0
        while event is not None:
            if event.error() is not None and read:
                self._early.append(event)
                return
            if event.error() is not None:
                self._look(event)
            elif (lane := self._lanes.get(event.partition())) is not None:
                record = Record.of(event)
                message = record.message()
                size_bytes += message.size_bytes
                read.append(port.Read(event.partition(), event.offset(), message, lane, record.leader_epoch))
            if len(read) >= rows_max or size_bytes >= self._bytes_max:
                return
            event = self._early.popleft() if self._early else self._consumer.poll(0)

    def _hand_on(self, read: Sequence[port.Read]) -> None:
        lost, self._lost = self._lost, []
        self._held = port.Portion([each for each in read if self._lanes.get(each.ledger_id) == each.lane], lost)
        if read:
            self._trouble = ""

    def _wait_for_one(self, wait_s: float) -> Event | None:
        until_s = time.monotonic() + wait_s
        while True:
            self._turns.give(_GIVE_WAY_S)
            left_s = max(0.0, until_s - time.monotonic())
            event: Event | None = self._consumer.poll(min(_POLL_S, left_s))
            if event is not None or left_s <= _POLL_S or self._is_closing:
                return event

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
        # A pause belongs to the partition, and still applies when it returns.
        (consumer.pause if self._is_resting else consumer.resume)(partitions)
        for each in partitions:
            self._lanes_made += 1
            self._lanes[each.partition] = each.partition, self._lanes_made
        self._looks_at_s = 0.0
        self._trouble = ""
        log.info("reads partitions", extra={"topic": self._topic, "partitions": sorted(self._lanes)})

    def _revoked(self, consumer: kafka.Consumer, partitions: list[TopicPartition]) -> None:
        # A commit that was sent must end before another relay has the partition, or it would undo the other's. The
        # client holds back unsent ones until this call returns.
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
        self._errors.heard(error)
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._is_away = True

    def _look(self, event: Event) -> None:
        """Process an error that came in place of a message. Raises NotThere, Unreachable, SessionOver.

        An error of the whole group has partition 0 and no offset, as one of partition 0 may have.
        """
        error, is_stale = event.error(), event.partition() not in self._lanes
        if error.code() == _NO_OFFSET and not is_stale:
            self._begin(event)
        elif error.code() in (_NO_OFFSET, KafkaError._MAX_POLL_EXCEEDED):
            log.warning("Kafka reports", extra={"topic": self._topic, "error": error.str()})
        else:
            self._trouble = kafka_answers.told(error)
            raise kafka_answers.failure(error, f"topic {self._topic}: ")

    def _begin(self, event: Event) -> None:
        """Begin a partition at its first offset: nothing was committed, or the next offset does not exist."""
        partition = TopicPartition(self._topic, event.partition(), kafka.OFFSET_BEGINNING)
        self._consumer.incremental_unassign([partition])
        self._consumer.incremental_assign([partition])
        self._looks_at_s = 0.0
        fields = {"topic": self._topic, "partition": event.partition()}
        if event.offset() is None or event.offset() < 0:
            log.info("reads a partition from its first offset", extra=fields)
            if self._metadata:
                # Another relay can then see whose retry log it is before anything has failed.
                first, _ = _ends(self._consumer, TopicPartition(self._topic, event.partition()), self._timeout_s)
                behind = TopicPartition(self._topic, event.partition(), first, metadata=self._metadata)
                self._consumer.commit(offsets=[behind], asynchronous=True)
        else:
            fields["offset"] = event.offset()
            log.error("next offset does not exist; restarting at the first", extra=fields)

    def _partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self._topic, each) for each in self._lanes]

    # In a thread of its own, so that a commit does not wait for reads

    def _commit(self, lane: Hashable, behind: TopicPartition) -> None:
        with self._giving_up, self._turns.taken():
            if self._lanes.get(behind.partition) == lane:
                for each in self._consumer.commit(offsets=[behind], asynchronous=False) or ():
                    if each.error is not None:
                        raise KafkaException(each.error)

    def _committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        with self._turns.taken():
            return self._consumer.committed(partitions, self._timeout_s)

    # In a thread of its own too

    def _ask(self) -> None:
        until_s = time.monotonic() + self._timeout_s
        partitions = sorted(self._lanes)
        (found,) = self._committed([TopicPartition(self._topic, (partitions or [0])[0])])
        if found.error is not None:
            raise KafkaException(found.error)
        try:
            if partitions:
                one = partitions[next(self._questions) % len(partitions)]
                with self._turns.taken():
                    _ends(self._consumer, TopicPartition(self._topic, one), until_s - time.monotonic())
                return
        except KafkaException as failed:
            # The topic was deleted, or is about to be.
            if failed.args[0].code() != KafkaError._UNKNOWN_PARTITION:
                raise
        with self._turns.taken():
            metadata = self._consumer.list_topics(self._topic, timeout=max(0.0, until_s - time.monotonic()))
        if (error := metadata.topics[self._topic].error) is not None:
            raise kafka_answers.failure(error, f"topic {self._topic}: ")


def _ends(consumer: kafka.Consumer, partition: TopicPartition, timeout_s: float) -> tuple[int, int]:
    """Ask the leader of a partition for its first offset and the one after its last.

    Raises KafkaException, Unreachable.
    """
    ends = consumer.get_watermark_offsets(partition, timeout=max(0.0, timeout_s))
    if ends is None:
        raise port.Unreachable(f"topic {partition.topic}: no answer about partition {partition.partition}")
    return ends


@contextlib.asynccontextmanager
async def opened(settings: relay_settings.Settings, broker: relay_settings.Kafka) -> AsyncIterator[KafkaBroker]:
    """Open a session; a missing topic does not prevent it. Raises SettingsError, Unreachable."""
    relay, source = settings.relay, settings.source.name
    bytes_max = portion_bytes(relay.memory_bytes)
    # Source and fetcher together read ahead as much as a portion.
    read_ahead_bytes = min(_READ_AHEAD_BYTES_MAX, bytes_max // 2)
    properties = ClientProperties(broker, relay.subscription, relay.id, read_ahead_bytes)
    kept: Kept[Found] = Kept(min(broker.kept_bytes, relay.memory_bytes // 8))
    closing: dict[str, Callable[[], object]] = {}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(ended_within, closing)
        with _refused_settings():
            client = admin.AdminClient(properties.shared())
        await _connect(client, properties, broker)
        topics = ClusterTopics(client, broker.timeout_s)
        generations = [await _generation_now(topics, name) for name in settings.read_names]
        with _refused_settings():
            fetched_from = KafkaLog(source, topics, properties, kept, broker.timeout_s, bytes_max)
        closing["fetch"] = fetched_from.end
        output = KafkaOutput(source, properties, broker)
        closing["publish"] = output.end
        readers = []
        for name, generation in zip(settings.read_names, generations, strict=True):
            with _refused_settings():
                own: dict[str, Any] = {"kept": kept} if name == source else {"failures_of": relay.topic}
                reader = KafkaReader(name, generation, topics, properties, broker.timeout_s, bytes_max, **own)
            closing[f"read {name}"] = reader.end
            readers.append(reader)
            keeping = asyncio.create_task(reader.keep_place())
            stack.callback(keeping.cancel)
        yield KafkaBroker(
            settings,
            topics,
            source=readers[0],
            retries=readers[1] if len(readers) > 1 else None,
            fetched_from=fetched_from,
            output=output,
        )


async def _connect(client: admin.AdminClient, properties: ClientProperties, broker: relay_settings.Kafka) -> None:
    """Ask the cluster for its topics. Raises Unreachable with the reason."""
    thread = Thread("connect", properties.errors)
    try:
        await thread.call(lambda: client.list_topics(timeout=broker.timeout_s))
    except (port.Unreachable, port.SessionOver) as error:
        # The client reports a failed connection outside the call.
        client.poll(0)
        why = properties.errors.refusal or str(error)
        url = relay_settings.without_credentials(broker.url)
        raise port.Unreachable(f"{url} cannot be used within {broker.timeout_s:g} s: {why}") from error
    finally:
        thread.end()


@contextlib.contextmanager
def _refused_settings() -> Iterator[None]:
    """Raise SettingsError for properties that Kafka's client refuses."""
    try:
        yield
    except KafkaException as error:
        raise relay_settings.SettingsError(f"broker: {error.args[0].str()}") from error
    except (TypeError, ValueError) as error:
        raise relay_settings.SettingsError(f"broker: {error}") from error


async def _generation_now(topics: ClusterTopics, topic: str) -> str:
    """Return the id of a topic, empty if it does not exist: its reader finds that out later. Raises Unreachable."""
    try:
        return await topics.generation(topic)
    except port.NotThere:
        return ""


def _fetched(pair: Pair, found: Found | None, left: Search | None) -> port.Message | None:
    """Return the result for a position; `left` is the unfinished search of its partition."""
    if found is not None:
        return found.record.message()
    is_left = left is not None and left.next is not None and left.next <= pair[1]
    return port.NOT_YET if is_left and not kafka_judgement.position_fault(*pair) else None
