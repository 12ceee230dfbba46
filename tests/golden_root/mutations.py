"""Mutations of one object of a root: what the store, a disk or a forger may do to it.

Owns: which object, and what becomes of it. Does not own: what a daemon makes of that (`test_mutated_roots`).

A forged object has the right checksums and says something else: one field of its message, or of the header of a slot.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf import message as protobuf

from storage_backends.formats import checkpoint_format, framing, log_slot_format, manifest, slot_format
from storage_backends.formats.generated import checkpoint_pb2, journal_pb2, manifest_pb2
from storage_backends.memory_store import MemoryStore

FLIP, TRUNCATE, DELETE, SWAP, FORGE, FOREIGN = HOW = ("flip", "truncate", "delete", "swap", "forge", "foreign")
LOG_SLOT = "log slot"
KINDS: dict[str, Callable[[list[str]], bool]] = {
    "shard manifest": lambda parts: parts[0] == "shards" and parts[2] == "manifest",
    "checkpoint": lambda parts: parts[0] == "shards" and parts[2] == "checkpoint",
    "topic manifest": lambda parts: parts[0] == "shards" and parts[4:5] == ["manifest"],
    "bucket": lambda parts: parts[0] == "shards" and parts[4:5] == ["buckets"],
    "progress": lambda parts: parts[0] == "shards" and parts[4:5] == ["progress"],
    "properties": lambda parts: parts[0] == "shards" and parts[4:5] == ["properties"],
    LOG_SLOT: lambda parts: parts[0] == "logs",
    "heartbeat": lambda parts: parts[0] == "daemons",
    "dead object": lambda parts: parts[0] == "dead_objects",
    "merge hint": lambda parts: parts[0] == "hints",
}
MESSAGES: dict[bytes, type[protobuf.Message]] = {
    manifest.SHARD_MAGIC: manifest_pb2.ShardManifest,
    manifest.TOPIC_MAGIC: manifest_pb2.TopicManifest,
    manifest.PROGRESS_MAGIC: manifest_pb2.Progress,
    manifest.PROPERTIES_MAGIC: manifest_pb2.Properties,
    manifest.DEAD_OBJECT_MAGIC: manifest_pb2.DeadObject,
    checkpoint_format.MAGIC: checkpoint_pb2.Checkpoint,
}
NUMBERS = (0, 1, 2, 1 << 31, (1 << 32) - 1, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
TEXTS = ("", "x", "..", "../../x", "a/b", "\x00", "é" * 60, "0" * 26, "9" * 20, "x" * 3_000)
# magic, version, kind, 0, log id, number, entries, bytes of the writer; then an entry
_LOG_SLOT_HEAD = struct.Struct("<4sHBB26sQIH")
_ENTRY = struct.Struct("<IQQIII")
_SECTION_CRC_AT = slot_format.HEADER_BYTES - 4


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """What was done to one object. `detail` says which field or byte."""

    kind: str
    how: str
    key: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.how} of {self.kind} {self.key} {self.detail}"

    @property
    def shard(self) -> int | None:
        """The shard that the object belongs to, or None if it is one of all."""
        parts = self.key.split("/")
        return int(parts[1]) if parts[0] == "shards" else None

    @property
    def topic_id(self) -> str | None:
        parts = self.key.split("/")
        return parts[3] if parts[0] == "shards" and parts[2] == "topics" else None


def kind_of(key: str) -> str | None:
    return next((kind for kind, holds in KINDS.items() if holds(key.split("/"))), None)


def mutate(store: MemoryStore, draw: random.Random, kind: str, how: str) -> Mutation | None:
    """Mutate an object of this kind, most often a newest one; None if there is none, or nothing can be done to it."""
    needs_bytes = how in (FLIP, TRUNCATE, FORGE)
    keys = sorted(
        each.key for each in store.list("") if kind_of(each.key) == kind and (each.size_bytes or not needs_bytes)
    )
    newest = sorted({key.rpartition("/")[0]: key for key in keys}.values())
    if not keys:
        return None
    key = draw.choice(newest if draw.random() < 0.8 else keys)
    body, metadata = store.get_with_metadata(key)
    made, detail = body, ""
    if how == DELETE:
        store.delete(key)
        return Mutation(kind, how, key)
    if how == FOREIGN:
        folder = key.rpartition("/")[0]
        key = f"{folder}/{draw.choice(('notes.txt', '9' * 20, '0' * 19 + '7/x', '1', 'x' * 200))}"
        made, metadata = draw.choice((b"", b"nonsense", body)), {}
    elif how == FLIP:
        place = draw.randrange(8 * len(body))
        made = bytes(each ^ (1 << place % 8 if number == place // 8 else 0) for number, each in enumerate(body))
        detail = f"bit {place}"
    elif how == TRUNCATE:
        length = draw.randrange(len(body))
        made, detail = body[:length], f"to {length} of {len(body)} bytes"
    elif how == SWAP:
        other = draw.choice([each for each in keys if each != key] or [key])
        made, detail = store.get(other), f"with {other}"
    else:
        # Not every change of a field is one.
        tries = (forged(body, draw) for _ in range(20))
        made, detail = next((each for each in tries if each[0] != body), (body, ""))
    if made == body and how != FOREIGN:
        return None
    store.put(key, made, metadata=metadata)
    return Mutation(kind, how, key, detail)


def forged(body: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Another body with the right checksums, and what is different in it; the same body if nothing can be."""
    if body.startswith(log_slot_format.MAGIC):
        return _forged_slot(body, draw)
    if body[:4] not in MESSAGES:
        return _forged_json(body, draw) if body.startswith(b"{") else (body, "")
    message = MESSAGES[body[:4]]()
    message.ParseFromString(body[framing.HEADER_BYTES : -4])
    detail = _change(message, draw)
    return framing.frame(body[:4], int.from_bytes(body[4:8], "little"), message.SerializePartialToString()), detail


