"""Judges names, messages, positions and settings by the rules of Redis. Pure: it asks nothing.

Its one importer is `redis_broker`; it stands alone so that its tables are tested without a server.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tarry
from tarry.positions import RedisSequences1
from tarry_relay import port
from tarry_relay.port import Finding, Grade

TARGET_BYTES_MAX = 1_024
"""Longest name of a target (bytes). Redis takes longer keys, but each published message keeps one for `once_s`."""
FIELDS_MAX = 524_000
"""Most fields of a message; Redis 6.2 takes 1,048,576 arguments in one command"""
RETRY_OWNER_PREFIX = "tarry-retry-of-"
"""Prefix of a retry log's groups that name the relays reading it"""
_ONCE = ":tarry-once:"
# Versions before `_ONCE` had keys such as `due:orders@0a1b2c3d:relay:0-1795773600000-1795773660000-0`.
_FORMER_ONCE = re.compile(r":.+@[0-9a-f]{8}:", re.DOTALL)
_OWN_FIELDS = b"tarry-"
_REPLACEMENT = "\ufffd"
_POLICY_OF_KEYS_WITH_TTL = "volatile-"
_SHOWN_MAX = 100


# Names


def once_key(target: str, once_id: str) -> str:
    """Return the key that remembers that a target has a message.

    It begins with the target, so that permissions for `<target>*` cover it. No target has such a name.
    """
    return f"{target}{_ONCE}{once_id}"


def former_once_key(target: str, once_id: str) -> str:
    """Return the key of versions before `_ONCE` for the same message."""
    return f"{target}:{once_id}"


def target_fault(target: str) -> str:
    """Return the reason why no target stream can have this name; empty if one can."""
    if not target:
        return "the name of a key must not be empty"
    try:
        length = len(target.encode())
    except UnicodeEncodeError:
        return "the name has a surrogate character, which UTF-8 cannot encode"
    if length > TARGET_BYTES_MAX:
        return f"the name has {length} bytes; it may have at most {TARGET_BYTES_MAX}"
    if _REPLACEMENT in target:
        return "the name is no UTF-8, or has the character U+FFFD, which stands for what is none"
    if _ONCE in target or _FORMER_ONCE.search(target):
        return "this is the name of a key by which a relay remembers what it has published"
    return ""


def position_fault(ledger_id: int, entry_id: int) -> str:
    """Return the reason why (ledger, entry) is no position of a stream; empty if it is one."""
    try:
        RedisSequences1.from_positions(ledger_id, entry_id)
    except tarry.InvalidArgument as error:
        return f"no entry of a stream has ledger {ledger_id} and entry {entry_id}: {error.message}"
    return ""


def position_of(text: str) -> tuple[int, int]:
    """Return the (ledger, entry) of an id, such as `1795773600000-0`. Raises BadPosition."""
    try:
        (ledger,), (entry,) = RedisSequences1.to_positions(text)
    except tarry.InvalidArgument:
        shown = repr(text) if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]!r}... ({len(text)} letters)"
        raise port.BadPosition(f"{shown} is no id of an entry, as XADD answers it: 1795773600000-0") from None
    return int(ledger), int(entry)


# Messages


