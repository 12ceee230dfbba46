"""The smallest manifest there can be, for tests of the commit primitive: a head and a list of words.

Owns: the manifest, its bytes, two operations, and what the tests of the primitive do with stores.
Does not own: anything of the product; the primitive must not know what it commits.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable

from storage_backends import commit
from storage_backends.formats.format_errors import FormatError
from storage_backends.formats.manifest import ManifestHead
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from tests._support.fault_store import Call, Decide, Fault, FaultStore
from tests._support.virtual_clock import VirtualClock

PREFIX = "shards/00/manifest/"
CRC_BYTES = 4
DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """`words`: one for each operation that was applied, in order."""

    head: ManifestHead
    words: tuple[str, ...] = ()


def encode(value: Words) -> bytes:
    head = {name: getattr(value.head, name) for name in ManifestHead.__slots__}
    head["previous_sha256"] = value.head.previous_sha256.hex()
    payload = json.dumps({"head": head, "words": value.words}).encode()
    return payload + zlib.crc32(payload).to_bytes(CRC_BYTES, "big")


def decode(data: bytes) -> Words:
    payload = data[:-CRC_BYTES]
    if zlib.crc32(payload).to_bytes(CRC_BYTES, "big") != data[-CRC_BYTES:]:
        raise FormatError("words", len(payload), "wrong CRC")
    fields = json.loads(payload)
    head = fields["head"]
    head["previous_sha256"] = bytes.fromhex(head["previous_sha256"])
    head["lineage"] = tuple(head["lineage"])
    return Words(ManifestHead(**head), tuple(fields["words"]))


CODEC = commit.Codec(encode=encode, decode=decode, with_head=lambda value, head: dataclasses.replace(value, head=head))


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Adds a word wherever it is applied: only the commit id keeps it from being applied twice."""

    word: str

    def precondition(self, tip: Words | None) -> str | None:
        return None

    def apply(self, tip: Words | None) -> Words:
        before = tip or Words(commit.NO_HEAD)
        return dataclasses.replace(before, words=(*before.words, self.word))

    def landed(self, tip: Words) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class AppendOnce:
    """Adds a word, and finds it again as an operation finds its object. Refused behind the word `after_not`."""

    word: str
    after_not: str = ""

    def precondition(self, tip: Words | None) -> str | None:
        return f"{self.after_not} is there" if tip is not None and self.after_not in tip.words else None

    def apply(self, tip: Words | None) -> Words:
        return Append(self.word).apply(tip)

    def landed(self, tip: Words) -> bool:
        return self.word in tip.words


def log_of(
    store: ObjectStore,
    clock: VirtualClock | None = None,
    *,
    name: str = "id",
    jitter: Callable[[], float] = lambda: 0.5,
    observer: commit.Observer | None = None,
) -> commit.ManifestLog[Words]:
    """A log whose commit ids are `name`-0, `name`-1 and so on."""
    clock = clock or VirtualClock()
    ids = (f"{name}-{number}" for number in itertools.count())
    return commit.ManifestLog(
        store,
        PREFIX,
        CODEC,
        monotonic=clock.now,
        sleep=clock.block,
        jitter=jitter,
        new_id=lambda: next(ids),
        observer=observer,
    )


def put(
    log: commit.ManifestLog[Words],
    operation: commit.Operation[Words],
    *,
    warm: commit.Tip[Words] | None = None,
    just_read: bool = False,
    deadline_s: float = 10.0,
) -> commit.Tip[Words]:
    return commit.commit(
        log, operation, writer="test", created_ms=5, warm=warm, just_read=just_read, deadline_s=deadline_s
    )


def stored(store: ObjectStore, number: int) -> Words:
    return decode(store.get(f"{PREFIX}{number:020d}"))


def newest(store: ObjectStore) -> Words:
    return decode(store.get(max(entry.key for entry in store.list(PREFIX))))


def key(number: int) -> str:
    return f"{PREFIX}{number:020d}"


def filled(count: int, store: ObjectStore | None = None, *, name: str = "before") -> ObjectStore:
    """A store with `count` more commits."""
    store = store or MemoryStore()
    log, tip = log_of(store, name=name), None
    for number in range(count):
        tip = put(log, Append(f"{name}-{number}"), warm=tip)
    return store


def operations(store: FaultStore) -> list[str]:
    return [call.operation for call in store.calls]


def at(operation: str, action: Callable[[], object], *, fault: Fault = Fault.NONE, nth: int = 1) -> Decide:
    """Runs `action` before the nth call of `operation` reaches the store; that call meets `fault`."""
    counts = itertools.count(1)

    def decide(call: Call) -> Fault:
        if call.operation == operation and next(counts) == nth:
            action()
            return fault
        return Fault.NONE

    return decide


def emptied_up_to_the_tip(inner: ObjectStore) -> None:
    """What garbage collection leaves a day later: five more manifests, and only the last of all."""
    filled(5, inner, name="later")
    for entry in sorted(inner.list(PREFIX), key=lambda entry: entry.key)[:-1]:
        inner.delete(entry.key)
