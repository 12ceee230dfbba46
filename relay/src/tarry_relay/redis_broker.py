"""Reads, fetches and publishes entries of Redis Streams. Source, retry log and targets are streams of one server.

A message is the fields of an entry, which are also its headers. `redis_answers` interprets errors; `redis_judgement`
judges names and settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tarry.positions import RedisSequences1
from tarry_relay import port, redis_answers, redis_judgement, relay_settings
from tarry_relay.memory_shares import Filling, portion_bytes
from tarry_relay.redis_answers import failures

Fields: TypeAlias = Sequence[tuple[bytes, bytes]]
Entries: TypeAlias = list[tuple[str, Fields | None]]
"""Ids and fields; None if the stream has dropped the entry"""

# The key is set after the entry is added: otherwise an entry that a stream refuses would count as published. If only
# the key fails, the entry was published all the same. A stream at the former key is another target, and remembers
# nothing.
_PRODUCE = """
if redis.call('EXISTS', KEYS[2]) == 1 or redis.call('TYPE', KEYS[3]).ok == 'string' then return 0 end
local added = redis.pcall('XADD', KEYS[1], '*', unpack(ARGV, 2))
if type(added) == 'table' and added.err then return added end
redis.pcall('SET', KEYS[2], '', 'EX', ARGV[1])
return 1
"""
# Lua cannot pass on that many arguments, so XADD stands between these two in a transaction. The first stores the length
# of the target, by which the second sees whether the target has taken the entry.
_BEFORE_LARGE = "return redis.call('SET', KEYS[2], redis.call('XLEN', KEYS[1]), 'EX', ARGV[1])"
_AFTER_LARGE = """
if tonumber(redis.call('GET', KEYS[2])) == redis.call('XLEN', KEYS[1]) then redis.call('DEL', KEYS[2]) end
return 1
"""
_MESSAGE_BYTES = 500
"""Memory of a message besides its fields (bytes)"""
_FIELD_BYTES = 150
"""Memory of a field besides its name and value (bytes)"""
_UNPACKED_FIELDS_MAX = 3_000
_LARGE_TRIES = 5
_PIPELINE_BYTES = 4 * 2**20
# A group that no one reads with: it is deleted with the stream, and so identifies this one.
_GENERATION = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'stream' then return {kind} end
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if string.sub(group[2], 1, #ARGV[1]) == ARGV[1] then return {kind, string.sub(group[2], #ARGV[1] + 1)} end
end
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1] .. ARGV[2], '0')
return {kind, ARGV[2]}
"""
_GENERATION_PREFIX = "tarry-generation-"
# One step with the check that the stream is still the same: another one has no such group.
_JOIN = """
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then return 0 end
local is_same, is_there = false, false
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    is_same = is_same or group[2] == ARGV[1]
    is_there = is_there or group[2] == ARGV[2]
end
if not is_same then return 0 end
if not is_there then redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0') end
return 1
"""
# One step with the check of the entry's owner: an entry that another relay has claimed meanwhile stays that relay's.
_HOLD = """
local claim = {}
for i = 3, #ARGV do
    if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) == 1 then claim[#claim + 1] = ARGV[i] end
end
if #claim == 0 then return 0 end
claim[#claim + 1] = 'JUSTID'
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(claim))
return #claim - 1
"""
_HELD_AT_ONCE = 500
# Entries are named, not returned, because a payload may be large.
_LOOK = """
local delivered
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local told = {}
    for i = 1, #group, 2 do told[group[i]] = group[i + 1] end
    if told['name'] == ARGV[1] then delivered = told['last-delivered-id'] end
end
if not delivered then return {} end
local function first(after)
    local found = redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', 1)[1]
    return found and found[1] or ''
end
local function pending(from, to)
    local found = redis.call('XPENDING', KEYS[1], ARGV[1], from, to, 1)[1]
    return found and found[1] or ''
end
local begin = first('-')
local answer = {delivered, begin, first('(' .. delivered), pending('-', '+'), begin ~= '' and pending(begin, '+') or ''}
for i = 2, #ARGV do
    answer[#answer + 1] = {ARGV[i], first(ARGV[i]) == ARGV[i] and 1 or 0, pending(ARGV[i], ARGV[i]) ~= '' and 1 or 0}
end
return answer
"""
_CLAIMS_PER_CLAIM_S = 10
_CLAIM_STEPS = 20


