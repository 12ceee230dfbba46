"""Judges users' input for Kafka: names, positions, sizes, and the settings of a source.

Contents: `topic_fault`, `target_fault`, `position_of`, `position_fault`, `message_fault`; `findings_of_source`,
`finding_of_clock`, `kept_ms`, `finding_of_retry_readers`. Nothing here asks a broker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from tarry_relay import port
from tarry_relay.port import Finding, Grade

PARTITION_MAX = 2**31 - 1
OFFSET_MAX = 2**63 - 1
MESSAGE_BYTES_MAX = 500_000_000
"""Largest message of the client (bytes); a topic's own limit is lower, and the broker reports it"""
_NAME_LETTERS_MAX = 249
_NO_LETTER_OF_A_NAME = re.compile(r"[^a-zA-Z0-9._-]", re.ASCII)
_KAFKAS_OWN = "__"
_RETRY_READER = "tarry-relay reads the failures of topic "
"""Beginning of the metadata of a retry log's committed offsets; the topic follows"""
_POSITION = re.compile(r"(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,18})", re.ASCII)


def header_key(name: str) -> str:
    """Return a header's name in lower case."""
    return name.lower()


def topic_fault(name: str) -> str:
    """Return the reason why no topic can have this name; empty if one can."""
    if not name:
        return "it is empty"
    if (strange := _NO_LETTER_OF_A_NAME.search(name)) is not None:
        return f"it has {strange[0]!r}; a topic's name has a to z, A to Z, 0 to 9, '.', '_' and '-' only"
    if len(name) > _NAME_LETTERS_MAX:
        return f"it has {len(name):,} letters; a topic's name has {_NAME_LETTERS_MAX} at most"
    return "no topic can be named '.' or '..'" if name in (".", "..") else ""


def target_fault(name: str) -> str:
    """Return the reason why a name cannot be a target; empty if it can."""
    if name.startswith(_KAFKAS_OWN) and not topic_fault(name):
        return f"it begins with {_KAFKAS_OWN!r}, as the topics that Kafka keeps for itself do"
    return topic_fault(name)


def position_of(text: str) -> tuple[int, int]:
    """Return the (partition, offset) that a text such as `3-17` names. Raises BadPosition."""
    found = _POSITION.fullmatch(text)
    if found is None or position_fault(int(found[1]), int(found[2])):
        raise port.BadPosition(f"{text!r} is no partition and offset, as Kafka answers a publish: 3-17")
    return int(found[1]), int(found[2])


def position_fault(ledger_id: int, entry_id: int) -> str:
    """Return the reason why (ledger, entry) cannot be a (partition, offset); empty if it can."""
    if not 0 <= ledger_id <= PARTITION_MAX:
        return f"ledger is {ledger_id}; a partition of Kafka is 0 to {PARTITION_MAX}"
    if not 0 <= entry_id <= OFFSET_MAX:
        return f"entry is {entry_id}; an offset of Kafka is 0 to {OFFSET_MAX}"
    return ""


def message_fault(size: int, *, has_headers: bool) -> str:
    """Return the reason why a message of this size (bytes) cannot be published; empty if it can.

    The size excludes the relay's headers. `has_headers` is False if its headers cannot be read.
    """
    if not has_headers:
        return "the name of a header is no UTF-8, so its headers cannot be read"
    if size + port.OWN_HEADERS_BYTES_MAX > MESSAGE_BYTES_MAX:
        return f"it has {size:,} bytes; with the headers of the relay {MESSAGE_BYTES_MAX:,} are too many for the client"
    return ""


def findings_of_source(topic: str, settings: Mapping[str, str]) -> Sequence[Finding]:
    """Judge whether a topic with these settings can drop a payload before its delivery, or its latest messages."""
    policy = settings.get("cleanup.policy", "")
    text = f"topic {topic}: cleanup.policy is {policy or 'empty'}"
    if "compact" in policy:
        lost = f"{text}, which drops what waits when its key comes again; set cleanup.policy to delete"
        compaction = Finding("compaction", Grade.WRONG, lost)
    else:
        compaction = Finding("compaction", Grade.OK, text)
    return compaction, _finding_of_size(topic, settings), _finding_of_elections(topic, settings)


def _finding_of_size(topic: str, settings: Mapping[str, str]) -> Finding:
    size = _number(settings, "retention.bytes")
    if size is None:
        unknown = f"topic {topic}: retention.bytes is unknown; make sure that it is -1"
        return Finding("size", Grade.WARNING, unknown)
    text = f"topic {topic}: retention.bytes is {size}"
    if size >= 0:
        lost = f"{text}, so the oldest goes beyond it, also what waits; set it to -1"
        return Finding("size", Grade.WRONG, lost)
    return Finding("size", Grade.OK, f"{text}, so nothing goes by size")


def _finding_of_elections(topic: str, settings: Mapping[str, str]) -> Finding:
    name = "unclean.leader.election.enable"
    text = f"topic {topic}: {name} is {settings.get(name) or 'unknown'}"
    if settings.get(name) == "false":
        return Finding("elections", Grade.OK, text)
    lost = f"{text}, so it may lose its end and give its offsets again; set it to false"
    return Finding("elections", Grade.WARNING, lost)


def finding_of_clock(topic: str, settings: Mapping[str, str]) -> Finding:
    """Report whose clock sets the start of the delays of a topic's messages."""
    clock = "the broker" if settings.get("message.timestamp.type") == "LogAppendTime" else "the producer"
    return Finding("clock", Grade.OK, f"topic {topic}: delays count from the time that {clock} has given")


def retry_reader(topic: str) -> str:
    """Return the metadata of offsets that a relay with this topic commits of its retry log."""
    return f"{_RETRY_READER}{topic}"


def finding_of_retry_readers(
    retry: str, committed: Mapping[str, Collection[str]], own_group: str, topic: str
) -> Finding | None:
    """Judge whose retry log it is; return None if no other relay reads it.

    `committed` maps a group to the metadata of its offsets. `own_group` and `topic` are those of this relay.
    """
    own = own_group, retry_reader(topic)
    readers = {(group, text) for group, texts in committed.items() for text in texts if text.startswith(_RETRY_READER)}
    others = sorted(readers - {own})
    if not others:
        return None
    group, text = others[0]
    told = (
        f"topic {retry}: a relay with topic {text.removeprefix(_RETRY_READER)} reads it, too, by its group {group}, so "
        "failures go to the wrong relay; give each relay a retry log of its own, or, if that relay is gone, do "
        f"kafka-consumer-groups.sh --reset-offsets --to-current --execute --topic {retry} --group {group}"
    )
    return Finding("retry", Grade.WRONG, told)


def kept_ms(settings: Mapping[str, str]) -> int | None:
    """Return how long a topic with these settings keeps a message (ms), or None for no limit of age."""
    ms = _number(settings, "retention.ms")
    return None if ms is None or ms < 0 else ms


def _number(settings: Mapping[str, str], name: str) -> int | None:
    """Return a whole number, or None if the broker does not report it."""
    try:
        return int(settings.get(name, ""))
    except ValueError:
        return None
