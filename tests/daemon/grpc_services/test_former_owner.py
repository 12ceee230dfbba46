"""Calls whose answer waits for a former owner: who is kept waiting, and who is told for how long."""

from __future__ import annotations

import time
import types
from collections.abc import Callable

import grpc.aio
import pytest

import tarry
from tarry import attempts
from tarry.on_event_loop import Condition
from tarry.v1 import delayed_delivery_pb2 as pb
from tests.daemon.grpc_services.conftest import Edge

CANCEL = "DelayedDelivery/CancelMessages"
ADD = pb.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1, 2], deliver_at_ms=[2_000_000_000_000])
ASKED = pb.CancelMessagesRequest(topic="t", ledger_id=[1], entry_id=[1])


async def test_a_caller_whose_deadline_is_over_before_is_told_at_once_for_how_long(edge: Edge) -> None:
    await edge.caller.unary("DelayedDelivery/AddMessages", ADD)
    edge.calls.former_owner_s = 900.5
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.caller.unary(CANCEL, ASKED, timeout_s=600)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    hints = dict(refused.value.trailing_metadata() or ())
    assert (hints["former-owner-ms"], hints["retry-after-ms"]) == ("900500", "900500")
    assert "t was taken over from a daemon that may still hand out rows" in (refused.value.details() or "")
    assert (await edge.caller.unary(CANCEL, ASKED, timeout_s=1_200)).cancelled == 1


async def test_the_client_does_not_count_the_wait_for_a_former_owner_and_says_what_it_waits_for(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    await edge.caller.unary("DelayedDelivery/AddMessages", ADD)
    edge.calls.former_owner_s = 700.0
    passed_s = 0.0
    said: list[str] = []

    wait_for = Condition.wait_for

    async def pass_at_once(self: Condition, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        nonlocal passed_s
        if timeout is None or timeout < 60.0:
            # Whoever watches whether the daemon answers
            return await wait_for(self, predicate, timeout)
        passed_s += timeout
        return bool(predicate())

    def waiting(why: str) -> None:
        said.append(why)
        edge.calls.former_owner_s = 0.0

    monotonic = time.monotonic
    monkeypatch.setattr(attempts, "time", types.SimpleNamespace(monotonic=lambda: monotonic() + passed_s))
    monkeypatch.setattr(Condition, "wait_for", pass_at_once)
    async with tarry.aio.Client(f"127.0.0.1:{edge.port}", timeout_s=600, waiting=waiting) as client:
        assert (await client.cancel("t", 1, [1])).cancelled == 1
    assert passed_s == 700
    (why,) = said
    assert "may still hand out rows, for 700 s at most" in why
