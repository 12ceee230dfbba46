"""Judges names, positions, headers and settings of NATS, without asking NATS.

Contents: targets and other names, positions of the source, the size of a header block, and findings about a stream's
configuration as STREAM.INFO reports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tarry.positions import NatsStream1
from tarry_relay import port
from tarry_relay.port import Finding, Grade

CONTROL_LINE_MAX: Final = 4_096
"""Longest control line (bytes); the server closes a connection for good that sends a longer one"""
CONTROL_LINE_REST_MAX: Final = 128
"""Upper bound on a publish's control line without the subject: the reply subject and two sizes (bytes)"""
SUBJECT_BYTES_MAX: Final = CONTROL_LINE_MAX - CONTROL_LINE_REST_MAX
HEADERS_BYTES_MAX: Final = 65_535
"""Largest block of headers that JetStream stores (bytes)"""
NAME_BYTES_MAX: Final = 255
"""Longest name of a stream or a consumer (bytes)"""
ONCE_HEADER: Final = "Nats-Msg-Id"
_ONCE_HEADER_BYTES_MAX = 512
_LEDGER = 1
_OWN_WORDS = frozenset({"_INBOX", "_R_", "_GR_"})
"""First words of subjects on which NATS answers requests"""
_UNUSABLE_IN_SUBJECTS = re.compile(r"[\x00-\x20\x7f]")
"""Blanks end a subject for the server; other control characters break clients that read it"""
_UNUSABLE_IN_NAMES = re.compile(r"[\x00-\x20\x7f.*>/\\]")
_LISTED_MAX = 64


# Names


def target_fault(target: str) -> str:
    """Return the reason why no message can be published to a subject; empty if one can."""
    try:
        size = len(target.encode())
    except UnicodeEncodeError:
        return f"{_shown(target)} has a character that UTF-8 cannot encode"
    if size > SUBJECT_BYTES_MAX:
        return f"{_shown(target)} has {size} bytes; a subject has at most {SUBJECT_BYTES_MAX}"
    if _UNUSABLE_IN_SUBJECTS.search(target):
        return f"{_shown(target)} has a blank or a control character"
    if "\ufffd" in target:
        # It replaces unreadable bytes, so the name is not the one that was written.
        return f"{_shown(target)} has bytes that are no UTF-8"
    words = target.split(".")
    if "" in words:
        return f"{_shown(target)} has an empty word: a subject has no full stop at its ends, nor two together"
    if "*" in words or ">" in words:
        return f"{_shown(target)} has a wildcard, which subscribers use"
    if target.startswith("$") or words[0] in _OWN_WORDS:
        return f"{_shown(target)} is a subject that NATS itself uses"
    return ""


def name_fault(name: str, bytes_max: int = NAME_BYTES_MAX) -> str:
    """Return the reason why a text cannot be the name of a stream or a consumer; empty if it can."""
    if not name or _UNUSABLE_IN_NAMES.search(name):
        return f"{_shown(name)} is empty, or has a blank, a full stop, a wildcard or a slash"
    if len(name.encode()) > bytes_max:
        return f"{_shown(name)} has more than {bytes_max} bytes"
    return ""


def fits(subject: str, target: str) -> bool:
    """Return whether a stream's subject matches a target: `*` is one word, `>` one or more."""
    words, own = subject.split("."), target.split(".")
    if words[-1] == ">":
        words, own = words[:-1], own[: len(words) - 1] if len(own) >= len(words) else []
    return len(words) == len(own) and all(word in ("*", each) for word, each in zip(words, own, strict=True))


def examples(subjects: Iterable[str]) -> Sequence[str]:
    """Return targets that match these subjects of streams, with words in place of wildcards."""
    found = [
        re.sub(r"[*>]$", end, subject).replace("*", "any")
        for subject in subjects
        for end in ("any", "any.any" if subject.endswith(">") else "any")
    ]
    return list(dict.fromkeys(found))


# Positions


