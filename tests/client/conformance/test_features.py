"""What a daemon of before does not know is asked for, never tried out."""

from __future__ import annotations

import grpc
import pytest

import tarry
import tarry.aio
from tarry.v1 import cluster_pb2, delayed_delivery_pb2, dispatch_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse

FORWARDED = (7, 1, 1_000, None, 0)


of_before = refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown method GetVersion")
of_today = answer(cluster_pb2.GetVersionResponse(version="1", api=1, feature=["handout_names"]))
nacked = answer(dispatch_pb2.NegativeAcknowledgeResponse())
gone = refuse(grpc.StatusCode.UNAVAILABLE, "it stops")


async def test_a_forwarded_nack_is_not_sent_to_a_daemon_that_does_not_know_it(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", of_before)
    daemon.script("NegativeAcknowledge", nacked)
    with pytest.raises(tarry.Unsupported, match=r"forwarded.*handout_names.*update the daemon"):
        await client.nack("topic", "sub", FORWARDED, forwarded=True)
    assert daemon.count("NegativeAcknowledge") == 0
    await client.nack("topic", "sub", FORWARDED)
    assert daemon.count("NegativeAcknowledge") == 1, "what it knows is sent without asking"


async def test_a_daemon_is_asked_once_and_again_after_it_failed(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", of_today, of_today, of_before)
    daemon.script("NegativeAcknowledge", nacked, nacked, gone, nacked, gone, nacked)
    for _ in range(2):
        await client.nack("topic", "sub", FORWARDED, forwarded=True)
    assert daemon.count("GetVersion") == 1
    await client.nack("topic", "sub", FORWARDED, forwarded=True)
    assert daemon.count("GetVersion") == 2
    with pytest.raises(tarry.Unsupported):
        await client.nack("topic", "sub", FORWARDED, forwarded=True)
    (request, *_) = daemon.requests("NegativeAcknowledge")
    assert (request.forwarded, list(request.redelivery_count)) == (True, [0])


async def test_what_a_log_is_needed_for_is_not_asked_of_a_daemon_that_does_not_tell(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", of_before)
    with pytest.raises(tarry.Unsupported, match=r"dead_letter.*retention.*update the daemon"):
        await client.trim("topic", 7, 9, dead_letter=True, subscription="sub")
    with pytest.raises(tarry.Unsupported, match=r"retention.*update the daemon"):
        await client.retention("topic")
    assert daemon.count("TrimMessages") == daemon.count("GetRetention") == 0
    daemon.script("TrimMessages", answer(delayed_delivery_pb2.TrimMessagesResponse(trimmed=3)))
    assert await client.trim("topic", 7, 9) == 3, "what it knows is sent without asking"
