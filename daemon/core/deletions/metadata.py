"""What the metadata of a ledger has to say for a record of it to be believed (PIP-186, its three tables of metadata).

Owns: the keys, what each component's must be, the comparison, and whose a ledger is by its metadata.
Does not own: where metadata is read (`daemon.ledger_stores`).

    component        application  component       pulsar/managed-ledger  pulsar/cursor  pulsar/schemaId
    MANAGED_LEDGER   pulsar       managed-ledger  name of the topic      absent         absent
    MANAGED_CURSOR   pulsar       managed-ledger  name of the topic      the cursor's   absent
    SCHEMA_STORAGE   pulsar       schema          absent                 absent         the schema's

All five keys are compared, also those that must be absent: nothing else tells a cursor's ledger from a topic's. Other
keys are nobody's business here. Stores do not keep names of keys as they are (S3 knows neither `/` nor upper case), so
names are compared by what `normalised` makes of them. Nor do they keep every character of a value: a name that is not
printable ASCII may stand percent-encoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from storage_backends.formats.deletions import LedgerComponent, PendingDelete

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
_PRINTABLE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_ENCODED: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
# Pulsar: what a topic is called, and what its ledger is called. Parts between slashes are not empty.
_PERSISTENT_TOPIC: Final = re.compile(r"persistent://([^/]+)/([^/]+)/(.+)", re.DOTALL)
_PERSISTENT_LEDGER: Final = re.compile(r"([^/]+)/([^/]+)/persistent/([^/]+)")


def expected(topic: str, delete: PendingDelete) -> dict[str, tuple[str, ...]]:
    """For each of `KEYS` the values that it may have; none: it must be absent."""
    accepted: dict[str, tuple[str, ...]] = dict.fromkeys(KEYS, ())
    accepted[APPLICATION_KEY] = (APPLICATION,)
    accepted[COMPONENT_KEY] = (COMPONENTS[delete.component],)
    if delete.component is LedgerComponent.SCHEMA_STORAGE:
        accepted[SCHEMA_ID_KEY] = _as_stored(delete.schema_id or "")
        return accepted
    accepted[MANAGED_LEDGER_KEY] = ledger_names(topic)
    if delete.component is LedgerComponent.MANAGED_CURSOR:
        accepted[CURSOR_KEY] = _as_stored(delete.cursor_name or "")
    return accepted


def mismatch(topic: str, delete: PendingDelete, metadata: Mapping[str, str]) -> str | None:
    """The first difference, for people; None where the metadata is what the record says."""
    found = _normalised_metadata(metadata)
    for key, accepted in expected(topic, delete).items():
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
class Identity:
    """Whose a ledger is. `topics`: names that the topic may have, at least one; a record of each of them matches."""

    topics: tuple[str, ...]
    component: LedgerComponent
    cursor_name: str | None = None


def identify(metadata: Mapping[str, str]) -> Identity | None:
    """Whose the ledger is; None where that cannot be told: the metadata is not as above, or a schema's, which names no
    topic."""
    found = _normalised_metadata(metadata)
    read = {key: found.get(normalised(key), ()) for key in KEYS}
    ledger, cursor = read[MANAGED_LEDGER_KEY], read[CURSOR_KEY]
    if read[APPLICATION_KEY] != (APPLICATION,) or read[SCHEMA_ID_KEY] or len(ledger) != 1 or len(cursor) > 1:
        return None
    component = LedgerComponent.MANAGED_CURSOR if cursor else LedgerComponent.MANAGED_LEDGER
    if read[COMPONENT_KEY] != (COMPONENTS[component],) or not ledger[0] or "" in cursor:
        return None
    return Identity(topics_of(ledger[0]), component, _as_named(cursor[0]) if cursor else None)


def ledger_names(topic: str) -> tuple[str, ...]:
    """What a topic's ledger may be called: Pulsar's name of it where the topic is one of Pulsar's, the topic's own."""
    pulsar = _PERSISTENT_TOPIC.fullmatch(topic)
    if pulsar is None:
        return _as_stored(topic)
    tenant, namespace, local = pulsar.groups()
    return (*_as_stored(f"{tenant}/{namespace}/persistent/{_url_encoded(local)}"), *_as_stored(topic))


def topics_of(ledger_name: str) -> tuple[str, ...]:
    """Topics whose ledger may be called so, the likeliest first."""
    plain = _as_named(ledger_name)
    topics = [plain]
    pulsar = _PERSISTENT_LEDGER.fullmatch(plain)
    if pulsar is not None:
        tenant, namespace, local = pulsar.groups()
        topics.insert(0, f"persistent://{tenant}/{namespace}/{_percent_decoded(local.replace('+', ' '))}")
    return tuple(topic for topic in dict.fromkeys((*topics, ledger_name)) if ledger_name in ledger_names(topic))


def normalised(key: str) -> str:
    """Lower case, and one hyphen for each run of what is neither letter nor digit."""
    return _OTHER.sub("-", key.lower())


def _normalised_metadata(metadata: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for key, value in metadata.items():
        name = normalised(key)
        found[name] = (*found.get(name, ()), value)
    return found


def _as_stored(name: str) -> tuple[str, ...]:
    """What may stand for the name in metadata: itself, and where a store could not keep that, percent-encoded."""
    encoded = _storable(name)
    return (name,) if encoded == name else (name, encoded)


def _as_named(value: str) -> str:
    """The name for which `value` stands."""
    name = _percent_decoded(value)
    return name if name != value and _storable(name) == value else value


def _storable(name: str) -> str:
    """The name, or where it is not printable ASCII, with `%` and what is not in that percent-encoded."""
    if _PRINTABLE.fullmatch(name) is not None:
        return name
    return "".join(chr(byte) if 0x21 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in name.encode())


def _url_encoded(name: str) -> str:
    """As forms are encoded, and as Java does it: a blank is `+`."""
    return "".join(
        chr(byte)
        if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "*-._")
        else "+"
        if byte == 0x20
        else f"%{byte:02X}"
        for byte in name.encode()
    )


def _percent_decoded(text: str) -> str:
    """The text itself where its bytes are not UTF-8."""
    decoded = _ENCODED.sub(lambda found: bytes([int(found[1], 16)]), text.encode("utf-8", "surrogateescape"))
    try:
        return decoded.decode()
    except UnicodeDecodeError:
        return text


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_MAX else f"{value[:_SHOWN_MAX]}...")