def position_of(text: str) -> tuple[int, int]:
    """Return the (ledger, entry) of a stream sequence, such as `17`. Raises BadPosition."""
    if not re.fullmatch(r"[1-9][0-9]{0,19}", text, re.ASCII) or int(text) >= 2**64:
        raise port.BadPosition(f"{text!r} is no stream sequence: a whole number from 1, as NATS answers a publish")
    (ledger,), (entry,) = NatsStream1.to_positions(int(text))
    return int(ledger), int(entry)


def position_fault(ledger_id: int, entry_id: int) -> str:
    """Return the reason why (ledger, entry) cannot be a position of a stream; empty if it can."""
    if ledger_id != _LEDGER:
        return f"ledger {ledger_id} does not exist; a NATS stream has only ledger {_LEDGER}"
    if not 1 <= entry_id < 2**64:
        return f"entry {entry_id} is no stream sequence, which is a whole number from 1"
    return ""


# Headers


def headers_fault(size: int) -> str:
    """Return the reason why headers of this size (bytes) do not fit next to the relay's own; empty if they do."""
    most = HEADERS_BYTES_MAX - port.OWN_HEADERS_BYTES_MAX - _ONCE_HEADER_BYTES_MAX
    return f"its headers have {size} bytes; next to those of the relay at most {most} fit" if size > most else ""


# Settings


def judge_source(stream: str, config: Mapping[str, Any]) -> Sequence[Finding]:
    """Judge by the stream's configuration whether the source can drop a payload before its delivery."""
    found = [_of_retention(stream, config), _of_size(stream, config), _of_subject_limit(stream, config)]
    if config.get("allow_rollup_hdrs"):
        goes = "any producer can purge it by a header Nats-Rollup; set allow_rollup_hdrs to false"
        found.append(Finding("rollup", Grade.WRONG, f"stream {stream}: allow_rollup_hdrs is on, so {goes}"))
    else:
        found.append(Finding("rollup", Grade.OK, f"stream {stream}: allow_rollup_hdrs is off"))
    found += [_of_ttl(stream, config), _of_direct_get(stream, config), *durability(f"stream {stream}:", config)]
    if config.get("sealed"):
        found.append(Finding("sealed", Grade.WARNING, f"stream {stream}: is sealed, so it takes no new messages"))
    if config.get("sources"):
        text = "has sources, whose sequences differ from its own; cancel-of and reschedule-of must name its own"
        found.append(Finding("sources", Grade.WARNING, f"stream {stream}: {text}"))
    if idle_s := _of_consumers(config, "inactive_threshold") / 1e9:
        text = "so without a relay for so long all of it is read again; unset it"
        found.append(
            Finding(
                "consumer", Grade.WARNING, f"stream {stream}: deletes consumers after {idle_s:g} s without use, {text}"
            )
        )
    return found


def max_ack_pending(config: Mapping[str, Any], wanted: int) -> int:
    """Return how many unacknowledged messages a consumer may hold: `wanted`, or fewer if the stream allows fewer."""
    most = _of_consumers(config, "max_ack_pending")
    return min(wanted, most) if most > 0 else wanted


def judge_target(subject: str, stream: str, config: Mapping[str, Any]) -> Finding:
    """Judge the stream that has a target."""
    what = f"subject {subject}: stream {stream}"
    if config.get("no_ack"):
        return Finding("target", Grade.WRONG, f"{what} has no_ack, so it confirms nothing; set no_ack to false")
    if config.get("allow_msg_counter"):
        return Finding("target", Grade.WRONG, f"{what} takes nothing but increments of counters; take another one")
    if config.get("sealed"):
        return Finding("target", Grade.WRONG, f"{what} is sealed, so it takes nothing; take another one")
    if config.get("retention") == "interest":
        dropped = "drops what no consumer waits for; take limits retention, or make consumers first"
        return Finding("target", Grade.WARNING, f"{what} has interest retention, so it {dropped}")
    window_s = _number(config, "duplicate_window") / 1e9
    if window_s <= 0:
        twice = "a message is published twice after a failure; set a duplicate_window longer than an outage may last"
        return Finding("target", Grade.WARNING, f"{what} has no duplicate_window, so {twice}")
    if unsafe := durability(what, config):
        return Finding("target", Grade.WARNING, unsafe[0].text)
    return Finding("target", Grade.OK, f"{what} drops for {window_s:g} s what it has")


