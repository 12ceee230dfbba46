"""Checks the metadata of an offloaded ledger, and makes and parses the names of its objects (PIP-186).

A record is believed only if the metadata agrees (PIP-186, its three tables of metadata):

    component        application  component       pulsar/managed-ledger  pulsar/cursor  pulsar/schemaId
    MANAGED_LEDGER   pulsar       managed-ledger  name of the topic      absent         absent
    MANAGED_CURSOR   pulsar       managed-ledger  name of the topic      the cursor's   absent
    SCHEMA_STORAGE   pulsar       schema          absent                 absent         the schema's

All five keys are compared, even those that must be absent: nothing else distinguishes a cursor's ledger from a topic's
one. Other keys are ignored. The topic's ledger has Pulsar's name, `t/n/persistent/<x, URL-encoded>` of
`persistent://t/n/x`. Any other topic's ledger has the topic's own name; an object store may use that for Pulsar's
topics, too.

Object stores do not keep everything. Names of keys are compared in the form of `normalised`, since S3 allows neither
`/` nor upper case. Values are percent-encoded (`as_stored`) if they are not printable ASCII. Ledger names of two topics
never coincide, since no topic may be named as Pulsar names a ledger (`deletion_checks`). So metadata names one topic or
none.

An offloaded ledger is two objects: `<uuid>-ledger-<id>`, its data, and the same with `-index`. The prefix of the store
precedes these names (`storage_backends`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from storage_backends.formats.deletion_format import LedgerComponent, PendingDelete

APPLICATION_KEY: Final = "application"
COMPONENT_KEY: Final = "component"
MANAGED_LEDGER_KEY: Final = "pulsar/managed-ledger"
CURSOR_KEY: Final = "pulsar/cursor"
SCHEMA_ID_KEY: Final = "pulsar/schemaId"
KEYS: Final = (APPLICATION_KEY, COMPONENT_KEY, MANAGED_LEDGER_KEY, CURSOR_KEY, SCHEMA_ID_KEY)

APPLICATION: Final = "pulsar"
COMPONENTS: Final[Mapping[LedgerComponent, str]] = MappingProxyType(
    {
        LedgerComponent.MANAGED_LEDGER: "managed-ledger",
        LedgerComponent.MANAGED_CURSOR: "managed-ledger",
        LedgerComponent.SCHEMA_STORAGE: "schema",
    }
)

_SHOWN_MAX: Final = 200
_OTHER: Final = re.compile(r"[^a-z0-9]+")
_ENCODED: Final = re.compile(rb"%([0-9A-F]{2})")
_UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789*-._")
_RESERVED: Final = re.compile(r"[^A-Za-z0-9*._-]")
# Pulsar's names of a topic and of its ledger. Parts between slashes are not empty.
_PERSISTENT_TOPIC: Final = re.compile(r"persistent://([^/]+)/([^/]+)/(.+)", re.DOTALL)
_PERSISTENT_LEDGER: Final = re.compile(r"([^/]+)/([^/]+)/persistent/([^/]+)")


def table(topic: str, delete: PendingDelete) -> dict[str, str | None]:
    """Return the metadata of a ledger before encoding: the value of each of `KEYS`, None if it is absent."""
    values: dict[str, str | None] = dict.fromkeys(KEYS)
    values[APPLICATION_KEY] = APPLICATION
    values[COMPONENT_KEY] = COMPONENTS[delete.component]
    if delete.component is LedgerComponent.SCHEMA_STORAGE:
        values[SCHEMA_ID_KEY] = delete.schema_id or ""
        return values
    values[MANAGED_LEDGER_KEY] = ledger_name(topic)
    if delete.component is LedgerComponent.MANAGED_CURSOR:
        values[CURSOR_KEY] = delete.cursor_name or ""
    return values


def mismatch(topic: str, delete: PendingDelete, metadata: Mapping[str, str]) -> str | None:
    """Return a message with the first difference between an object's metadata and its record, or None."""
    found = _normalised_metadata(metadata)
    for key, value in table(topic, delete).items():
        if key == MANAGED_LEDGER_KEY and value is not None:
            accepted = stored_ledger_names(topic)
        else:
            accepted = () if value is None else (as_stored(value),)
        values = found.get(normalised(key), ())
        if len(values) > 1:
            return f"metadata {key} is there more than once"
        if not accepted and values:
            return f"metadata {key} is {_shown(values[0])}, it must be absent"
        if accepted and not values:
            return f"metadata {key} is absent, it must be {_shown(accepted[0])}"
        if accepted and values[0] not in accepted:
            return f"metadata {key} is {_shown(values[0])}, it must be {_shown(accepted[0])}"
    return None


@dataclass(frozen=True, slots=True)
class LedgerIdentity:
    """The owner of an object. A record with this identity matches the object."""

    topic: str
    component: LedgerComponent
    cursor_name: str | None = None


def identify(metadata: Mapping[str, str]) -> LedgerIdentity | None:
    """Return the owner of the object, or None if it is unknown.

    It is unknown if the metadata does not follow the table, and for a schema, which names no topic.
    """
    found = _normalised_metadata(metadata)
    read = {key: found.get(normalised(key), ()) for key in KEYS}
    ledger, cursor = read[MANAGED_LEDGER_KEY], read[CURSOR_KEY]
    if read[APPLICATION_KEY] != (APPLICATION,) or read[SCHEMA_ID_KEY] or len(ledger) != 1 or len(cursor) > 1:
        return None
    component = LedgerComponent.MANAGED_CURSOR if cursor else LedgerComponent.MANAGED_LEDGER
    topic, cursor_name = topic_of(ledger[0]), _as_named(cursor[0]) if cursor else None
    if read[COMPONENT_KEY] != (COMPONENTS[component],) or not topic or (cursor and not cursor_name):
        return None
    return LedgerIdentity(topic, component, cursor_name)