class RedisBroker:
    """One server, with connections that are opened again whenever they break."""

    def __init__(self, server: Any, settings: relay_settings.Settings, broker: relay_settings.Redis) -> None:
        self._server = server
        self._settings = settings
        self._timeout_s = broker.timeout_s
        self._look = server.register_script(_LOOK)
        self._samples: list[str] = []
        """Entries that were uncommitted when the source was last judged"""
        relay = settings.relay
        self.log = RedisLog(server, settings.source.name, portion_bytes(relay.memory_bytes))
        self.source = RedisReader(server, settings.source.name, relay, broker, self.log)
        self.retries: RedisReader | None = None
        if settings.retry is not None:
            self.retries = RedisReader(server, settings.retry.name, relay, broker)
        self.output = RedisOutput(server, broker)

    def header_key(self, name: str) -> str:
        """Return the name unchanged: `Delay` and `delay` are two fields."""
        return name

    def position_of(self, text: str) -> tuple[int, int]:
        """Return the (ledger, entry) of an id, such as `1795773600000-0`. Raises BadPosition."""
        return redis_judgement.position_of(text)

    def position_fault(self, ledger_id: int, entry_id: int) -> str:
        """Return the reason why (ledger, entry) is no position of a stream; empty if it is one."""
        return redis_judgement.position_fault(ledger_id, entry_id)

    def target_fault(self, target: str) -> str:
        """Return the reason why a name cannot be a target; empty if it can."""
        return redis_judgement.target_fault(target)

    def message_fault(self, message: port.Message) -> str:
        """Return the reason why a message cannot be published; empty if it can."""
        return redis_judgement.message_fault(message.body)

    def comes_back(self, target: str) -> bool:
        """Return whether the target is the source or the retry log."""
        return target in self._settings.read_names

    def own_targets(self) -> Sequence[str]:
        """Return the keys of source and retry log."""
        return self._settings.read_names

    async def must_answer(self) -> None:
        """Send PING. Raises Unreachable, also after `broker.timeout_s` without an answer, and SessionOver."""
        try:
            async with asyncio.timeout(self._timeout_s):
                with failures("PING"):
                    await self._server.ping()
        except TimeoutError as error:
            raise port.Unreachable(f"PING: no answer within {self._timeout_s:g} s") from error

    async def findings(self) -> AsyncIterator[port.Finding]:
        """Judge source, retry log, clock, server and targets; change nothing."""
        for finding in await self._judge_source():
            yield finding
        if self.retries is not None:
            for finding in await self.retries.judge_as_retry_log():
                yield finding
        asked_at_ms = port.now_ms()
        with failures("TIME"):
            seconds, us = await self._server.time()
        yield port.finding_of_clock("Redis", seconds * 1_000 + us // 1_000, asked_at_ms)
        info, settings = await self._info(), await _told("CONFIG GET", self._server.config_get("appendfsync"))
        appendfsync = next((_text(value) for value in (settings or {}).values()), None)
        for finding in redis_judgement.findings_of_server(info, appendfsync):
            yield finding
        for target in self._settings.named_targets():
            yield redis_judgement.finding_of_key("target", target, await _kind(self._server, target))

    async def source_findings(self) -> Sequence[port.Finding]:
        """Judge whether the source can drop an entry before its delivery. Raises NotThere, Unreachable."""
        found = await self._judge_source()
        if found[0].grade is port.Grade.MISSING:
            raise port.NotThere(found[0].text)
        return found

    async def _judge_source(self) -> list[port.Finding]:
        source = self._settings.source.name
        kind = await _kind(self._server, source)
        found = [redis_judgement.finding_of_key("source", source, kind, is_made=False)]
        if found[0].grade is not port.Grade.OK:
            return found
        info = await self._info()
        policy = None if info is None else info.get("maxmemory_policy")
        found.append(redis_judgement.finding_of_eviction(source, policy))
        with failures(f"key {source}"):
            pttl_ms = await self._server.pttl(source)
        found.append(redis_judgement.finding_of_ttl("ttl", source, pttl_ms, port.Grade.WRONG))
        found.append(redis_judgement.finding_of_size(source, await self._look_at_source()))
        return found

    async def _look_at_source(self) -> redis_judgement.Look | None:
        source = self._settings.source.name
        with failures(f"key {source}"):
            names = await _groups(self._server, source)
            generation = _generation_of(names)
            if generation is None:
                return None
            group = self.source.group_of(generation)
            answer = await self._look([source], [group, *self._samples])
        if not answer:
            return None
        delivered, first, unread, lowest_pending, lowest_there = map(_text, answer[:5])
        samples = [redis_judgement.Sample(_text(each), bool(there), bool(held)) for each, there, held in answer[5:]]
        self._samples = [each for each in (unread, lowest_there) if each]
        return redis_judgement.Look(first, delivered, lowest_pending, samples)

    async def _info(self) -> Mapping[str, Any] | None:
        answer: Mapping[str, Any] | None = await _told("INFO", self._server.info())
        return answer


class RedisLog(port.FirstGeneration):
    """A stream, by the ids of its entries."""

    tells_limits = False

    def __init__(self, server: Any, stream: str, bytes_max: int) -> None:
        """Bring about `bytes_max` a fetch."""
        self._server = server
        self._stream = stream
        self._bytes_max = bytes_max
        self._generation = server.register_script(_GENERATION)

    async def _generation_now(self) -> str:
        """Return the name that a group of the stream holds and that is deleted with it."""
        with failures(f"key {self._stream}"):
            kind, *generation = await self._generation([self._stream], [_GENERATION_PREFIX, secrets.token_hex(4)])
        if not generation:
            source = redis_judgement.finding_of_key("source", self._stream, _text(kind), is_made=False)
            raise port.NotThere(source.text)
        return _text(generation[0])

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        """Return the entries at these positions.

        Returns None for one that is gone for good, and NOT_YET once a portion is full. Each pipeline ends with a check
        of the generation.
        """
        ledgers, entries = zip(*positions, strict=True)
        ids = RedisSequences1.from_positions(list(ledgers), list(entries))
        found: list[port.Message | None] = []
        portion = Filling(self._bytes_max, len(ids))
        while rows := portion.rows():
            some = await self._fetch(ids[len(found) : len(found) + rows], generation)
            portion.came(len(some), _size(some))
            found += some
        return [*found, *[port.NOT_YET] * (len(ids) - len(found))]

    async def _fetch(self, ids: Sequence[str], generation: str) -> list[port.Message | None]:
        with failures(f"key {self._stream}"):
            async with self._server.pipeline(transaction=False) as calls:
                for entry_id in ids:
                    calls.xrange(self._stream, entry_id, entry_id)
                calls.xinfo_groups(self._stream)
                *found, groups = await _executed(calls)
        now = _generation_of([_text(each["name"]) for each in groups])
        port.must_be_same(f"key {self._stream}", generation, now or "not known")
        return [_message(*entry[0]) if entry else None for entry in found]

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """Return the first entry that each ledger may still have.

        A ledger is a sequence number; its entries are times (ms).
        """
        with failures(f"key {self._stream}"):
            found: Entries = await self._server.xrange(self._stream, count=1)
        if not found:
            return {}
        first_ms, sequence = redis_judgement.numbers(found[0][0])
        return {ledger: first_ms + (ledger < sequence) for ledger in ledgers}

    async def kept_ms(self) -> int | None:
        """Return None: entries leave a stream by its length or by a command, never by their age."""
        return None


class RedisReader:
    """A consumer of a group that relays share, and that it creates.

    At the source the name of the group contains the generation: a relay that has not noticed yet that the stream is
    another one can read nothing there.
    """

    commits_in_order = False

    def __init__(
        self,
        server: Any,
        stream: str,
        relay: relay_settings.Relay,
        broker: relay_settings.Redis,
        log: RedisLog | None = None,
    ) -> None:
        """Read a stream: the source with `log`, or, without, the retry log, which is created if it does not exist."""
        self._server = server
        self._stream = stream
        self._log = log
        self._join = server.register_script(_JOIN)
        self._hold = server.register_script(_HOLD)
        self._subscription = self._group = relay.subscription
        self._consumer = relay.id
        readers = hashlib.sha256(f"{relay.topic}\0{relay.subscription}".encode()).hexdigest()
        self._owner = f"{redis_judgement.RETRY_OWNER_PREFIX}{readers[:16]}"
        # A read that blocks for as long as an answer may take would count as none.
        self._block_s_max = broker.timeout_s / 2
        self._claim_s = broker.claim_s
        self._bytes_max = portion_bytes(relay.memory_bytes)
        self.hold_every_s: float | None = broker.claim_s / 3
        self._has_group = False
        self._own_after: str | None = "0"
        """Last entry returned of those that it had before the start; None once it has returned all of them"""
        self._claim_after: str | bytes = "0-0"
        """Cursor of XAUTOCLAIM"""
        self._claims_at_s = 0.0

    def group_of(self, generation: str) -> str:
        """Return the group with which relays read a source of this generation."""
        return f"{self._subscription}@{generation}"

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        """Return first what this relay had read before, then what others have left, then new entries.

        Returns an empty portion before `wait_s` if the search for what others have left is unfinished.
        """
        with failures(f"key {self._stream}"):
            await self._make_group()
            if self._own_after is not None:
                if (portion := await self._portion(self._own, rows_max)).read:
                    return portion
                self._own_after = None
            block_ms: int | None = max(1, int(min(wait_s, self._block_s_max) * 1_000))
            if self._claims_at_s <= time.monotonic():
                if (portion := await self._portion(self._claim, rows_max)).read:
                    return portion
                if _text(self._claim_after) != "0-0":
                    # The search continues with the next call.
                    block_ms = None

            async def new(rows: int) -> Entries:
                nonlocal block_ms
                block_ms, waits_ms = None, block_ms
                return await self._group_read(">", rows, waits_ms)

            return await self._portion(new, rows_max, time.monotonic() + self._claim_s)

    async def _portion(
        self, call: Callable[[int], Awaitable[Entries]], rows_max: int, alone_until_s: float = 0.0
    ) -> port.Portion:
        """Read until a portion is full, or a call brings less than requested.

        Entries that arrived before a failing call are passed on.
        """
        portion = Filling(self._bytes_max, rows_max)
        read: list[port.Read] = []
        while rows := portion.rows():
            try:
                entries = await call(rows)
            except (redis.RedisError, OSError):
                if not read:
                    raise
                break
            some = [self._read(entry_id, fields, alone_until_s) for entry_id, fields in entries]
            portion.came(len(some), _size([each.message for each in some]))
            read += some
            if len(some) < rows:
                break
        return port.Portion(read)

    async def _own(self, rows: int) -> Entries:
        """Continue with what this relay had read, and not committed, before it started."""
        entries = await self._group_read(self._own_after or "0", rows, None)
        if entries:
            self._own_after = entries[-1][0]
        return entries

    async def commit(self, read: Sequence[port.Read]) -> None:
        """Acknowledge entries in the group of the stream."""
        with failures(f"key {self._stream}"):
            await self._make_group()
            await self._server.xack(self._stream, self._group, *(each.receipt for each in read))

    async def hold(self, read: Sequence[port.Read]) -> None:
        """Reset the idle time of entries that are still this consumer's. Another consumer keeps what it has claimed."""
        with failures(f"key {self._stream}"):
            await self._make_group()
            async with self._server.pipeline(transaction=False) as calls:
                for first in range(0, len(read), _HELD_AT_ONCE):
                    ids = [each.receipt for each in read[first : first + _HELD_AT_ONCE]]
                    await self._hold([self._stream], [self._group, self._consumer, *ids], client=calls)
                await _executed(calls)

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """Return whether each position is acknowledged: the group received it, and it is not pending."""
        ledgers, entries = zip(*positions, strict=True)
        ids = RedisSequences1.from_positions(list(ledgers), list(entries))
        with failures(f"key {self._stream}"):
            await self._make_group()
            # In this order: an entry delivered after the first answer counts as not delivered.
            groups = await self._server.xinfo_groups(self._stream)
            async with self._server.pipeline(transaction=False) as calls:
                for entry_id in ids:
                    calls.xpending_range(self._stream, self._group, entry_id, entry_id, 1)
                pending = await _executed(calls)
        given = [_text(each["last-delivered-id"]) for each in groups if _text(each["name"]) == self._group]
        last = max(map(redis_judgement.numbers, given), default=(0, 0))
        return [
            redis_judgement.numbers(entry_id) <= last and not each for entry_id, each in zip(ids, pending, strict=True)
        ]

    async def judge_as_retry_log(self) -> list[port.Finding]:
        """Judge the stream as one that this relay creates and no relay of another topic reads; change nothing."""
        kind = await _kind(self._server, self._stream)
        found = [redis_judgement.finding_of_key("retry", self._stream, kind)]
        if kind != "stream":
            return found
        with failures(f"key {self._stream}"):
            pttl_ms = await self._server.pttl(self._stream)
            groups = await _groups(self._server, self._stream)
        if pttl_ms >= 0:
            ttl = redis_judgement.finding_of_ttl("retry", self._stream, pttl_ms, port.Grade.WARNING)
            found.append(ttl)
        owners = redis_judgement.finding_of_retry_owners(self._stream, groups, self._owner)
        return found if owners is None else [*found, owners]

    async def _make_group(self) -> None:
        """Create the group if this session has not done so: its name depends on the stream."""
        if self._has_group:
            return
        if self._log is None:
            for group in (self._owner, self._group):
                try:
                    await self._server.xgroup_create(self._stream, group, id="0", mkstream=True)
                except redis.ResponseError as error:
                    if redis_answers.code_of(error) != "BUSYGROUP":
                        raise
        else:
            generation = await self._log.first_generation()
            self._group = self.group_of(generation)
            if not await self._join([self._stream], [f"{_GENERATION_PREFIX}{generation}", self._group]):
                raise port.NotThere(
                    f"key {self._stream}: was deleted or created again; its generation was {generation}"
                )
        self._has_group = True

    async def _group_read(self, after: str, rows_max: int, block_ms: int | None) -> Entries:
        found: Entries = await self._server.xreadgroup(
            self._group, self._consumer, {self._stream: after}, count=rows_max, block=block_ms
        )
        return found

    async def _claim(self, rows: int) -> Entries:
        """Take over entries that a relay has read, and neither committed nor held for `claim_s`.

        A step checks ten pending entries for each wanted one. The next step starts behind them, also in a later call,
        so that many held entries hide none that was left.
        """
        for _ in range(_CLAIM_STEPS):
            claimed = await self._server.execute_command(
                "XAUTOCLAIM",
                *(self._stream, self._group, self._consumer, int(self._claim_s * 1_000), self._claim_after),
                *("COUNT", rows, "JUSTID"),
            )
            # Redis 7 and later list separately what the stream has dropped, and forget it.
            self._claim_after, *ids = claimed
            if _text(self._claim_after) == "0-0":
                self._claims_at_s = time.monotonic() + self._claim_s / _CLAIMS_PER_CLAIM_S
            if entries := await self._entries(sorted(itertools.chain(*ids), key=_numbers)):
                return entries
            if _text(self._claim_after) == "0-0":
                break
        return []

    async def _entries(self, ids: Sequence[bytes]) -> Entries:
        """Read entries by id. XAUTOCLAIM of Redis 6.2 does not report those that the stream has dropped."""
        async with self._server.pipeline(transaction=False) as calls:
            for entry_id in ids:
                calls.xrange(self._stream, entry_id, entry_id)
            found: list[Entries] = await _executed(calls)
        return [
            entries[0] if entries else (_text(entry_id), None) for entry_id, entries in zip(ids, found, strict=True)
        ]

    def _read(self, entry_id: str, fields: Fields | None, alone_until_s: float) -> port.Read:
        at_ms, sequence = redis_judgement.numbers(entry_id)
        return port.Read(sequence, at_ms, _message(entry_id, fields), self._stream, entry_id, alone_until_s)


class RedisOutput:
    """Streams, each with keys that remember its recent messages."""

    def __init__(self, server: Any, broker: relay_settings.Redis) -> None:
        self._server = server
        self._once_s = broker.once_s
        self._script = server.register_script(_PRODUCE)

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[port.Produced]:
        """Publish messages, each once for its id, by pipelines of a few MiB.

        If the connection is lost although the server works, messages are published one by one. One that makes the
        server close the connection ends alone, as unknown. Raises Unreachable if no message was answered, and
        SessionOver.
        """
        done: list[port.Produced] = []
        try:
            for some in _portions(messages):
                try:
                    done += await self._publish(some)
                except port.Unreachable as failure:
                    await self._look_for_server()
                    if len(some) == 1:
                        done.append(_unknown(some[0], failure))
                        continue
                    for each in some:
                        done.append(await self._publish_alone(each))
        except port.Unreachable as failure:
            if not done:
                raise
            done += [_unknown(each, failure) for each in messages[len(done) :]]
        return done

    async def _publish_alone(self, outgoing: port.Outgoing) -> port.Produced:
        try:
            (answer,) = await self._publish([outgoing])
        except port.Unreachable as failure:
            await self._look_for_server()
            return _unknown(outgoing, failure)
        if answer.code == redis_answers.TOO_LARGE:
            await self._look_for_server()
        return answer

    async def _look_for_server(self) -> None:
        """Ask by a new connection, because idle ones may have been closed unnoticed."""
        with failures("PING"):
            await self._server.connection_pool.disconnect(inuse_connections=False)
            await self._server.ping()

    async def _publish(self, messages: Sequence[port.Outgoing]) -> list[port.Produced]:
        flat = [redis_judgement.fields_of(each) for each in messages]
        with failures("publishing"):
            if _is_large(messages[0]):
                return [await self._publish_large(messages[0], flat[0])]
            async with self._server.pipeline(transaction=False) as calls:
                for each, fields in zip(messages, flat, strict=True):
                    await self._script(_keys(each), [self._once_s, *fields], client=calls)
                try:
                    answers = await calls.execute(raise_on_error=False)
                except redis.ResponseError as error:
                    # The script cannot be loaded, so nothing was published.
                    answers = [error] * len(messages)
        return [_produced(each, answer) for each, answer in zip(messages, answers, strict=True)]

    async def _publish_large(self, outgoing: port.Outgoing, fields: Sequence[bytes]) -> port.Produced:
        """Publish a message with more fields than Lua can pass on, by a transaction."""
        target, once, former = _keys(outgoing)
        for _ in range(_LARGE_TRIES):
            async with self._server.pipeline() as calls:
                try:
                    await calls.watch(once)
                    if await calls.exists(once) or await calls.type(former) == b"string":
                        return port.Produced()
                    calls.multi()
                    calls.eval(_BEFORE_LARGE, 2, target, once, self._once_s)
                    calls.execute_command("XADD", target, "*", *fields)
                    calls.eval(_AFTER_LARGE, 2, target, once)
                    _, added, _ = await calls.execute(raise_on_error=False)
                    return _produced(outgoing, added)
                except redis.WatchError as error:
                    if isinstance(error.__context__, redis.ConnectionError | redis.TimeoutError):
                        raise error.__context__ from error
                    # Another relay publishes it at this moment.
                except redis.ResponseError as error:
                    return _produced(outgoing, error)
        return _produced(outgoing, redis.WatchError("Watched variable changed."))


class _Headers(Mapping[str, str]):
    """Fields as text, each decoded on access, because the payload is among them."""

    __slots__ = ("_values",)

    def __init__(self, fields: Fields) -> None:
        self._values = {_text(name): value for name, value in fields}

    def __getitem__(self, name: str) -> str:
        return _text(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@contextlib.asynccontextmanager
async def opened(settings: relay_settings.Settings, broker: relay_settings.Redis) -> AsyncIterator[RedisBroker]:
    """Open a session; connections are made on demand. Raises SettingsError, Unreachable."""
    _check_files(broker)
    shown: dict[str, Any] = {
        "username": broker.user,
        "password": relay_settings.secret("broker.password_file", broker.password_file),
        "ssl_ca_certs": broker.ca_file,
        "ssl_certfile": broker.cert_file,
        "ssl_keyfile": broker.key_file,
    }
    try:
        pool: Any = redis.asyncio.ConnectionPool.from_url(
            broker.url,
            protocol=2,
            socket_timeout=broker.timeout_s,
            socket_connect_timeout=broker.timeout_s,
            # The relay repeats failures itself, so that nothing half done is repeated without its knowledge.
            retry=Retry(NoBackoff(), 0),
            **{name: value for name, value in shown.items() if value is not None},
        )
        # The URL may set others, but answers are parsed in the form of this protocol.
        pool.connection_kwargs.update(protocol=2, decode_responses=False)
        # The library refuses unknown options of the URL only when it makes a connection.
        pool.make_connection()
    except (ValueError, TypeError) as error:
        raise relay_settings.SettingsError(f"broker: {error}") from error
    server: Any = redis.asyncio.Redis.from_pool(pool)
    for command, callback in _CALLBACKS.items():
        server.set_response_callback(command, callback)
    try:
        try:
            with failures("PING"):
                await server.ping()
        except (port.Unreachable, port.SessionOver) as error:
            raise port.Unreachable(f"the broker cannot be reached, by broker.url: {error}") from error
        yield RedisBroker(server, settings, broker)
    finally:
        await server.aclose()


def _check_files(broker: relay_settings.Redis) -> None:
    """Raise SettingsError if files of TLS cannot be used: the library reports that as a lost connection."""
    files = {name: getattr(broker, name) for name in ("ca_file", "cert_file", "key_file")}
    given = {f"broker.{name}": path for name, path in files.items() if path is not None}
    if not given:
        return
    if not broker.url.startswith("rediss:"):
        field = next(iter(given))
        url = relay_settings.without_credentials(broker.url)
        raise relay_settings.SettingsError(f"{field} is set, but broker.url is {url!r}; TLS needs rediss://")
    for field, path in given.items():
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise relay_settings.SettingsError(f"{field} is {path!r}: {error.strerror}") from error
    try:
        context = ssl.create_default_context(cafile=broker.ca_file)
        if broker.cert_file is not None:
            context.load_cert_chain(broker.cert_file, broker.key_file)
    except ssl.SSLError as error:
        raise relay_settings.SettingsError(f"{', '.join(given)} cannot be used: {error}") from error


async def _kind(server: Any, key: str) -> str:
    with failures(f"key {key}"):
        return _text(await server.type(key))


async def _groups(server: Any, stream: str) -> list[str]:
    return [_text(each["name"]) for each in await server.xinfo_groups(stream)]


def _generation_of(groups: Sequence[str]) -> str | None:
    found = (name.removeprefix(_GENERATION_PREFIX) for name in groups if name.startswith(_GENERATION_PREFIX))
    return next(found, None)


async def _told(what: str, answer: Awaitable[Any]) -> Any:
    """Return an answer, or None if Redis refuses it, as managed servers do."""
    with failures(what):
        try:
            return await answer
        except redis.ResponseError:
            return None


async def _executed(calls: Any) -> list[Any]:
    """Return the answers of a pipeline, or raise the first error of Redis among them unchanged."""
    answers: list[Any] = await calls.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _portions(messages: Sequence[port.Outgoing]) -> Iterator[list[port.Outgoing]]:
    """Divide messages into pipelines by their bytes. A message with very many fields has its own."""
    some: list[port.Outgoing] = []
    size = 0
    for each in messages:
        fields: Fields = () if each.message is None else each.message.body
        is_large = _is_large(each)
        grown = size + sum(len(name) + len(value) for name, value in fields)
        if some and (is_large or grown > _PIPELINE_BYTES):
            yield some
            some, grown = [], grown - size
        some.append(each)
        size = grown
        if is_large:
            yield some
            some, size = [], 0
    if some:
        yield some


def _is_large(outgoing: port.Outgoing) -> bool:
    return outgoing.message is not None and len(outgoing.message.body) > _UNPACKED_FIELDS_MAX


def _keys(outgoing: port.Outgoing) -> list[str]:
    """Return the target, and the keys that remember the message there: this version's and the former one."""
    target, once_id = outgoing.target, outgoing.once_id
    return [target, redis_judgement.once_key(target, once_id), redis_judgement.former_once_key(target, once_id)]


def _produced(outgoing: port.Outgoing, answer: Any) -> port.Produced:
    return redis_answers.produced(outgoing.target, answer) if isinstance(answer, Exception) else port.Produced()


def _unknown(outgoing: port.Outgoing, failure: port.Unreachable) -> port.Produced:
    """Return the result of a message whose answer was lost."""
    code = type(failure.__cause__ or failure).__name__
    return port.Produced(port.Meant(port.Meaning.UNKNOWN), code, f"{outgoing.target}: {failure}")


def _message(entry_id: str, fields: Fields | None) -> port.Message | None:
    """Return the message of an entry, or None if the stream has dropped it."""
    if fields is None:
        return None
    headers = _Headers(fields)
    repeated: list[str] = []
    if len(headers) < len(fields):
        counts = Counter(_text(name) for name, _ in fields)
        repeated = [name for name, count in counts.items() if count > 1]
    size_bytes = _MESSAGE_BYTES + sum(_FIELD_BYTES + len(name) + len(value) for name, value in fields)
    return port.Message(headers, fields, repeated, redis_judgement.numbers(entry_id)[0], size_bytes)


def _size(messages: Sequence[port.Message | None]) -> int:
    """Return the memory of messages (bytes)."""
    return sum(each.size_bytes for each in messages if each is not None)


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _numbers(entry_id: bytes) -> tuple[int, int]:
    return redis_judgement.numbers(_text(entry_id))


def _entries_of(answer: Any, **_: Any) -> Entries:
    """Parse the entries of an answer; the client would make dicts of their fields."""
    return [
        (_text(entry_id), None if flat is None else tuple(zip(flat[::2], flat[1::2], strict=True)))
        for entry_id, flat in answer or ()
    ]


_CALLBACKS: Mapping[str, Callable[..., Any]] = {
    "XAUTOCLAIM": lambda answer, **_: answer,
    "XRANGE": _entries_of,
    "XREADGROUP": lambda answer, **_: _entries_of(answer[0][1]) if answer else [],
}
"""Parsers of answers by command"""