def _forged_slot(body: bytes, draw: random.Random) -> tuple[bytes, str]:
    slot = log_slot_format.decode_log_slot(body)
    head = list(_LOG_SLOT_HEAD.unpack_from(body))
    begin = log_slot_format.HEADER_BYTES + head[7]
    end = begin + _ENTRY.size * head[6]
    entries = [list(entry) for entry in _ENTRY.iter_unpack(body[begin:end])]
    writer, sections = body[log_slot_format.HEADER_BYTES : begin], body[end:]
    if slot.shards and draw.random() < 0.5:
        shard = draw.choice(slot.shards)
        bodies = {each: slot.section(each) for each in slot.shards}
        message = journal_pb2.Slot()
        message.ParseFromString(bodies[shard][slot_format.HEADER_BYTES :])
        detail = f"section of shard {shard}: {_change(message, draw)}"
        payload = message.SerializePartialToString()
        fixed = bodies[shard][:_SECTION_CRC_AT]
        fixed = fixed[:-8] + len(payload).to_bytes(8, "little")
        bodies[shard] = fixed + framing.crc32c(fixed, payload).to_bytes(4, "little") + payload
        return log_slot_format.encode_log_slot(slot.header, bodies), detail
    fields = [(head, 5, "number"), (head, 2, "kind")]
    fields += [(each, place, f"entry of shard {each[0]}: {place}") for each in entries for place in range(6)]
    of, place, detail = draw.choice(fields)
    most = (1 << 8, 1 << 64, 1 << 32)[0 if of is head and place == 2 else 1 if of is head or place in (1, 2) else 2]
    of[place] = draw.choice((*NUMBERS, of[place] + 1)) % most
    fixed, table = _LOG_SLOT_HEAD.pack(*head), b"".join(_ENTRY.pack(*each) for each in entries)
    crc32c = framing.crc32c(fixed, writer, table).to_bytes(4, "little")
    return b"".join((fixed, crc32c, writer, table, sections)), f"{detail} is {of[place]}"


def _forged_json(body: bytes, draw: random.Random) -> tuple[bytes, str]:
    place = draw.choice([number for number, each in enumerate(body) if chr(each).isdigit()] or [0])
    made = body[:place] + draw.choice((b"18446744073709551616", b"-1", b"null", b'"x"', b"1")) + body[place + 1 :]
    return made, f"byte {place}"


def _change(message: Any, draw: random.Random) -> str:
    """Change one field of the message, or of a message in it, and say which."""
    places = [*_places(message, type(message).__name__)]
    if not places:
        return ""
    of, field, index, path = draw.choice(places)
    value = getattr(of, field.name) if index is None else getattr(of, field.name)[index]
    made = _other(field, value, draw)
    try:
        if index is None:
            setattr(of, field.name, made)
        else:
            getattr(of, field.name)[index] = made
    except (ValueError, TypeError):
        return ""
    return f"{path} is {made!r:.80}"


def _places(message: Any, path: str) -> Any:
    for field, value in message.ListFields():
        many = value if field.is_repeated else [value]
        for index, each in enumerate(many):
            here = f"{path}.{field.name}" + (f"[{index}]" if field.is_repeated else "")
            if field.message_type is not None:
                yield from _places(each, here)
            else:
                yield message, field, index if field.is_repeated else None, here


def _other(field: Any, value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((*NUMBERS, value + 1, value - 1))
    if isinstance(value, float):
        return draw.choice((0.0, -1.0, float("nan"), float("inf")))
    if isinstance(value, str):
        return draw.choice((*TEXTS, value + "x", value[:-1]))
    return draw.choice((b"", value[:-1], value + b"x", bytes(len(value)), draw.randbytes(len(value))))