def message_fault(fields: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the reason why a message with these fields cannot be published; empty if it can."""
    if len(fields) > FIELDS_MAX:
        return f"the message has {len(fields)} fields; Redis takes at most {FIELDS_MAX} besides those of the relay"
    return ""


def fields_of(outgoing: port.Outgoing) -> list[bytes]:
    """Return names and values in turn, as XADD takes them: the original's, then those of the relay.

    Fields of the original named `tarry-...` or like one of the relay's are left out.
    """
    own = {name.encode(errors="replace"): text.encode(errors="replace") for name, text in outgoing.own_headers.items()}
    flat: list[bytes] = []
    for name, value in () if outgoing.message is None else outgoing.message.body:
        if name not in own and not name.startswith(_OWN_FIELDS):
            flat += name, value
    for name, value in own.items():
        flat += name, value
    return flat


# Keys and settings


def finding_of_key(name: str, key: str, kind: str, *, is_made: bool = True) -> Finding:
    """Judge a key by its TYPE; with `is_made` the relay creates it if it is missing."""
    if kind == "stream":
        return Finding(name, Grade.OK, f"key {key}: is a stream")
    if kind != "none":
        text = f"key {key}: is a {kind}, not a stream; rename it, or take another name"
        return Finding(name, Grade.WRONG, text)
    if is_made:
        return Finding(name, Grade.OK, f"key {key}: does not exist; the relay creates it")
    return Finding(name, Grade.MISSING, f"key {key}: does not exist; its first XADD creates it")


def finding_of_ttl(name: str, key: str, pttl_ms: int, grade: Grade) -> Finding:
    """Judge the time that a key has left, by PTTL (ms; negative without a TTL); `grade` is that of a key with a TTL."""
    if pttl_ms < 0:
        return Finding(name, Grade.OK, f"key {key}: has no TTL")
    text = f"key {key}: expires in {pttl_ms} ms with everything in it; remove the TTL with PERSIST {key}"
    return Finding(name, grade, text)


def finding_of_eviction(key: str, policy: str | None) -> Finding:
    """Judge `maxmemory_policy` of INFO, which is None if Redis withholds it.

    Policies `volatile-...` evict only keys with a TTL. The source has none, or else `ttl` is wrong; but the keys that
    remember published messages have one.
    """
    advice = "set maxmemory-policy noeviction"
    if policy is None:
        text = f"key {key}: Redis withholds maxmemory_policy; allow INFO, and {advice}"
        return Finding("eviction", Grade.WARNING, text)
    if policy == "noeviction":
        return Finding("eviction", Grade.OK, f"key {key}: maxmemory_policy is noeviction")
    if policy.startswith(_POLICY_OF_KEYS_WITH_TTL):
        text = (
            f"key {key}: maxmemory_policy is {policy}, which does not evict it, since it has no TTL, but evicts what "
            f"the relay remembers of published messages, so that some are published twice; {advice}"
        )
        return Finding("eviction", Grade.WARNING, text)
    text = f"key {key}: maxmemory_policy is {policy}, which evicts it whole when memory is short; {advice}"
    return Finding("eviction", Grade.WRONG, text)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """An entry that was uncommitted at the look before, by id, with its present state."""

    entry_id: str
    exists: bool
    is_pending: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The state of the source and of the relay's group, as ids; empty if there is none."""

    first: str
    """First entry of the stream"""
    delivered: str
    """Last entry that the group has read"""
    lowest_pending: str
    """Lowest entry that is read and not committed, even if the stream has dropped it"""
    samples: Sequence[Sample] = ()


def finding_of_size(key: str, look: Look | None) -> Finding:
    """Judge whether entries disappear before they are committed; `look` is None if the relay's group does not exist.

    Redis does not report how producers trim a stream (`MAXLEN`, `MINID` of XADD), so only a loss shows it. A loss since
    the look before is wrong, once, because the next look has other samples. A loss before the first look is a warning.
    """
    advice = "trim nothing that is not delivered, or set source.accept = ['size']"
    if look is None:
        return Finding("size", Grade.OK, f"key {key}: no relay has read it yet")
    for sample in look.samples:
        is_owed = sample.is_pending or numbers(sample.entry_id) > numbers(look.delivered)
        if sample.exists or not is_owed:
            continue
        if not look.first or numbers(sample.entry_id) < numbers(look.first):
            begin = look.first or "its end"
            text = f"key {key}: was trimmed up to {begin}, beyond {sample.entry_id}, which was not committed"
            return Finding("size", Grade.WRONG, f"{text}; {advice}")
        text = f"key {key}: {sample.entry_id} was deleted before the relay had committed it"
        return Finding("size", Grade.WARNING, f"{text}; {advice}")
    if look.lowest_pending and (not look.first or numbers(look.lowest_pending) < numbers(look.first)):
        text = (
            f"key {key}: begins at {look.first or 'its end'}, and {look.lowest_pending} is read and not committed; "
            "what is gone becomes a dead letter"
        )
        return Finding("size", Grade.WARNING, f"{text}; {advice}")
    return Finding("size", Grade.OK, f"key {key}: nothing is known to have gone before it was committed")


def findings_of_server(info: Mapping[str, Any] | None, appendfsync: str | None) -> list[Finding]:
    """Judge durability and role by INFO and by CONFIG GET appendfsync; None means that Redis withholds it."""
    if info is None:
        text = "Redis refuses INFO, so it is unknown if a crash loses entries; allow INFO"
        return [Finding("durability", Grade.WARNING, text)]
    found = [_finding_of_durability(info.get("aof_enabled"), appendfsync)]
    # Redis 7 and later also check it for scripts.
    if "min_slaves_good_slaves" in info and _major(info) < 7:
        text = (
            f"min-replicas-to-write is set, and Redis {info.get('redis_version')} does not heed it in scripts, as the "
            "relay publishes; take Redis 7 or later"
        )
        found.append(Finding("durability", Grade.WARNING, text))
    if info.get("role") == "slave":
        text = "the server is a replica, which takes no messages; name the primary in broker.url"
        found.append(Finding("role", Grade.WARNING, text))
    if info.get("cluster_enabled"):
        text = "the server is part of a cluster, which the relay does not support; take a single server"
        found.append(Finding("cluster", Grade.WRONG, text))
    return found


def finding_of_retry_owners(key: str, groups: Collection[str], own: str) -> Finding | None:
    """Judge whose retry log it is, by the names of its groups; return None if no other relay reads it.

    `own` is the group of this relay.
    """
    others = sorted(each for each in groups if each.startswith(RETRY_OWNER_PREFIX) and each != own)
    if not others:
        return None
    text = (
        f"key {key}: is the retry log of another relay.topic or subscription, too, by its group {others[0]}; give each "
        f"a retry log of its own, or, if that relay is gone, do XGROUP DESTROY {key} {others[0]}"
    )
    return Finding("retry", Grade.WRONG, text)


def numbers(entry_id: str) -> tuple[int, int]:
    """Return (ms, sequence number), which sorts ids in the order of their stream."""
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence)


def _finding_of_durability(aof_enabled: Any, appendfsync: str | None) -> Finding:
    advice = "a crash may lose the last entries; set appendonly yes and appendfsync always"
    if aof_enabled is None:
        return Finding("durability", Grade.WARNING, f"INFO has no aof_enabled: {advice}")
    if not aof_enabled:
        return Finding("durability", Grade.WARNING, f"appendonly is no: {advice}")
    if appendfsync is None:
        text = f"appendonly is yes, and CONFIG GET appendfsync is refused: {advice}"
        return Finding("durability", Grade.WARNING, text)
    if appendfsync != "always":
        return Finding("durability", Grade.WARNING, f"appendfsync is {appendfsync}: {advice}")
    return Finding("durability", Grade.OK, "appendonly is yes, appendfsync is always")


def _major(info: Mapping[str, Any]) -> int:
    first = str(info.get("redis_version", "")).partition(".")[0]
    return int(first) if first.isdecimal() else 0
