"""A real Redis gives each answer of the table, and the adapter reads it as the table says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

from tarry_relay import port, redis_answers
from tarry_relay.port import Cause, Meaning
from tests.relay.brokers._support import redis_session
from tests.relay.brokers._support.redis_session import DUE, SOURCE, RedisOfTest

PATIENCE_S = 300
PROVOKED = {
    *("BUSY", "CLUSTERDOWN", "CROSSSLOT", "MASTERDOWN", "MISCONF", "NOPERM", "NOREPLICAS", "OOM", "READONLY"),
    *("WRONGTYPE", redis_answers.EXHAUSTED, redis_answers.NO_FIELDS, redis_answers.TOO_LARGE),
}
NOT_PROVOKED = {
    "ASK": "needs a cluster that moves a slot, and the relay does not support clusters",
    "EXECABORT": "the client raises the error of the command that caused it",
    "LOADING": "told to the whole call: see the test of a server that loads",
    "MOVED": "needs a cluster of two",
    "NOSCRIPT": "the client loads the script before it is run; somebody must flush it between the two",
    "TRYAGAIN": "needs a cluster that moves a slot",
    redis_answers.WATCHED: "needs another relay that publishes the same message five times in between",
}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisOfTest]:
    with redis_session.serving(tmp_path) as serving:
        yield serving


def outgoing(target: str = DUE, name: str = "1", value: bytes = b"1", fields: int = 1) -> port.Outgoing:
    body = ((b"n", value),) * fields
    return port.Outgoing(target, port.Message({}, body), {"tarry-delivery-id": name}, f"once {name}")


async def answer_of(redis: RedisOfTest, what: port.Outgoing, **broker: Any) -> port.Produced:
    async with redis.opened(**broker) as session:
        (answer,) = await session.output.produce([what])
    return answer


def must_mean(answer: port.Produced, code: str) -> None:
    assert (answer.code, answer.meant) == (code, redis_answers.ANSWERS[code])
    assert answer.text.startswith(f"{DUE}: ")
    assert "\n" not in answer.text
    assert code in PROVOKED


async def until_failing(ask: Callable[[], Awaitable[object]], failure: type[Exception], text: str) -> None:
    """Ask until it fails like this. It may succeed, or be unreachable by a connection of before.

    By the clock: in Python 3.11 the client may lose the cancellation by a timeout.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            await ask()
        except (port.Unreachable, failure) as error:
            if isinstance(error, failure) and text in str(error):
                return
    raise TimeoutError(f"it has not failed with {text!r}")


@pytest.mark.parametrize("fields", [1, 5_000])
async def test_a_key_of_another_kind(redis: RedisOfTest, fields: int) -> None:
    redis.client.set(DUE, "a string")
    must_mean(await answer_of(redis, outgoing(fields=fields)), "WRONGTYPE")
    redis.client.delete(DUE)
    assert (await answer_of(redis, outgoing(fields=fields))).is_taken
    assert redis.client.xlen(DUE) == 1


@pytest.mark.parametrize("fields", [1, 5_000])
async def test_no_memory(redis: RedisOfTest, fields: int) -> None:
    redis.client.config_set("maxmemory", 1)
    must_mean(await answer_of(redis, outgoing(fields=fields)), "OOM")
    redis.client.config_set("maxmemory", 0)
    assert (await answer_of(redis, outgoing(fields=fields))).is_taken


@pytest.mark.parametrize("fields", [1, 5_000])
async def test_no_disk(redis: RedisOfTest, tmp_path: Path, fields: int) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    async with redis.opened() as session:
        redis.client.config_set("dir", str(gone))
        redis.client.config_set("save", "3600 1")
        gone.rmdir()
        redis.client.bgsave()
        async with asyncio.timeout(PATIENCE_S):
            while redis.client.info("persistence")["rdb_last_bgsave_status"] == "ok":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (answer,) = await session.output.produce([outgoing(fields=fields)])
        must_mean(answer, "MISCONF")
        with pytest.raises(port.Unreachable, match="MISCONF"):
            await session.must_answer()
        redis.client.config_set("save", "")
        assert (await session.output.produce([outgoing(fields=fields)]))[0].is_taken


async def test_not_enough_replicas(redis: RedisOfTest) -> None:
    """Redis before 7 does not look at them in scripts, so only a message of many fields meets it there."""
    redis.client.config_set("min-replicas-to-write", 1)
    must_mean(await answer_of(redis, outgoing(fields=5_000)), "NOREPLICAS")
    answer = await answer_of(redis, outgoing())
    if redis.client.info("server")["redis_version"].startswith("6."):
        assert answer.is_taken
        async with redis.opened() as session:
            found = [each.text async for each in session.findings() if each.name == "durability"]
        assert any(each.startswith("min-replicas-to-write is set") for each in found)
    else:
        must_mean(answer, "NOREPLICAS")


