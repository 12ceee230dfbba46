"""Names the objects of a root: one function for each line of the layout.

A manifest refers to an object by its key. No code relies on the order of keys.

    FORMAT                                                      created once
    daemons/<daemon-id>                                         heartbeat
    logs/<log-id>/<number>                                      a slot of the log of a daemon, where slots are objects
    shards/<ss>/manifest/<number>
    shards/<ss>/checkpoint/<base>-<unique>
    shards/<ss>/topics/<topic-id>/manifest/<number>
    shards/<ss>/topics/<topic-id>/buckets/<base>-<unique>
    shards/<ss>/topics/<topic-id>/progress/<base>-<unique>
    shards/<ss>/topics/<topic-id>/properties/<base>-<unique>
    dead_objects/<key>                                          an object that could not be deleted
    hints/merged/<ss>-<topic-id>                                a process that owns nothing may have merged there
    hints/merged-changed                                        changes after such hints
    probe/passed                                                the server has passed the long probe
    probe/<unique>/<trial>                                      of a probe that is running or was killed

Numbers have 20 digits, shards at least 2. `base` is the manifest number an object was started from; `unique` (a ULID)
makes its name its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence

import google_crc32c

from storage_backends.formats import format_errors

FORMAT_KEY = "FORMAT"
DAEMONS_PREFIX = "daemons/"
LOGS_PREFIX = "logs/"
_DEAD_OBJECTS_PREFIX = "dead_objects/"
MERGE_HINTS_PREFIX = "hints/merged/"
MERGE_HINTS_CHANGED_KEY = "hints/merged-changed"
PROBE_PASS_KEY = "probe/passed"
_TOPIC_ID_HASH_BYTES = 20
_TOPIC_ID = re.compile(r"[a-z2-7]{32}")
_MERGE_HINT = re.compile(rf"{MERGE_HINTS_PREFIX}(\d{{2,}})-({_TOPIC_ID.pattern})")
_NUMBERED = re.compile(r"([0-9]{20})(?:-[0-9A-Za-z_-]+)?")
_NAME_MAX = 200
_DAEMON_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
NUMBER_MAX = (1 << 63) - 1
"""The highest number of a manifest, a slot, a section, an epoch or an incarnation: the next ones fit into 64 bits."""


def topic_id(topic: str) -> str:
    """Return the url-safe name of a topic in keys.

    It is base32, lower case, of the first 20 bytes of the SHA-256 of its UTF-8 name; 32 characters.
    """
    digest = hashlib.sha256(topic.encode()).digest()[:_TOPIC_ID_HASH_BYTES]
    return base64.b32encode(digest).decode("ascii").lower()


def is_topic_id(name: str) -> bool:
    """Return whether `topic_id` can return this name."""
    return _TOPIC_ID.fullmatch(name) is not None


def shard_of(topic: str, shards: int) -> int:
    """Return the shard of a topic: CRC32C of its UTF-8 name, modulo the number of shards of the root."""
    return int(google_crc32c.value(topic.encode())) % shards


def daemon_key(daemon_id: str) -> str:
    return f"{DAEMONS_PREFIX}{daemon_id}"


def log_prefix(log_id: str) -> str:
    return f"{LOGS_PREFIX}{log_id}/"


def log_slot_key(log_id: str, number: int) -> str:
    """Return the key of a slot of a log; for logs in files it names the slot for people."""
    return numbered_key(log_prefix(log_id), number)


def shard_prefix(shard: int) -> str:
    return f"shards/{shard:02d}/"


def shard_manifest_prefix(shard: int) -> str:
    return f"{shard_prefix(shard)}manifest/"


def shard_manifest_key(shard: int, number: int) -> str:
    return numbered_key(shard_manifest_prefix(shard), number)


def checkpoint_prefix(shard: int) -> str:
    return f"{shard_prefix(shard)}checkpoint/"


def checkpoint_key(shard: int, base: int, unique: str) -> str:
    return f"{numbered_key(checkpoint_prefix(shard), base)}-{unique}"


def topics_prefix(shard: int) -> str:
    return f"{shard_prefix(shard)}topics/"


def topic_prefix(shard: int, topic_id: str) -> str:
    return f"{topics_prefix(shard)}{topic_id}/"


def topic_manifest_prefix(shard: int, topic_id: str) -> str:
    return f"{topic_prefix(shard, topic_id)}manifest/"


def topic_manifest_key(shard: int, topic_id: str, number: int) -> str:
    return numbered_key(topic_manifest_prefix(shard, topic_id), number)


def buckets_prefix(shard: int, topic_id: str) -> str:
    return f"{topic_prefix(shard, topic_id)}buckets/"


def bucket_key(shard: int, topic_id: str, base: int, unique: str) -> str:
    return f"{numbered_key(buckets_prefix(shard, topic_id), base)}-{unique}"


def progress_prefix(shard: int, topic_id: str) -> str:
    return f"{topic_prefix(shard, topic_id)}progress/"


def progress_key(shard: int, topic_id: str, base: int, unique: str) -> str:
    return f"{numbered_key(progress_prefix(shard, topic_id), base)}-{unique}"


def properties_prefix(shard: int, topic_id: str) -> str:
    return f"{topic_prefix(shard, topic_id)}properties/"


def properties_key(shard: int, topic_id: str, base: int, unique: str) -> str:
    return f"{numbered_key(properties_prefix(shard, topic_id), base)}-{unique}"


def dead_objects_prefix() -> str:
    return _DEAD_OBJECTS_PREFIX


def dead_object_key(object_name: str) -> str:
    """Return the key of the record that the object of that key was given up."""
    return f"{_DEAD_OBJECTS_PREFIX}{object_name}"


def probe_prefix(unique: str) -> str:
    """Return the key above the objects of one probe, without a slash at its end."""
    return f"probe/{unique}"


def merge_hint_key(shard: int, topic_id: str) -> str:
    return f"{MERGE_HINTS_PREFIX}{shard:02d}-{topic_id}"


def merge_hint_of(key: str) -> tuple[int, str]:
    """Return the shard and the topic id of a hint. Raises FormatError if the key is not of this layout."""
    match = _MERGE_HINT.fullmatch(key)
    if match is None or merge_hint_key(int(match[1]), match[2]) != key:
        raise format_errors.FormatError(f"key {key!r}", 0, f"it is not {MERGE_HINTS_PREFIX}<ss>-<topic-id>")
    return int(match[1]), match[2]


def numbered_key(prefix: str, number: int) -> str:
    return f"{prefix}{number:020d}"


def number_of(key: str) -> int:
    """Return the number in the last part of a key: that of a manifest or slot, or the base of another object.

    Raises FormatError if the key is not of this layout.
    """
    start = key.rfind("/") + 1
    match = _NUMBERED.fullmatch(key, start)
    if match is None or int(match[1]) > NUMBER_MAX:
        raise format_errors.FormatError(
            f"key {key!r}", start, f"its last part is not a number of 20 digits, {NUMBER_MAX} at most"
        )
    return int(match[1])


def number_in(prefix: str, key: str) -> int | None:
    """Return the number of the manifest or log slot with this key, or None if none beneath `prefix` has such a key."""
    digits = key.removeprefix(prefix)
    match = _NUMBERED.fullmatch(digits)
    number = 0 if match is None else int(match[1])
    return number if 0 < number <= NUMBER_MAX and key == numbered_key(prefix, number) else None


def is_daemon_id(name: str) -> bool:
    """Return whether a daemon can have this id: it is one part of a key."""
    return _DAEMON_ID.fullmatch(name) is not None


def is_object(key: str, base: int, prefixes: Sequence[str]) -> bool:
    """Return whether it is the key of an object with this base, beneath one of the prefixes."""
    prefix, _, name = key.rpartition("/")
    match = _NUMBERED.fullmatch(name)
    return match is not None and int(match[1]) == base and len(name) <= _NAME_MAX and f"{prefix}/" in prefixes


def topic_id_of(key: str) -> str:
    """Return the topic id in the key of an object of a topic. Raises FormatError if the key is not of this layout."""
    parts = key.split("/")
    if len(parts) < 5 or parts[0] != "shards" or parts[2] != "topics" or not is_topic_id(parts[3]):
        raise format_errors.FormatError(f"key {key!r}", 0, "it does not begin with shards/<ss>/topics/<topic-id>/")
    return parts[3]