def ledger_name(topic: str) -> str:
    """Return the name of a topic's ledger: Pulsar's if the topic is one of Pulsar's, else the topic's own."""
    pulsar = _PERSISTENT_TOPIC.fullmatch(topic)
    if pulsar is None:
        return topic
    tenant, namespace, local = pulsar.groups()
    return f"{tenant}/{namespace}/persistent/{_url_encoded(local)}"


def stored_ledger_names(topic: str) -> tuple[str, ...]:
    """Return the possible names of a topic's ledger in an object store, the likeliest first; they are unique to it."""
    pulsar = _PERSISTENT_TOPIC.fullmatch(topic)
    if pulsar is None:
        return (as_stored(topic),)
    tenant, namespace, local = pulsar.groups()
    return f"{as_stored(tenant)}/{as_stored(namespace)}/persistent/{_url_encoded(local)}", as_stored(topic)


def topic_of(stored_ledger_name: str) -> str | None:
    """Return the topic whose ledger has this name in an object store, or None."""
    topic = _as_named(stored_ledger_name)
    pulsar = _PERSISTENT_LEDGER.fullmatch(stored_ledger_name)
    if pulsar is not None:
        tenant, namespace = _percent_decoded(pulsar[1]), _percent_decoded(pulsar[2])
        local = _percent_decoded(pulsar[3].replace("+", " "))
        topic = f"persistent://{tenant}/{namespace}/{local}"
    return topic if topic is not None and stored_ledger_name in stored_ledger_names(topic) else None


def as_stored(name: str) -> str:
    """Return printable ASCII that stands for this name only.

    `%`, blanks at either end, and anything but printable ASCII are percent-encoded.
    """
    inner = name.strip(" ")
    # Nearly every name takes this path, and each attempt has several.
    if len(inner) == len(name) and name.isascii() and name.isprintable() and "%" not in name:
        return name
    left = len(name) - len(name.lstrip(" "))
    encoded = "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in inner.encode())
    return f"{'%20' * left}{encoded}{'%20' * (len(name) - left - len(inner))}"


def normalised(key: str) -> str:
    """Return the key in lower case, with one hyphen for each run of other characters than letters and digits."""
    return _OTHER.sub("-", key.lower())


def _normalised_metadata(metadata: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for key, value in metadata.items():
        name = normalised(key)
        found[name] = (*found.get(name, ()), value)
    return found


def _as_named(stored: str) -> str | None:
    """Return the name that a stored form stands for, or None."""
    name = _percent_decoded(stored)
    return name if as_stored(name) == stored else None


def _url_encoded(name: str) -> str:
    """Encode a name as forms are encoded, the way Java does it: a blank is `+`."""
    if _RESERVED.search(name) is None:
        return name
    return "".join(
        chr(byte) if byte in _UNRESERVED else "+" if byte == 0x20 else f"%{byte:02X}" for byte in name.encode()
    )


def _percent_decoded(text: str) -> str:
    """Decode percent-encoding. Invalid UTF-8 becomes characters that would be encoded differently."""
    return _ENCODED.sub(lambda found: bytes([int(found[1], 16)]), text.encode(errors="replace")).decode(
        errors="replace"
    )


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_MAX else f"{value[:_SHOWN_MAX]}...")


LEDGER_ID_MAX: Final = (1 << 63) - 1
"""The systems that make the names have signed ids, and a negative one makes no name."""

INDEX_SUFFIX: Final = "-index"

_NAME: Final = re.compile(
    r"([0-9a-f]{8})-([0-9a-f]{4})-([0-9a-f]{4})-([0-9a-f]{4})-([0-9a-f]{12})-ledger-(0|[1-9][0-9]{0,18})(-index)?"
)


@dataclass(frozen=True, slots=True, order=True)
class OffloadedName:
    """The offloaded ledger that a name stands for. Halves of the UUID are u64, as in the records."""

    uuid_msb: int
    uuid_lsb: int
    ledger_id: int

    @property
    def data(self) -> str:
        return f"{uuid_text(self.uuid_msb, self.uuid_lsb)}-ledger-{self.ledger_id}"

    @property
    def index(self) -> str:
        return self.data + INDEX_SUFFIX


def offloaded_name(uuid_msb: int, uuid_lsb: int, ledger_id: int) -> OffloadedName:
    """Build a name. Raise ValueError if there is no UUID, or the id is above `LEDGER_ID_MAX`."""
    if not uuid_msb and not uuid_lsb:
        raise ValueError("the UUID is absent: its halves are 0")
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise ValueError(f"ledger_id is {ledger_id}, above {LEDGER_ID_MAX}: it makes no name of an object")
    return OffloadedName(uuid_msb, uuid_lsb, ledger_id)


def parse(name: str) -> OffloadedName | None:
    """Return the ledger whose data or index has this name; None for any other name, however similar."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    digits = "".join(found.group(1, 2, 3, 4, 5))
    try:
        return offloaded_name(int(digits[:16], 16), int(digits[16:], 16), int(found[6]))
    except ValueError:
        return None


def uuid_text(uuid_msb: int, uuid_lsb: int) -> str:
    """Write a UUID in the text form of RFC 9562, in lower case."""
    digits = f"{uuid_msb:016x}{uuid_lsb:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