@pytest.mark.parametrize("fields", [1, 5_000])
@pytest.mark.parametrize(
    "rights", [{"keys": ["x"], "commands": ["+@all"]}, {"keys": ["*"], "commands": ["+@all", "-xadd"]}]
)
async def test_no_rights(redis: RedisOfTest, tmp_path: Path, rights: dict[str, Any], fields: int) -> None:
    redis.client.acl_setuser("relay", enabled=True, passwords=["+secret"], **rights)
    (tmp_path / "password").write_text("secret")
    shown = {"user": "relay", "password_file": str(tmp_path / "password")}
    must_mean(await answer_of(redis, outgoing(fields=fields), **shown), "NOPERM")
    redis.client.acl_setuser("relay", enabled=True, keys=["*"], commands=["+@all"])
    assert (await answer_of(redis, outgoing(fields=fields), **shown)).is_taken


@pytest.mark.parametrize("fields", [1, 5_000])
async def test_a_replica(redis: RedisOfTest, fields: int) -> None:
    redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    must_mean(await answer_of(redis, outgoing(fields=fields)), "READONLY")
    async with redis.opened() as session:
        assert "role" in [each.name async for each in session.findings()]
        assert session.retries is not None
        with pytest.raises(port.Unreachable, match="read only"):
            await session.retries.read(1, 1)


async def test_a_replica_that_has_lost_its_primary(redis: RedisOfTest) -> None:
    redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    redis.client.config_set("replica-serve-stale-data", "no")
    must_mean(await answer_of(redis, outgoing()), "MASTERDOWN")


@pytest.mark.parametrize("fields", [1, 5_000])
async def test_a_stream_that_has_had_the_last_id(redis: RedisOfTest, fields: int) -> None:
    redis.client.xadd(DUE, {"a": "b"}, id=f"{2**64 - 1}-{2**64 - 1}")
    must_mean(await answer_of(redis, outgoing(fields=fields)), redis_answers.EXHAUSTED)
    redis.client.delete(DUE)
    assert (await answer_of(redis, outgoing(fields=fields))).is_taken


async def test_a_server_that_is_busy_with_a_script(redis: RedisOfTest) -> None:
    redis.client.config_set("lua-time-limit", 1)
    async with redis.opened() as session:
        with redis_client.Redis(port=redis.server.port, socket_timeout=PATIENCE_S) as other:
            busy = asyncio.create_task(asyncio.to_thread(other.eval, "while true do end", 0))
            await until_failing(session.must_answer, port.Unreachable, "BUSY")
            (answer,) = await session.output.produce([outgoing()])
            redis.client.script_kill()
            with pytest.raises(redis_client.ResponseError):
                await busy
        must_mean(answer, "BUSY")
        assert (await session.output.produce([outgoing()]))[0].is_taken