def durability(what: str, config: Mapping[str, Any]) -> Sequence[Finding]:
    """Return a finding if messages that the stream confirmed can be lost with the server."""
    if config.get("storage") == "memory":
        text = f"{what} is in memory and is gone after a restart of its servers; take file storage"
        return [Finding("storage", Grade.WARNING, text)]
    if config.get("persist_mode") == "async":
        text = f"{what} confirms before it has written; set persist_mode to default"
        return [Finding("storage", Grade.WARNING, text)]
    return []


def _of_retention(stream: str, config: Mapping[str, Any]) -> Finding:
    retention = config.get("retention", "limits")
    if retention == "limits":
        return Finding("retention", Grade.OK, f"stream {stream}: retention is limits, so what is read stays")
    text = "so what is acknowledged is deleted before it is due; take a stream with retention limits"
    return Finding("retention", Grade.WRONG, f"stream {stream}: retention is {retention}, {text}")


def _of_size(stream: str, config: Mapping[str, Any]) -> Finding:
    limits = [f"{each} {_number(config, each)}" for each in ("max_msgs", "max_bytes") if _number(config, each) > 0]
    if not limits:
        return Finding("size", Grade.OK, f"stream {stream}: no limit by size")
    limit = " and ".join(limits)
    if config.get("discard", "old") == "new":
        return Finding("size", Grade.OK, f"stream {stream}: at {limit} it refuses new messages and keeps the old ones")
    text = "also those that are not due yet; unset it, or set discard to new"
    return Finding("size", Grade.WRONG, f"stream {stream}: at {limit} it drops its oldest messages, {text}")


def _of_subject_limit(stream: str, config: Mapping[str, Any]) -> Finding:
    most = _number(config, "max_msgs_per_subject")
    if most <= 0:
        return Finding("subject", Grade.OK, f"stream {stream}: no limit by subject")
    if config.get("discard", "old") == "new" and config.get("discard_new_per_subject"):
        text = f"at max_msgs_per_subject {most} it refuses new messages and keeps the old ones"
        return Finding("subject", Grade.OK, f"stream {stream}: {text}")
    text = "also those that are not due yet; unset it, or set discard to new and discard_new_per_subject"
    drops = f"at max_msgs_per_subject {most} it drops the oldest messages of a subject"
    return Finding("subject", Grade.WRONG, f"stream {stream}: {drops}, {text}")


def _of_ttl(stream: str, config: Mapping[str, Any]) -> Finding:
    if config.get("allow_msg_ttl"):
        goes = "so a producer's Nats-TTL can end a message before it is due; take a stream without it"
        return Finding("ttl", Grade.WRONG, f"stream {stream}: allow_msg_ttl is on, {goes}")
    if _number(config, "subject_delete_marker_ttl") > 0:
        goes = "so the server writes messages of its own that end; unset it"
        return Finding("ttl", Grade.WRONG, f"stream {stream}: subject_delete_marker_ttl is set, {goes}")
    return Finding("ttl", Grade.OK, f"stream {stream}: allow_msg_ttl is off")


def _of_direct_get(stream: str, config: Mapping[str, Any]) -> Finding:
    if config.get("allow_direct"):
        return Finding("direct get", Grade.OK, f"stream {stream}: allow_direct is on")
    text = "so each message that is due costs its leader more; set allow_direct to true"
    return Finding("direct get", Grade.WARNING, f"stream {stream}: allow_direct is off, {text}")


def _number(config: Mapping[str, Any], name: str) -> int:
    """Return a number of a configuration; 0 if it is not set."""
    return int(config.get(name) or 0)


def _of_consumers(config: Mapping[str, Any], name: str) -> int:
    return _number(config.get("consumer_limits") or {}, name)


def _shown(name: str) -> str:
    """Return a name as an error shows it, cut if it is long."""
    return repr(name) if len(name) <= _LISTED_MAX else f"{name[:_LISTED_MAX]!r}..."
