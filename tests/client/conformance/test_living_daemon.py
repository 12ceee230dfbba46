"""A client of several addresses, some of them dead or silent: it goes on at the daemon that answers.

A silent daemon has a connection that stands, and answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from tarry import daemons
from tarry.v1 import admin_pb2, delayed_delivery_pb2
from tests._support.patience import awaited_within_some_time
from tests.client import conftest
from tests.client._support.authority import Authority
from tests.client._support.fake_daemon import (
    OF_TODAY,
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    accept,
    answer,
    confirm_all,
    hold,
    messages,
    moved,
    one_batch,
    opened,
    receive,
    refuse,
    take,
)
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent daemons are left sooner than in earnest. Where a living one must not be left, the test gives more time."""
    monkeypatch.setattr(daemons, "SILENCE_S", 0.5)


@contextlib.contextmanager
def silent(daemon: FakeDaemon, *methods: str) -> Iterator[None]:
    """It keeps connections and answers neither these calls nor `GetVersion`, until the block ends."""
    ended = threading.Event()

    def step(request: Any, context: grpc.ServicerContext) -> Any:
        ended.wait(WAIT_S)
        context.abort(grpc.StatusCode.UNAVAILABLE, "it was silent for too long")

    for method in ("GetVersion", *methods):
        daemon.script(method, step)
    try:
        yield
    finally:
        ended.set()


@pytest.mark.parametrize("form", ["list", "text"])
async def test_a_dead_first_address_costs_neither_the_call_nor_a_later_one(
    daemon: FakeDaemon, other_daemon: FakeDaemon, connect: Connect, form: str
) -> None:
    # A back-off that no test would see the end of
    never = tarry.RetryPolicy(uniform=lambda low, high: 3_600.0)
    given: Any = [daemon.address, other_daemon.address]
    client = connect(given if form == "list" else ",".join(given), timeout_s=WAIT_S, retry_policy=never)
    daemon.stop()
    other_daemon.script("AddMessages", accept)
    for _ in range(2):
        assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1


