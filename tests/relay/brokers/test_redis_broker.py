"""The adapter of Redis, with a real server, in all that other adapters do otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tarry_relay import port, redis_broker, redis_judgement, relay_settings
from tarry_relay.port import Grade
from tests.relay.brokers._support import redis_session
from tests.relay.brokers._support.redis_session import DUE, FAILED, SOURCE, RedisOfTest

PATIENCE_S = 300


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisOfTest]:
    with redis_session.serving(tmp_path) as serving:
        yield serving


def add(redis: RedisOfTest, *fields: str | bytes, stream: str = SOURCE) -> str:
    """Publish names and values as they are, in turn; the id."""
    return str(redis.client.execute_command("XADD", stream, "*", *fields).decode())


def fields_in(redis: RedisOfTest, stream: str) -> list[list[bytes]]:
    """The fields of each entry, names and values in turn."""
    with redis_session.raw(redis) as client:
        return [fields for _, fields in client.execute_command("XRANGE", stream, "-", "+")]


async def read_all(reader: port.Reader, rows: int, rows_max: int = 500) -> list[port.Read]:
    found: list[port.Read] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < rows and time.monotonic() < deadline_s:
        found += (await reader.read(min(rows_max, rows - len(found)), 1)).read
    return found


def graded(findings: list[port.Finding], grade: Grade) -> dict[str, str]:
    return {each.name: each.text for each in findings if each.grade is grade}


# Messages


async def test_fields_are_published_as_they_are(redis: RedisOfTest) -> None:
    body = [b"tag", b"a", b"Delay", b"7", b"n\xff", b"\xff\0", b"tag", b"b", b"", b"", b"Target", b"x"]
    add(redis, *body)
    async with redis.opened() as session:
        (read,) = await read_all(session.source, 1)
        assert read.message is not None
        assert read.message.headers["Delay"] == "7"
        assert "delay" not in read.message.headers
        assert read.message.headers["n\ufffd"] == "\ufffd\0"
        assert read.message.repeated == ["tag"]
        assert session.header_key("Delay") == "Delay"
        (fetched,) = await session.log.fetch([read.position], await session.log.generation())
        assert fetched == read.message
        assert read.sent_at_ms == read.entry_id
        own = {"tarry-delivery-id": "1"}
        answers = await session.output.produce([port.Outgoing(DUE, fetched, own, "once")])
    assert answers == [port.Produced()]
    assert fields_in(redis, DUE) == [[*body, b"tarry-delivery-id", b"1"]]


async def test_fields_of_the_relay_come_from_the_relay_alone(redis: RedisOfTest) -> None:
    add(redis, "tarry-delivery-id", "forged", "tarry-reason", "forged", "id", "mine", "Tarry-x", "kept", "n", "1")
    async with redis.opened() as session:
        (read,) = await read_all(session.source, 1)
        own = {"tarry-delivery-id": "1", "id": "2"}
        await session.output.produce([port.Outgoing(DUE, read.message, own, "once")])
    assert fields_in(redis, DUE) == [[b"Tarry-x", b"kept", b"n", b"1", b"tarry-delivery-id", b"1", b"id", b"2"]]


@pytest.mark.parametrize("count", [1, 2_999, 3_001, 4_001, 40_000])
async def test_a_message_of_any_number_of_fields_is_published_once(redis: RedisOfTest, count: int) -> None:
    add(redis, *(part for n in range(count) for part in (f"f{n}", str(n))))
    async with redis.opened() as session, redis.opened("two") as other:
        (read,) = await read_all(session.source, 1)
        assert session.message_fault(read.message or port.Message({}, ())) == ""
        outgoing = [port.Outgoing(DUE, read.message, {"id": str(n)}, f"once {n}") for n in range(3)]
        for some in (outgoing[:1], outgoing):
            answers = await asyncio.gather(session.output.produce(some), other.output.produce(some))
            assert all(each.is_taken for answer in answers for each in answer)
    assert [len(each) for each in fields_in(redis, DUE)] == [2 * count + 2] * 3


async def test_what_the_version_before_has_published_is_not_published_again(redis: RedisOfTest) -> None:
    once_id = "orders@0a1b2c3d:relay:0-1-2-0"
    many = ((b"a", b"b"),) * 4_000
    async with redis.opened() as session:
        redis.client.set(redis_judgement.former_once_key(DUE, once_id), "", ex=3_600)
        for message in (None, port.Message({}, many)):
            assert (await session.output.produce([port.Outgoing(DUE, message, {"n": "1"}, once_id)]))[0].is_taken
        assert redis.client.exists(DUE) == 0


async def test_a_target_named_as_a_key_of_the_relay_hides_no_message(redis: RedisOfTest) -> None:
    once_id = "orders@0a1b2c3d:relay:0-1-2-0"
    async with redis.opened() as session:
        for key in (redis_judgement.once_key(DUE, once_id), redis_judgement.former_once_key(DUE, once_id)):
            assert "a relay remembers" in session.target_fault(key)
        # Somebody else has made a stream of that name.
        add(redis, "n", "0", stream=redis_judgement.former_once_key(DUE, once_id))
        await session.output.produce([port.Outgoing(DUE, None, {"n": "1"}, once_id)])
    assert fields_in(redis, DUE) == [[b"n", b"1"]]


async def test_messages_go_out_in_pipelines_of_some_bytes(redis: RedisOfTest) -> None:
    """500 of 900 kB would be packed several times over in memory, at once."""
    body = ((b"body", b"x" * 900_000),)
    messages = [port.Outgoing(DUE, port.Message({}, body), {"n": str(n)}, str(n)) for n in range(50)]
    small = [port.Outgoing(DUE, port.Message({}, ((b"a", b"b"),)), {}, str(n)) for n in range(500)]
    many = port.Outgoing(DUE, port.Message({}, ((b"a", b"b"),) * 4_000), {}, "many")
    divided = [len(each) for each in redis_broker._portions([*messages, *small, many, *small])]
    assert divided == [*[4] * 12, 502, 1, 500]
    async with redis.opened() as session:
        assert all(each.is_taken for each in await session.output.produce(messages))
    assert redis.client.xlen(DUE) == 50


# The source, before and while it is read.


async def test_a_source_that_does_not_exist_is_missing_until_its_first_entry(redis: RedisOfTest) -> None:
    async with redis.opened() as session:
        found = [each async for each in session.findings()]
        assert graded(found, Grade.MISSING) == {"source": "key orders: does not exist; its first XADD creates it"}
        assert graded(found, Grade.WRONG) == {}
        assert [each.name for each in found] == ["source", "retry", "clock", "durability", "target", "target"]
        for ask in (session.source_findings, session.log.generation, lambda: session.source.read(1, 1)):
            with pytest.raises(port.NotThere, match=r"^key orders: does not exist; its first XADD creates it$"):
                await ask()
        await session.must_answer()
        assert redis.client.keys() == []
        add(redis, "n", "1")
        assert len(await read_all(session.source, 1)) == 1
        assert {each.grade for each in await session.source_findings()} == {Grade.OK}


async def test_keys_of_another_kind_are_wrong(redis: RedisOfTest) -> None:
    for key in (SOURCE, FAILED, DUE):
        redis.client.set(key, "a string")
    async with redis.opened() as session:
        found = [each async for each in session.findings()]
        assert [each.name for each in found if each.grade is Grade.WRONG] == ["source", "retry", "target"]
        assert graded(found, Grade.WRONG)["source"].startswith("key orders: is a string, not a stream")
        with pytest.raises(port.NotThere, match="is a string, not a stream"):
            await session.source.read(1, 1)
        assert session.retries is not None
        with pytest.raises(port.NotThere, match="WRONGTYPE"):
            await session.retries.read(1, 1)


async def test_settings_by_which_the_source_goes_early_are_wrong(redis: RedisOfTest) -> None:
    add(redis, "n", "1")
    async with redis.opened() as session:
        assert graded(list(await session.source_findings()), Grade.WRONG) == {}
        redis.client.config_set("maxmemory-policy", "allkeys-lru")
        redis.client.pexpire(SOURCE, 3_600_000)
        assert graded(list(await session.source_findings()), Grade.WRONG).keys() == {"eviction", "ttl"}
        redis.client.config_set("maxmemory-policy", "volatile-lru")
        redis.client.persist(SOURCE)
        found = list(await session.source_findings())
        assert graded(found, Grade.WRONG) == {}
        assert graded(found, Grade.WARNING).keys() == {"eviction"}
        redis.client.config_set("maxmemory-policy", "noeviction")
        redis.client.config_set("appendfsync", "everysec")
        found = [each async for each in session.findings()]
        assert graded(found, Grade.WARNING).keys() == {"durability"}
        assert session.log.tells_limits is False
        assert await session.log.kept_ms() is None


async def test_a_trim_of_what_was_not_committed_is_found_and_then_over(redis: RedisOfTest) -> None:
    for n in range(10):
        add(redis, "n", str(n))
    async with redis.opened() as session:
        read = await read_all(session.source, 4)

        async def size() -> port.Finding:
            return next(each for each in await session.source_findings() if each.name == "size")

        assert (await size()).grade is Grade.OK
        await session.source.commit(read[:2])
        redis.client.xtrim(SOURCE, maxlen=8, approximate=False)
        assert (await size()).grade is Grade.OK
        # One of those that were read.
        redis.client.xtrim(SOURCE, maxlen=7, approximate=False)
        found = await size()
        assert found.grade is Grade.WRONG
        assert f"beyond {read[2].receipt}, which was not committed" in found.text
        assert (await size()).grade is Grade.WARNING
        await session.source.commit(read[2:])
        assert (await size()).grade is Grade.OK
        # Those that nobody has read.
        redis.client.xtrim(SOURCE, maxlen=0, approximate=False)
        assert (await size()).grade is Grade.WRONG
        assert (await size()).grade is Grade.OK


async def test_an_entry_that_the_source_has_dropped_is_read_without_a_message(redis: RedisOfTest) -> None:
    ids = [add(redis, "n", str(n)) for n in range(4)]
    async with redis.opened("one", claim_s=0.1) as one:
        await read_all(one.source, 4)
        redis.client.xdel(SOURCE, *ids[:3])
    async with redis.opened("two", claim_s=0.1) as two:
        read = await read_all(two.source, 4)
        assert [each.receipt for each in read] == ids
        assert [each.message is None for each in read] == [True] * 3 + [False]
        await two.source.commit(read)
        assert await two.source.passed([each.position for each in read]) == [True] * 4
    add(redis, "n", "5")
    # Its own of before.
    async with redis.opened("one") as one:
        (read_alone,) = await read_all(one.source, 1)
        redis.client.xdel(SOURCE, read_alone.receipt)
    async with redis.opened("one") as one:
        assert [each.message for each in await read_all(one.source, 1)] == [None]


async def test_groups_of_others_with_any_names_are_no_matter(redis: RedisOfTest) -> None:
    add(redis, "n", "1")
    redis.client.xgroup_create(SOURCE, b"\xff\xfe", id="0")
    async with redis.opened() as session:
        (read,) = await read_all(session.source, 1)
        generation = await session.log.generation()
        assert [each is None for each in await session.log.fetch([read.position], generation)] == [False]
        assert await session.source.passed([read.position]) == [False]
        assert {each.grade for each in await session.source_findings()} == {Grade.OK}


async def test_a_retry_log_of_two_relays_is_found(redis: RedisOfTest) -> None:
    async def wrong(session: redis_broker.RedisBroker) -> dict[str, str]:
        return graded([each async for each in session.findings()], Grade.WRONG)

    add(redis, "n", "1")
    async with redis.opened("one") as one, redis.opened("two") as two, redis.opened("one", "parcels") as parcels:
        for session in (one, two):
            assert session.retries is not None
            await session.retries.read(1, 0.01)
            assert await wrong(session) == {}
        found = await wrong(parcels)
        assert found.keys() == {"retry"}
        redis.client.execute_command(*found["retry"].partition(", do ")[2].split())
        assert await wrong(parcels) == {}


# Entries that are held, and entries that others have left.


def group_of(redis: RedisOfTest) -> str:
    names = [each["name"].decode() for each in redis.client.xinfo_groups(SOURCE)]
    return str(next(each for each in names if each.startswith("relay@")))


def age(redis: RedisOfTest, consumer: str, ids: list[str]) -> None:
    """Give entries to a consumer that has not held them for longer than an hour."""
    with redis_session.raw(redis) as client:
        client.execute_command("XCLAIM", SOURCE, group_of(redis), consumer, 0, *ids, "IDLE", 3_700_000, "JUSTID")


def owners(redis: RedisOfTest) -> dict[str, str]:
    pending = redis.client.xpending_range(SOURCE, group_of(redis), "-", "+", 10_000)
    return {each["message_id"].decode(): each["consumer"].decode() for each in pending}


async def test_what_is_held_is_given_to_nobody_and_then_to_another(redis: RedisOfTest) -> None:
    claim_s = 4.0
    for n in range(5):
        add(redis, "n", str(n))
    async with redis.opened("one", claim_s=claim_s) as one, redis.opened("two", claim_s=claim_s) as two:
        assert one.source.hold_every_s == pytest.approx(claim_s / 3)
        assert not one.source.commits_in_order
        read = await read_all(one.source, 5)
        holds_until_s = time.monotonic() + 2.5 * claim_s
        while time.monotonic() < holds_until_s:
            await one.source.hold(read)
            assert not (await two.source.read(10, 0.2)).read
        # One is cut off from its daemon, and holds no longer.
        ended_s = time.monotonic()
        taken = await read_all(two.source, 5)
        assert [each.receipt for each in taken] == [each.receipt for each in read]
        assert time.monotonic() - ended_s >= claim_s / 2
        # It is there again, and takes nothing back.
        await one.source.hold(read)
        assert set(owners(redis).values()) == {"two"}
        await two.source.commit(taken[:3])
        await one.source.hold(read)
        assert owners(redis) == {each.receipt: "two" for each in taken[3:]}


async def test_a_session_commits_and_holds_what_one_before_has_read(redis: RedisOfTest) -> None:
    for n in range(3):
        add(redis, "n", str(n))
    async with redis.opened() as session:
        read = await read_all(session.source, 3)
    async with redis.opened() as session:
        await session.source.commit(read[:1])
    async with redis.opened() as session:
        await session.source.hold(read[:2])
        assert list(owners(redis)) == [each.receipt for each in read[1:]]
    async with redis.opened() as session:
        assert await session.source.passed([each.position for each in read]) == [True, False, False]


async def test_thousands_are_held_at_once(redis: RedisOfTest) -> None:
    with redis.client.pipeline(transaction=False) as calls:
        for n in range(3_000):
            calls.xadd(SOURCE, {"n": n})
        calls.execute()
    async with redis.opened("one", claim_s=3_600) as one:
        read = await read_all(one.source, 3_000)
        ids = [each.receipt for each in read]
        age(redis, "one", ids)
        age(redis, "two", ids[:5])
        await one.source.hold(read)
        idle = {
            each["message_id"].decode(): each["time_since_delivered"] > 3_000_000
            for each in redis.client.xpending_range(SOURCE, group_of(redis), "-", "+", 10_000)
        }
        assert [idle[each] for each in ids] == [True] * 5 + [False] * 2_995
        await one.source.hold([])
        redis.client.delete(SOURCE)
        with pytest.raises(port.NotThere, match=r"^key orders: NOGROUP"):
            await one.source.hold(read)


async def test_many_that_are_held_hide_none_that_was_left(redis: RedisOfTest) -> None:
    with redis.client.pipeline(transaction=False) as calls:
        for n in range(3_000):
            calls.xadd(SOURCE, {"n": n})
        calls.execute()
    async with redis.opened("one", claim_s=3_600) as one, redis.opened("two", claim_s=3_600) as two:
        read = await read_all(one.source, 3_000)
        left = [read[2_000].receipt, read[-1].receipt]
        age(redis, "one", left)
        found = await read_all(two.source, 2, rows_max=1)
        assert [each.receipt for each in found] == left
        assert all(each.message is not None and each.alone_until_s == 0 for each in found)


# Bytes.


def add_all(redis: RedisOfTest, sizes: list[int]) -> None:
    with redis.client.pipeline(transaction=False) as calls:
        for size in sizes:
            calls.xadd(SOURCE, {"body": b"x" * size})
        calls.execute()


async def test_a_call_brings_no_more_than_a_portion_however_many_messages_it_asks_for(redis: RedisOfTest) -> None:
    add_all(redis, [100] * 600 + [100_000] * 100)
    async with redis.opened("one", memory_bytes=16 * 2**20, claim_s=3_600) as one:
        generation = await one.log.generation()
        # A portion of one MiB, and all that is small is one.
        read = list((await one.source.read(500, 1)).read)
        assert len(read) == 500
        fetched = await one.log.fetch([each.position for each in read], generation)
        assert fetched == [each.message for each in read]
        while more := (await one.source.read(500, 0.001)).read:
            sizes = [0 if each.message is None else each.message.size_bytes for each in more]
            assert sum(sizes) < 3 * 2**20
            read += more
        assert len(read) == 700
        large = read[600:]
        fetched = await one.log.fetch([each.position for each in large], generation)
        came = 100 - fetched.count(port.NOT_YET)
        assert 1 <= came < 30
        assert fetched == [each.message for each in large[:came]] + [port.NOT_YET] * (100 - came)
    # One that is started again, and one that takes over what it has left.
    for identity in ("one", "two"):
        age(redis, "one", [each.receipt for each in read])
        async with redis.opened(identity, memory_bytes=16 * 2**20, claim_s=3_000) as again:
            found: list[port.Read] = []
            while len(found) < 700:
                portion = (await again.source.read(500, 0.001)).read
                assert sum(each.message.size_bytes for each in portion if each.message is not None) < 3 * 2**20
                found += portion
            assert [each.receipt for each in found] == [each.receipt for each in read]


async def test_what_came_before_a_call_failed_is_handed_on(redis: RedisOfTest, monkeypatch: pytest.MonkeyPatch) -> None:
    add_all(redis, [100] * 100)
    async with redis.opened() as session:
        await session.source.read(1, 1)
        read, calls = session.source._group_read, list[int]()

        async def failing(after: str, rows_max: int, block_ms: int | None) -> redis_broker.Entries:
            calls.append(rows_max)
            if len(calls) == 3:
                raise ConnectionError("lost")
            return await read(after, rows_max, block_ms)

        monkeypatch.setattr(session.source, "_group_read", failing)
        portion = await session.source.read(99, 1)
        assert (len(portion.read), calls) == (48, [16, 32, 51])
        assert len((await session.source.read(99, 1)).read) == 51


# Settings that cannot be used.


@pytest.mark.parametrize(
    ("broker", "reason"),
    [
        ({"url": "redis://127.0.0.1:1/?nonsense=1"}, "broker: .*nonsense"),
        ({"url": "http://127.0.0.1:1"}, "broker: Redis URL must"),
        ({"ca_file": "/nowhere"}, "broker.ca_file is set, but broker.url is 'redis://127.0.0.1"),
        ({"url": "rediss://127.0.0.1:1", "ca_file": "/nowhere"}, "broker.ca_file is '/nowhere': No such file"),
        ({"url": "rediss://127.0.0.1:1", "ca_file": __file__}, "broker.ca_file cannot be used: "),
        ({"password_file": "/nowhere"}, "broker.password_file is '/nowhere'"),
    ],
)
async def test_settings_that_cannot_be_used_are_told_by_their_field(
    redis: RedisOfTest, broker: dict[str, Any], reason: str
) -> None:
    with pytest.raises(relay_settings.SettingsError, match=reason):
        async with redis.opened(**broker):
            pass


async def test_what_a_url_says_of_answers_changes_nothing(redis: RedisOfTest) -> None:
    add(redis, "n", b"\xff")
    async with redis.opened(url=f"{redis.server.url}/0?protocol=3&decode_responses=yes") as session:
        (read,) = await read_all(session.source, 1)
        assert read.message is not None
        assert read.message.body == ((b"n", b"\xff"),)


async def test_a_server_that_is_not_there_is_unreachable_at_first(redis: RedisOfTest) -> None:
    redis.server.kill()
    with (
        contextlib.suppress(ProcessLookupError),
        pytest.raises(port.Unreachable, match=r"^the broker cannot be reached"),
    ):
        async with redis.opened():
            pass
