"""A topic manifest, and a shard manifest, that a writer with a bug wrote, under a real daemon with forty topics:
the topic and the shard are refused by name until the objects are mended, and no stream of another topic breaks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import tarry
from examples import processes
from storage_backends.formats import names
from storage_backends.local_directory import LocalDirectory
from tarry.v1 import delayed_delivery_pb2
from tests._support.bad_text import put_bad_successor
from tests._support.patience import wait_until
from tests._support.processes import Daemons
from tests._support.stubs import Stub
from tests.wire._support.listening import PATIENCE_S, Listener, shared
from tests.wire._support.traffic import CHANNEL_OPTIONS

SHARDS = 4
TOPICS = [f"topic-{number}" for number in range(40)]
DAMAGED_SHARD = 2
DAMAGED_TOPIC = next(topic for topic in TOPICS if names.shard_of(topic, SHARDS) != DAMAGED_SHARD)
ROWS = 3


class Traffic:
    """All topics, each with one stream that is opened once."""

    def __init__(self, address: str, client: tarry.Client, streams: contextlib.ExitStack) -> None:
        self._client = client
        self._listeners = {topic: streams.enter_context(Listener(address, shared(topic, "s"))) for topic in TOPICS}
        self._ledger = 0

    def check(self, topics: list[str]) -> None:
        """What is added to each of the topics now reaches its stream, which never ended."""
        self._ledger += 1
        for topic in topics:
            self._client.add(topic, self._ledger, range(ROWS), delay_ms=50)
        for topic in topics:
            self._listeners[topic].wait_for({(self._ledger, entry) for entry in range(ROWS)})
            assert not self._listeners[topic].ended.is_set(), topic


class Plain:
    """Adds without a client library, which would try again."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = Stub(delayed_delivery_pb2, channel)
        self._entries = itertools.count()

    def refusal(self, topic: str) -> tuple[grpc.StatusCode, str] | None:
        """What an add is refused with; None when it is not."""
        request = delayed_delivery_pb2.AddMessagesRequest(
            topic=topic, ledger_id=[1_000], entry_id=[next(self._entries)], delay_ms=[3_600_000]
        )
        try:
            self._stub.AddMessages(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        return None

    def wait_until_served(self, topic: str) -> None:
        wait_until(lambda: self.refusal(topic) is None, f"topic {topic} is refused", timeout_s=PATIENCE_S)

    def lost(self, topic: str) -> str:
        """Why an add is refused with DATA_LOSS, as soon as one is.

        It may be asked to come again before that, and what it did is unknown if it was under way when that was found.
        """
        before = {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN}
        told: list[str] = []

        def is_lost() -> bool:
            code, why = self.refusal(topic) or (grpc.StatusCode.OK, "")
            assert code in before | {grpc.StatusCode.DATA_LOSS}, why
            told.append(why)
            return code is grpc.StatusCode.DATA_LOSS

        wait_until(is_lost, f"topic {topic} is served", timeout_s=PATIENCE_S)
        return told[-1]


@pytest.fixture
def daemon(daemons: Daemons, tmp_path: Path) -> Iterator[processes.DaemonProcess]:
    settings = {
        **processes.local_store(tmp_path / "root"),
        "daemon.shards": SHARDS,
        # A daemon comes upon the manifest of a shard when it writes the next one.
        "journal.checkpoint_slots": 5,
        "ownership.heartbeat_interval_s": 0.5,
        # Older manifests are not removed meanwhile.
        "collection.interval_s": 86_400,
    }
    daemon = daemons.make("tarryd", settings)
    daemon.start_serving()
    yield daemon
    assert daemon.alive


def test_what_is_damaged_is_refused_by_name_until_it_is_mended_and_no_other_stream_breaks(
    daemon: processes.DaemonProcess, tmp_path: Path
) -> None:
    store = LocalDirectory(tmp_path / "root")
    of_shard = [topic for topic in TOPICS if names.shard_of(topic, SHARDS) == DAMAGED_SHARD]
    others = [topic for topic in TOPICS if topic not in of_shard and topic != DAMAGED_TOPIC]
    with (
        tarry.Client(daemon.address, timeout_s=PATIENCE_S) as client,
        grpc.insecure_channel(daemon.address, options=CHANNEL_OPTIONS) as channel,
        contextlib.ExitStack() as streams,
    ):
        for topic in TOPICS:
            client.create_subscription(topic, "s")
        traffic = Traffic(daemon.address, client, streams)
        traffic.check(TOPICS)
        client.add(DAMAGED_TOPIC, 999, range(ROWS), delay_ms=3_600_000)

        prefix = names.topic_manifest_prefix(names.shard_of(DAMAGED_TOPIC, SHARDS), names.topic_id(DAMAGED_TOPIC))
        of_topic = put_bad_successor(store, prefix, DAMAGED_TOPIC)
        # The daemon comes upon that object when it writes the next one itself.
        with tarry.Client(daemon.address, timeout_s=1) as hasty, contextlib.suppress(tarry.TarryError):
            hasty.seal(DAMAGED_TOPIC)
        key = put_bad_successor(store, names.shard_manifest_prefix(DAMAGED_SHARD), daemon.address)
        plain = Plain(channel)
        why = plain.lost(DAMAGED_TOPIC)
        assert re.search(rf"topic {DAMAGED_TOPIC}: .*{of_topic}.*not UTF-8", why), why
        why = plain.lost(of_shard[0])
        assert re.search(rf"shard {DAMAGED_SHARD}, which topic {of_shard[0]} belongs to, .* is not UTF-8", why), why
        traffic.check(others)

        store.delete(of_topic)
        store.delete(key)
        for topic in (DAMAGED_TOPIC, of_shard[0]):
            plain.wait_until_served(topic)
        traffic.check(others)