async def test_a_silent_daemon_is_asked_for_its_version_and_left(
    daemon: FakeDaemon, other_daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect([daemon.address, other_daemon.address], timeout_s=WAIT_S, retry_policy=conftest.AT_ONCE)
    other_daemon.script("CancelMessages", answer(delayed_delivery_pb2.CancelMessagesResponse(not_found_index=[0])))
    with silent(daemon, "CancelMessages"):
        left = await client.cancel("topic", 1, 1)
        assert left.may_have_landed, "the silent daemon may have carried it out"
        assert daemon.count("GetVersion") >= 1
        # Other topics do not find out for themselves.
        await client.cancel("another", 1, 1)
        assert daemon.count("CancelMessages") == 1


async def test_a_silent_daemon_that_answers_again_is_the_owner_again(
    daemon: FakeDaemon, other_daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect([daemon.address, other_daemon.address], timeout_s=WAIT_S)
    daemon.script("AddMessages", accept)
    stands_by = refuse(grpc.StatusCode.FAILED_PRECONDITION, owner_address=daemon.address)
    redirected = Gate()

    def redirect(request: Any, context: grpc.ServicerContext) -> Any:
        redirected.open()
        stands_by(request, context)

    other_daemon.script("AddMessages", redirect)
    with silent(daemon, "AddMessages"):
        added = asyncio.ensure_future(client.add("topic", 1, 1, delay_ms=1))
        await redirected.passed()
        asked = daemon.count("AddMessages")
        await redirected.passed()
        assert daemon.count("AddMessages") == asked == 1, "the redirect to the silent daemon is not followed"
        daemon.script("AddMessages", accept)
        daemon.script("GetVersion", answer(OF_TODAY))
    assert (await added).accepted == 1
    assert daemon.count("AddMessages") == 2


async def test_a_call_that_takes_long_is_not_left_while_the_daemon_reports_its_version(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Gate()

    def version(request: Any, context: grpc.ServicerContext) -> Any:
        asked.open()
        return OF_TODAY

    def slowly(request: Any, context: grpc.ServicerContext) -> Any:
        for _ in range(3):
            asked.wait()
        return accept(request, context)

    daemon.script("GetVersion", version)
    daemon.script("AddMessages", slowly)

    async def story(seconds: float) -> None:
        monkeypatch.setattr(daemons, "SILENCE_S", seconds)
        before = daemon.count("AddMessages")
        assert (await connect(daemon.address, timeout_s=WAIT_S).add("topic", 1, 1, delay_ms=1)).accepted == 1
        assert daemon.count("AddMessages") == before + 1

    await awaited_within_some_time(story)


async def test_a_subscription_goes_on_at_the_daemon_that_answers(
    daemon: FakeDaemon, other_daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect([daemon.address, other_daemon.address], timeout_s=WAIT_S, retry_policy=conftest.AT_ONCE)
    with contextlib.ExitStack() as stack:

        def then_silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
            take(requests, "open")
            yield opened(epoch=1)
            take(requests, "flow")
            yield messages(range(1))
            stack.enter_context(silent(daemon))
            hold(requests)

        daemon.script("Subscribe", then_silent)
        other_daemon.script("Subscribe", one_batch(range(1, 2), epoch=2))
        async with client.subscribe("topic", "sub") as subscription:
            first = await receive(subscription)
            second = await receive(subscription)
            assert (first.epoch, second.epoch) == (1, 2)
            await subscription.ack(second)
            assert subscription.held == 1, "what came before is declared, and still held"


async def test_receive_raises_what_a_silent_daemon_might_have_sent(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opening(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        hold(requests)

    daemon.script("Subscribe", opening)
    client = connect(daemon.address, timeout_s=WAIT_S)

    async def nothing_is_due(seconds: float) -> None:
        monkeypatch.setattr(daemons, "SILENCE_S", seconds)
        try:
            assert await subscription.receive(4 * seconds) is None
        except tarry.DeadlineExceeded as busy:
            raise AssertionError("it reports its version, and nothing is due") from busy

    async with client.subscribe("topic", "sub") as subscription:
        await awaited_within_some_time(nothing_is_due)
        monkeypatch.setattr(daemons, "SILENCE_S", 0.5)
        with silent(daemon):
            with pytest.raises(tarry.DeadlineExceeded, match="reached no daemon within 2 s") as raised:
                await subscription.receive(2)
            assert isinstance(raised.value.last, tarry.Unavailable)
            assert daemon.address in str(raised.value)


async def test_receive_raises_what_a_dead_daemon_might_have_sent(daemon: FakeDaemon, connect: Connect) -> None:
    broken = Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        broken.wait()

    def refused(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        context.abort(grpc.StatusCode.UNAVAILABLE, "it is starting")
        yield

    daemon.script("Subscribe", breaking, refused)
    client = connect(daemon.address, timeout_s=WAIT_S, retry_policy=conftest.AT_ONCE)

    async def until_it_is_noticed() -> None:
        while await subscription.receive(0.2) is None:
            pass

    async with client.subscribe("topic", "sub") as subscription:
        broken.open()
        with pytest.raises(tarry.DeadlineExceeded) as raised:
            await until_it_is_noticed()
        assert isinstance(raised.value.last, tarry.Unavailable)
        daemon.script("Subscribe", one_batch(range(1)))
        _ = subscription.ack(await receive(subscription))


async def test_a_subscription_that_followed_a_redirect_returns_when_that_daemon_dies(
    daemon: FakeDaemon, other_daemon: FakeDaemon, connect: Connect
) -> None:
    def moving(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield moved(other_daemon.address)

    def until_it_dies(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(epoch=2)
        take(requests, "flow")
        yield messages(range(1), epoch=2)
        yield from confirm_all(requests, epoch=2)

    daemon.script("Subscribe", moving, one_batch(range(1, 2), epoch=3))
    other_daemon.script("Subscribe", until_it_dies)
    client = connect(daemon.address, timeout_s=WAIT_S, retry_policy=conftest.AT_ONCE)
    async with client.subscribe("topic", "sub") as subscription:
        await subscription.ack(await receive(subscription))
        other_daemon.stop()
        second = await receive(subscription)
        assert second.epoch == 3
        await subscription.ack(second)


async def test_a_call_that_is_made_once_goes_to_a_daemon_that_answers(
    daemon: FakeDaemon, other_daemon: FakeDaemon, connect: Connect
) -> None:
    daemon.stop()

    def all_of_it(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield admin_pb2.CollectGarbageResponse(done=True)

    other_daemon.script("CollectGarbage", all_of_it)
    client = connect([daemon.address, other_daemon.address], timeout_s=WAIT_S)
    assert [step.done async for step in client.collect_garbage()] == [True]


async def test_with_tls_a_dead_and_a_silent_address_are_left_too(
    connect: Connect, authority: Authority, ca_file: Path
) -> None:
    secured = [FakeDaemon(credentials=authority.of_daemon()) for _ in range(3)]
    dead, quiet, living = secured
    try:
        dead.stop()
        living.script("AddMessages", accept)
        client = connect([each.address for each in secured], tls=tarry.Tls(ca_file=ca_file))
        with silent(quiet, "AddMessages"):
            assert (await client.add("topic", 1, 1, delay_ms=1, timeout_s=WAIT_S)).accepted == 1
    finally:
        quiet.stop()
        living.stop()


async def test_a_client_that_is_closed_leaves_no_watch(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.script("AddMessages", accept)
    client = connect(daemon.address)
    await client.add("topic", 1, 1, delay_ms=1)
    await client.close()
    assert not [each.name for each in threading.enumerate() if each.name == f"the watch of {daemon.address}"]
