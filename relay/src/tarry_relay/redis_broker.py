"""Redis Streams: source, retry log and targets are streams of one server.

Owns: positions, reading, fetching and publishing there; what its failures mean.
Does not own: when (`tarry_relay.running`).

A message is the fields of an entry, which are its headers, too.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

import tarry
from tarry.positions import RedisSequences1
from tarry_relay import port, relay_settings

# Remembered when it is there: an entry that a stream refuses would count as there for ever.
_PRODUCE = """
if redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, 2))
    redis.call('SET', KEYS[2], '', 'EX', ARGV[1])
end
return 1
"""
# A group that nobody reads with: it goes when the stream is deleted, and so names this one.
_GENERATION = """
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if string.sub(group[2], 1, #ARGV[1]) == ARGV[1] then return string.sub(group[2], #ARGV[1] + 1) end
end
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1] .. ARGV[2], '0')
return ARGV[2]
"""
_GENERATION_PREFIX = "tarry-generation-"
# At once with the look whether the stream is still the same: another one has no such group.
_JOIN = """
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if group[2] == ARGV[1] then return redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0') end
end
return redis.error_reply('it was made anew')
"""


class RedisBroker:
    """One server, reached by connections that are made again whenever they break."""

    def __init__(self, server: Any, settings: relay_settings.Settings, broker: relay_settings.Redis) -> None:
        self._server = server
        self._settings = settings
        relay = settings.relay
        self.log = RedisLog(server, settings.source.name)
        self.source = RedisReader(server, settings.source.name, relay, broker, self.log)
        self.retries = settings.retry and RedisReader(server, settings.retry.name, relay, broker)
        self.output = RedisOutput(server, broker)

    def position_of(self, text: str) -> tuple[int, int]:
        """The position of an id, such as `1795773600000-0`."""
        try:
            (ledger,), (entry,) = RedisSequences1.to_positions(text)
        except tarry.InvalidArgument:
            raise port.BadPosition(f"{text!r} is no id of an entry, as XADD answers it: 1795773600000-0") from None
        return int(ledger), int(entry)

    def comes_back(self, target: str) -> bool:
        """Whether it is the source or the retry log."""
        return target in self._settings.read_names

    def own_targets(self) -> Sequence[str]:
        """The keys of source and retry log."""
        return self._settings.read_names

    async def findings(self) -> AsyncIterator[port.Finding]:
        """Looks at the server, its clock, and the keys of source and targets; changes nothing."""
        source = self._settings.source.name
        kind = (await _asked(self._server.type(source))).decode()
        yield port.Finding("source", kind in ("stream", "none"), f"key {source}: is {_kind(kind)}")
        asked_at_ms = port.now_ms()
        seconds, us = await _asked(self._server.time())
        yield port.finding_of_clock("Redis", seconds * 1_000 + us // 1_000, asked_at_ms)
        try:
            found = {**await self._server.config_get("append*"), **await self._server.config_get("maxmemory-policy")}
        except redis.ResponseError as error:
            yield port.Finding("durability", True, f"not looked at, CONFIG GET is refused: {error}")
        else:
            told = {_word(name): _word(value) for name, value in found.items()}
            durable = (told.get("appendonly"), told.get("appendfsync")) == ("yes", "always")
            text = f"appendonly {told.get('appendonly')}, appendfsync {told.get('appendfsync')}"
            yield port.Finding("durability", durable, text if durable else f"{text}: a crash may lose its last entries")
            evicts = told.get("maxmemory-policy", "noeviction")
            yield port.Finding("eviction", evicts == "noeviction", f"maxmemory-policy {evicts}")
        for target in self._settings.named_targets():
            kind = (await _asked(self._server.type(target))).decode()
            yield port.Finding("target", kind in ("stream", "none"), f"key {target}: is {_kind(kind)}")


class RedisLog(port.FirstGeneration):
    """A stream by the ids of its entries."""

    def __init__(self, server: Any, stream: str) -> None:
        self._server = server
        self._stream = stream
        self._generation = server.register_script(_GENERATION)

    async def _generation_now(self) -> str:
        """A name that is kept as that of a group of the stream, and goes with the stream."""
        try:
            return _word(await _asked(self._generation([self._stream], [_GENERATION_PREFIX, secrets.token_hex(4)])))
        except redis.ResponseError as error:
            # XINFO of a stream that is not there.
            raise port.NotThere(f"key {self._stream}: {error}") from error

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        """The entries at these positions, by one pipeline, which ends with the look at the generation; None for one
        that is gone for good.
        """
        ledgers, entries = zip(*positions, strict=True)
        async with self._server.pipeline(transaction=False) as calls:
            for entry_id in RedisSequences1.from_positions(list(ledgers), list(entries)):
                calls.xrange(self._stream, entry_id, entry_id)
            calls.xinfo_groups(self._stream)
            try:
                *found, groups = await _asked(calls.execute())
            except redis.ResponseError as error:
                raise port.NotThere(f"key {self._stream}: {error}") from error
        names = [_word(each["name"]) for each in groups]
        now = [name.removeprefix(_GENERATION_PREFIX) for name in names if name.startswith(_GENERATION_PREFIX)]
        port.must_be_same(f"key {self._stream}", generation, now[0] if now else "not known")
        return [_message(entry[0][1]) if entry else None for entry in found]

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """The first entry that each ledger may still have: a ledger is a sequence number, its entries are times."""
        found = await _asked(self._server.xrange(self._stream, count=1))
        if not found:
            return {}
        (sequence,), (first_ms,) = RedisSequences1.to_positions(found[0][0])
        return {ledger: int(first_ms) + (ledger < sequence) for ledger in ledgers}

    async def kept_ms(self) -> int | None:
        """None: entries leave a stream by its length or by a command, never by their age."""
        return None


class RedisReader:
    """A consumer of a group, which relays share, and which is made if it is not there. At the source the name of the
    group has the generation: a relay that has not noticed yet that the stream is another one can read nothing there.
    """

    def __init__(
        self,
        server: Any,
        stream: str,
        relay: relay_settings.Relay,
        broker: relay_settings.Redis,
        log: RedisLog | None = None,
    ) -> None:
        """`log`: of the source. None: any stream of this name will do, and it is made if it is not there."""
        self._server = server
        self._stream = stream
        self._log = log
        self._join = server.register_script(_JOIN)
        self._subscription = self._group = relay.subscription
        self._consumer = relay.id
        # A read that blocks as long as an answer may take would count as none.
        self._block_s_max = broker.timeout_s / 2
        self._claim_ms = int(broker.claim_s * 1_000)
        self._has_group = False
        self._own_after: str | None = "0"
        """Where its own entries that it had before it was started go on; None: it has them all."""
        self._claims_at_s = 0.0

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        """Reads what this relay had read before, then what others have left, then what is new."""
        try:
            if not self._has_group:
                await self._make_group()
            if self._own_after is not None:
                entries = await self._group_read(self._own_after, rows_max, None)
                self._own_after = _word(entries[-1][0]) if entries else None
                if entries:
                    return self._portion(entries)
            if self._claims_at_s <= time.monotonic():
                entries = await self._claim(rows_max)
                if entries:
                    return self._portion(entries)
            block_ms = max(1, int(min(wait_s, self._block_s_max) * 1_000))
            alone_until_s = time.monotonic() + self._claim_ms / 1_000
            return self._portion(await self._group_read(">", rows_max, block_ms), alone_until_s)
        except redis.ResponseError as error:
            # NOGROUP: the stream was deleted, or made again.
            raise port.NotThere(f"key {self._stream}: {error}") from error

    async def commit(self, read: Sequence[port.Read]) -> None:
        """Acknowledges entries in the group of the stream."""
        await _asked(self._server.xack(self._stream, self._group, *(each.receipt for each in read)))

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """What the group was given and does not have among its pending entries is acknowledged."""
        ledgers, entries = zip(*positions, strict=True)
        ids = RedisSequences1.from_positions(list(ledgers), list(entries))
        try:
            # In this order: what is given after the first answer counts as not given.
            groups = await _asked(self._server.xinfo_groups(self._stream))
            async with self._server.pipeline(transaction=False) as calls:
                for entry_id in ids:
                    calls.xpending_range(self._stream, self._group, entry_id, entry_id, 1)
                pending = await _asked(calls.execute())
        except redis.ResponseError as error:
            raise port.NotThere(f"key {self._stream}: {error}") from error
        given = [_word(each["last-delivered-id"]) for each in groups if _word(each["name"]) == self._group]
        last = max(map(_numbers, given), default=(0, 0))
        return [_numbers(entry_id) <= last and not each for entry_id, each in zip(ids, pending, strict=True)]

    async def _make_group(self) -> None:
        try:
            if self._log is None:
                await _asked(self._server.xgroup_create(self._stream, self._group, id="0", mkstream=True))
            else:
                generation = await self._log.first_generation()
                self._group = f"{self._subscription}@{generation}"
                await _asked(self._join([self._stream], [f"{_GENERATION_PREFIX}{generation}", self._group]))
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._has_group = True

    async def _group_read(self, after: str, rows_max: int, block_ms: int | None) -> list[Any]:
        asked = self._server.xreadgroup(
            self._group, self._consumer, {self._stream: after}, count=rows_max, block=block_ms
        )
        found = await _asked(asked)
        return list(found[0][1]) if found else []

    async def _claim(self, rows_max: int) -> list[Any]:
        """What was read and not committed for so long, by whomever; again at once while there is more."""
        asked = self._server.xautoclaim(self._stream, self._group, self._consumer, self._claim_ms, count=rows_max)
        entries = list((await _asked(asked))[1])
        if len(entries) < rows_max:
            self._claims_at_s = time.monotonic() + self._claim_ms / 2_000
        return [entry for entry in entries if entry[0] is not None]

    def _portion(self, entries: list[Any], alone_until_s: float = 0.0) -> port.Portion:
        return port.Portion([self._read(entry_id, fields, alone_until_s) for entry_id, fields in entries])

    def _read(self, entry_id: bytes, fields: Any, alone_until_s: float) -> port.Read:
        (ledger,), (entry,) = RedisSequences1.to_positions(entry_id)
        message = _message(fields) if fields else None
        return port.Read(int(ledger), int(entry), message, self._stream, int(entry), entry_id, alone_until_s)


class RedisOutput:
    """Streams, each with a key for what it has had lately."""

    def __init__(self, server: Any, broker: relay_settings.Redis) -> None:
        self._server = server
        self._once_s = broker.once_s
        self._produce = server.register_script(_PRODUCE)

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[port.Produced]:
        """Publishes messages by one pipeline, each once for its id; what is answered is in the stream."""
        async with self._server.pipeline(transaction=False) as calls:
            for each in messages:
                fields: dict[bytes, bytes] = dict(each.message.body) if each.message and each.has_body else {}
                fields |= {name.encode(): text.encode() for name, text in each.own_headers.items()}
                flat = [part for field in fields.items() for part in field]
                await self._produce([each.target, f"{each.target}:{each.once_id}"], [self._once_s, *flat], client=calls)
            answers = await _asked(calls.execute(raise_on_error=False))
        for answer in answers:
            if isinstance(answer, redis.RedisError) and not isinstance(answer, redis.ResponseError):
                raise port.Unreachable(str(answer)) from answer
        return [
            port.Produced(failed=f"{each.target}: {answer}")
            if isinstance(answer, redis.ResponseError)
            else port.Produced()
            for each, answer in zip(messages, answers, strict=True)
        ]


@contextlib.asynccontextmanager
async def opened(settings: relay_settings.Settings, broker: relay_settings.Redis) -> AsyncIterator[RedisBroker]:
    """Makes the connections when they are needed. Raises SettingsError, Unreachable."""
    shown: dict[str, Any] = {
        "username": broker.user,
        "password": relay_settings.secret("broker.password_file", broker.password_file),
        "ssl_ca_certs": broker.ca_file,
        "ssl_certfile": broker.cert_file,
        "ssl_keyfile": broker.key_file,
    }
    try:
        server = redis.asyncio.Redis.from_url(
            broker.url,
            socket_timeout=broker.timeout_s,
            socket_connect_timeout=broker.timeout_s,
            # The relay repeats what fails: what has failed half is not done twice without its knowing.
            retry=Retry(NoBackoff(), 0),
            **{name: value for name, value in shown.items() if value is not None},
        )
    except (ValueError, TypeError) as error:
        raise relay_settings.SettingsError(f"broker: {error}") from error
    try:
        try:
            await _asked(server.ping())
        except port.Unreachable as error:
            raise port.Unreachable(f"the broker cannot be reached, by broker.url: {error}") from error
        yield RedisBroker(server, settings, broker)
    finally:
        await server.aclose()


async def _asked(answer: Awaitable[Any]) -> Any:
    """What Redis answers. Raises Unreachable, and ResponseError: it can be reached and refuses."""
    try:
        return await answer
    except (redis.BusyLoadingError, redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise port.Unreachable(str(error) or type(error).__name__) from error
    except (redis.ReadOnlyError, redis.OutOfMemoryError) as error:
        raise port.Unreachable(str(error)) from error


def _message(fields: Mapping[bytes, bytes]) -> port.Message:
    headers = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
    return port.Message(headers, fields)


def _numbers(entry_id: str) -> tuple[int, int]:
    """(ms, sequence number), in which ids have the order of their stream."""
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence)


def _word(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _kind(kind: str) -> str:
    return "not there, and will be made" if kind == "none" else f"a {kind}"