async def test_a_cluster(tmp_path: Path) -> None:
    with redis_session.serving(tmp_path, "--cluster-enabled", "yes") as redis:
        must_mean(await answer_of(redis, outgoing()), "CLUSTERDOWN")
        redis.client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        async with redis.opened() as session, asyncio.timeout(PATIENCE_S):
            while b"cluster_state:ok" not in redis.client.execute_command("CLUSTER", "INFO"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (answer,) = await session.output.produce([outgoing()])
            must_mean(answer, "CROSSSLOT")
            wrong = [each.name async for each in session.findings() if each.grade is port.Grade.WRONG]
        assert wrong == ["cluster"]


async def test_a_message_without_a_field(redis: RedisOfTest) -> None:
    body = ((b"tarry-x", b"1"),)
    answer = await answer_of(redis, port.Outgoing(DUE, port.Message({}, body), {}, "once"))
    must_mean(answer, redis_answers.NO_FIELDS)


async def test_a_value_that_is_too_large_hurts_no_other(redis: RedisOfTest) -> None:
    """The server answers and closes the connection, under what follows."""
    redis.client.config_set("proto-max-bulk-len", 2**20)
    async with redis.opened() as session:
        large = outgoing(name="2", value=b"x" * (2**20 + 1))
        before, refused, after = await session.output.produce([outgoing(name="1"), large, outgoing(name="3")])
        assert before.is_taken
        assert after.is_taken
        assert redis.client.xlen(DUE) == 2
        assert refused.code in (redis_answers.TOO_LARGE, "ConnectionError")
        # The client may see only that the connection was closed, while it still wrote.
        for _ in range(100):
            if refused.code == redis_answers.TOO_LARGE:
                break
            assert refused.meant.meaning is Meaning.UNKNOWN
            (refused,) = await session.output.produce([large])
        must_mean(refused, redis_answers.TOO_LARGE)


async def test_a_message_that_ends_the_connection_is_unknown(redis: RedisOfTest) -> None:
    redis.client.config_set("proto-max-bulk-len", 2**20)
    async with redis.opened() as session:
        for fields in (1, 5_000):
            body = ((b"large", b"x" * 20 * 2**20), *[(b"n", b"1")] * fields)
            large = port.Outgoing(DUE, port.Message({}, body), {}, "once")
            first, answer = await session.output.produce([outgoing(name=str(fields)), large])
            assert first.is_taken
            assert answer.meant.meaning in (Meaning.UNKNOWN, Meaning.REFUSED)
            assert (await session.output.produce([outgoing(name="3")]))[0].is_taken


async def test_a_server_that_goes_away_in_between(redis: RedisOfTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay as they are, and the rest is unknown. If nothing was answered the call has failed."""
    async with redis.opened() as session:
        large = [outgoing(name=str(n), value=b"x" * 3 * 2**20) for n in range(3)]
        publish = session.output._publish

        async def and_kill(messages: Any) -> Any:
            answers = await publish(messages)
            redis.server.kill()
            return answers

        monkeypatch.setattr(session.output, "_publish", and_kill)
        first, *others = await session.output.produce(large)
        assert first.is_taken
        assert [each.meant.meaning for each in others] == [Meaning.UNKNOWN] * 2
        assert {each.code for each in others} == {"ConnectionError"}
        with pytest.raises(port.Unreachable):
            await session.output.produce(large)
        redis.server.start()
        redis.server.wait_until_loaded()
        monkeypatch.undo()
        assert [each.is_taken for each in await session.output.produce(large)] == [True] * 3
    assert redis.client.xlen(DUE) == 3


async def test_a_server_that_loads(tmp_path: Path) -> None:
    with redis_session.serving(tmp_path) as redis:
        async with redis.opened(timeout_s=5) as session:
            with redis.client.pipeline(transaction=False) as calls:
                for n in range(30_000):
                    calls.set(str(n), n)
                calls.execute()
            redis.server.kill()
            redis.server._more = ("--key-load-delay", "500")
            redis.server.start()
            await until_failing(session.must_answer, port.Unreachable, "Redis is loading")
            with pytest.raises(port.Unreachable, match="Redis is loading"):
                await session.output.produce([outgoing()])
            with pytest.raises(port.Unreachable, match="Redis is loading"):
                await session.source.read(1, 1)


async def test_a_server_that_does_not_answer_is_unreachable(redis: RedisOfTest) -> None:
    async with redis.opened(timeout_s=1) as session:
        redis.client.xadd(SOURCE, {"n": 1})
        redis.server.stop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                for ask in (session.must_answer, session.log.generation, session.source_findings):
                    with pytest.raises(port.Unreachable):
                        await ask()
        finally:
            redis.server.resume()
        await session.must_answer()


async def test_credentials_that_are_refused_end_the_session(redis: RedisOfTest, tmp_path: Path) -> None:
    redis.client.acl_setuser("relay", enabled=True, passwords=["+old"], keys=["*"], commands=["+@all"])
    password = tmp_path / "password"
    password.write_text("old")
    shown: dict[str, Any] = {"user": "relay", "password_file": str(password)}
    redis.client.xadd(SOURCE, {"n": 1})
    async with redis.opened(**shown) as session:
        await session.source.read(1, 1)
        redis.client.acl_setuser("relay", enabled=True, passwords=["-old", "+new"])
        # A connection outlives its password, so the connections are closed, as by an outage.
        for each in redis.client.client_list():
            if each["user"] == "relay":
                redis.client.client_kill(each["addr"])
        for ask in (session.must_answer, session.log.generation, lambda: session.source.read(1, 1)):
            await until_failing(ask, port.SessionOver, "invalid username-password")
        with pytest.raises(port.Unreachable, match=r"by broker\.url: PING: invalid username-password"):
            async with redis.opened(**shown):
                pass
    password.write_text("new\n")
    async with redis.opened(**shown) as session:
        await session.source.read(1, 1)


async def test_rights_that_are_taken_away_end_the_session(redis: RedisOfTest, tmp_path: Path) -> None:
    redis.client.acl_setuser("relay", enabled=True, passwords=["+x"], keys=["*"], commands=["+@all"])
    (tmp_path / "password").write_text("x")
    redis.client.xadd(SOURCE, {"n": 1})
    async with redis.opened(user="relay", password_file=str(tmp_path / "password")) as session:
        await session.source.read(1, 1)
        redis.client.acl_setuser("relay", enabled=True, commands=["-xreadgroup", "-info", "-config"])
        with pytest.raises(port.SessionOver, match="xreadgroup"):
            await session.source.read(1, 1)
        found = {each.name: each.grade async for each in session.findings()}
        assert (found["eviction"], found["durability"]) == (port.Grade.WARNING, port.Grade.WARNING)


def test_every_answer_of_the_table_is_provoked_or_its_reason_is_given() -> None:
    assert {*PROVOKED, *NOT_PROVOKED} == {*redis_answers.ANSWERS}
    assert not PROVOKED & {*NOT_PROVOKED}
    limits = {code for code, meant in redis_answers.ANSWERS.items() if meant.cause is Cause.LIMIT}
    assert limits == {"OOM", "MISCONF", "NOREPLICAS", "NOPERM"}
