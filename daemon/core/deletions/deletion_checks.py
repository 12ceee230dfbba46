"""Checks whether a delete may be recorded, as far as its fields show without any store.

A store may still find it MALFORMED.
"""

from __future__ import annotations

import itertools

from daemon.errors import InvalidArgument
from storage_backends.formats.deletion_format import LedgerComponent, LedgerType, OffloadContext, PendingDelete

# Deletes in one request
DELETES_MAX = 1_000
CURSOR_NAME_BYTES_MAX = 255
SCHEMA_ID_BYTES_MAX = 1_024
DRIVER_NAME_BYTES_MAX = 255
DRIVER_PROPERTIES_MAX = 64
DRIVER_PROPERTY_NAME_BYTES_MAX = 128
DRIVER_PROPERTY_VALUE_BYTES_MAX = 1_024
# Limit on all names and values together: every record has its own in each checkpoint.
DRIVER_METADATA_BYTES_MAX = 4_096
_U64_MAX = (1 << 64) - 1


def check_topic(topic: str) -> None:
    """Raise InvalidArgument for a topic that is named as its ledgers are.

    It has another name; with two names it could be in use under one and be deleted under the other.
    """
    parts = topic.split("/", 3)
    if "://" not in topic and len(parts) == 4 and parts[2] == "persistent":
        name = f"persistent://{parts[0]}/{parts[1]}/{parts[3]}"
        raise InvalidArgument(f"topic is {topic!r}, as its ledgers are named; it must be {name!r}")


def check_pending_delete(delete: PendingDelete) -> None:
    """Raise InvalidArgument with the field, its value and what it must be (PIP-186, PendingDeleteLedgerInfo)."""
    _check_number("ledger_id", delete.ledger_id)
    _check_only_of("cursor_name", delete.cursor_name, delete.component, LedgerComponent.MANAGED_CURSOR)
    _check_only_of("schema_id", delete.schema_id, delete.component, LedgerComponent.SCHEMA_STORAGE)
    _check_text("cursor_name", delete.cursor_name, CURSOR_NAME_BYTES_MAX)
    _check_text("schema_id", delete.schema_id, SCHEMA_ID_BYTES_MAX)
    _check_only_of("offload_context", delete.offload_context, delete.ledger_type, LedgerType.OFFLOADED_LEDGER)
    if delete.offload_context is not None:
        _check_offload_context(delete.offload_context)


def _check_offload_context(context: OffloadContext) -> None:
    _check_number("offload_context.uuid_msb", context.uuid_msb)
    _check_number("offload_context.uuid_lsb", context.uuid_lsb)
    if not (context.uuid_msb or context.uuid_lsb):
        raise InvalidArgument("offload_context.uuid_msb and uuid_lsb are 0; one of them must not be")
    _check_text("offload_context.driver_name", context.driver_name, DRIVER_NAME_BYTES_MAX)
    properties = context.driver_metadata
    if len(properties) > DRIVER_PROPERTIES_MAX:
        raise InvalidArgument(
            f"offload_context.driver_metadata has {len(properties)} properties; it may have {DRIVER_PROPERTIES_MAX}"
        )
    total_bytes = 0
    for name, value in properties:
        _check_text("a name of offload_context.driver_metadata", name, DRIVER_PROPERTY_NAME_BYTES_MAX)
        size_bytes = len(value.encode())
        if size_bytes > DRIVER_PROPERTY_VALUE_BYTES_MAX:
            raise InvalidArgument(
                f"offload_context.driver_metadata[{name!r}] has {size_bytes} bytes; it may have "
                f"{DRIVER_PROPERTY_VALUE_BYTES_MAX}"
            )
        total_bytes += len(name.encode()) + size_bytes
    if total_bytes > DRIVER_METADATA_BYTES_MAX:
        raise InvalidArgument(
            f"offload_context.driver_metadata has {total_bytes} bytes; it may have {DRIVER_METADATA_BYTES_MAX}"
        )
    names = [name for name, _ in properties]
    if any(first >= second for first, second in itertools.pairwise(names)):
        raise InvalidArgument("offload_context.driver_metadata does not ascend by name, or has a name twice")


def _check_only_of(
    field: str, value: object, kind: LedgerComponent | LedgerType, owner: LedgerComponent | LedgerType
) -> None:
    """Check that the field is given for one kind of delete and no other."""
    if kind is owner and (value is None or value == ""):
        raise InvalidArgument(f"{field} is missing; {owner.name} must have one")
    if kind is not owner and value is not None:
        shown = f"is {value!r}" if isinstance(value, str) else "is given"
        raise InvalidArgument(f"{field} {shown}; {kind.name} must have none")


def _check_text(field: str, text: str | None, bytes_max: int) -> None:
    if text is None:
        return
    size_bytes = len(text.encode())
    if not 1 <= size_bytes <= bytes_max:
        raise InvalidArgument(f"{field} has {size_bytes} bytes; it must have 1 to {bytes_max}")


def _check_number(field: str, number: int) -> None:
    if not 0 <= number <= _U64_MAX:
        raise InvalidArgument(f"{field} is {number}; it must be 0 to {_U64_MAX}")
