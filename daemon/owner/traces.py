"""Finds what still names a shard that has no manifest: it is no new shard then, but one that the store has lost.

A manifest of a shard is written before anything else of it, and the newest one stays for ever. Looked at are the
objects beneath the shard, the heads of all logs, and the heartbeats. `takeover` asks before it claims a shard that has
no manifest, `give_up` before it begins such a shard anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from daemon.owner.heartbeat import Heartbeat
from storage_backends import commit, log_fence, object_store
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import Head, Heads
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import ObjectStore
from storage_backends.slot_log import SlotLogs


class Traces:
    """The names of shards in a root. Its calls block.

    `heartbeats` returns those that are known.
    """

    def __init__(self, store: ObjectStore, logs: SlotLogs, heartbeats: Callable[[], Iterable[Heartbeat]]) -> None:
        self._store = store
        self._logs = logs
        self._heartbeats = heartbeats

    def check_new(self, shard: int, manifests: commit.ManifestLog[ShardManifest]) -> None:
        """Raise Damaged if anything names the shard, which had no manifest. Raises the store's errors."""
        for trace in self._of(shard):
            if manifests.read_tip() is not None:
                # Another daemon has claimed it since, and left the trace.
                return
            raise object_store.Damaged(
                names.shard_manifest_prefix(shard),
                f"shard {shard} has no manifest, but {trace}: the store has lost it; restore it, or begin anew with "
                f"`tarryd give-up --shard {shard}`",
            )

    def topics_of(self, shard: int) -> list[str]:
        """Return the ids of the topics of which there are objects."""
        prefix = names.topics_prefix(shard)
        found = {entry.key.removeprefix(prefix).partition("/")[0] for entry in self._store.list(prefix)}
        return sorted(filter(names.is_topic_id, found))

    def heads_of(self, shard: int) -> Iterator[tuple[str, Head]]:
        """Yield the logs that had a section of the shard, and the last one of each."""
        for log_id in sorted(self._logs.log_ids()):
            head = self._heads(log_id).get(shard)
            if head is not None:
                yield log_id, head

    def _of(self, shard: int) -> Iterator[str]:
        for topic_id in self.topics_of(shard):
            yield f"there are objects of topic {names.topic_prefix(shard, topic_id)}"
        for entry in self._store.list(names.checkpoint_prefix(shard)):
            yield f"there is checkpoint {entry.key}"
        for beat in self._heartbeats():
            if shard in beat.shards:
                yield f"the heartbeat of daemon {beat.daemon_id} names it"
        for log_id, head in self.heads_of(shard):
            yield f"log {log_id} had its section {head.last_slot} of epoch {head.epoch}"

    def _heads(self, log_id: str) -> Heads:
        """Return the heads of the newest slot of a log that can be read."""
        slots = self._logs.log(log_id)
        try:
            for number in reversed(slots.numbers()):
                try:
                    found = log_fence.read_one(slots, number)
                except object_store.Damaged:
                    continue
                if found is not None:
                    return found.header.heads
            return {}
        finally:
            slots.close()
