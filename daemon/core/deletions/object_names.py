"""Names of the two objects that an offloaded ledger is: `<uuid>-ledger-<id>`, its data, and the same with `-index`.

Owns: making and reading the names.
Does not own: the store's prefix, which stands before them (`storage_backends`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

LEDGER_ID_MAX: Final = (1 << 63) - 1
"""Ids are signed where the names come from, and a negative one makes no name."""

INDEX_SUFFIX: Final = "-index"

_NAME: Final = re.compile(
    r"([0-9a-f]{8})-([0-9a-f]{4})-([0-9a-f]{4})-([0-9a-f]{4})-([0-9a-f]{12})-ledger-(0|[1-9][0-9]{0,18})(-index)?"
)


@dataclass(frozen=True, slots=True, order=True)
class OffloadedName:
    """Which offloaded ledger a name is of. Halves of the UUID: u64, as the records have them."""

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
    """Raises `ValueError` where these make no name: no UUID, or an id above `LEDGER_ID_MAX`."""
    if not uuid_msb and not uuid_lsb:
        raise ValueError("the UUID is absent: its halves are 0")
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise ValueError(f"ledger_id is {ledger_id}, above {LEDGER_ID_MAX}: it makes no name of an object")
    return OffloadedName(uuid_msb, uuid_lsb, ledger_id)


def parse(name: str) -> OffloadedName | None:
    """The ledger whose data or index has this name; None for any other name, however near."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    digits = "".join(found.group(1, 2, 3, 4, 5))
    try:
        return offloaded_name(int(digits[:16], 16), int(digits[16:], 16), int(found[6]))
    except ValueError:
        return None


def uuid_text(uuid_msb: int, uuid_lsb: int) -> str:
    """Writes a UUID in the text form of RFC 9562, in lower case."""
    digits = f"{uuid_msb:016x}{uuid_lsb:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
