"""Names of offloaded ledgers."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.deletions import ledger_metadata
from daemon.core.deletions.ledger_metadata import LEDGER_ID_MAX, OffloadedName, offloaded_name, parse
from storage_backends.object_store import check_key

U64 = st.integers(min_value=0, max_value=2**64 - 1)
NAME = OffloadedName(0x0123456789ABCDEF, 0xFEDCBA9876543210, 47)


def test_a_name_is_the_uuid_and_the_ledger() -> None:
    assert NAME.data == "01234567-89ab-cdef-fedc-ba9876543210-ledger-47"
    assert NAME.index == "01234567-89ab-cdef-fedc-ba9876543210-ledger-47-index"


@given(U64, U64, st.integers(min_value=0, max_value=LEDGER_ID_MAX))
def test_what_is_named_is_read_back_and_a_store_takes_it(uuid_msb: int, uuid_lsb: int, ledger_id: int) -> None:
    if uuid_msb == uuid_lsb == 0:
        uuid_lsb = 1
    name = offloaded_name(uuid_msb, uuid_lsb, ledger_id)
    assert parse(name.data) == parse(name.index) == name
    assert name.data.startswith(str(uuid.UUID(int=(uuid_msb << 64) | uuid_lsb)))
    check_key(name.index)


@pytest.mark.parametrize(
    "name",
    [
        "",
        NAME.data + "-",
        NAME.data + "-index-index",
        NAME.data + "-Index",
        NAME.data + "\n",
        " " + NAME.data,
        "prefix/" + NAME.data,
        NAME.data.upper(),
        NAME.data.replace("01234567-89ab", "0123456789ab"),
        NAME.data.replace("ledger-47", "ledger-047"),
        NAME.data.replace("ledger-47", "ledger--47"),
        NAME.data.replace("ledger-47", "ledger-"),
        NAME.data.replace("ledger-47", "ledger-٤٧"),
        NAME.data.replace("ledger-47", f"ledger-{LEDGER_ID_MAX + 1}"),
        NAME.data.replace("ledger-47", "ledger-99999999999999999999"),
        NAME.data.replace("0", "g"),
        "00000000-0000-0000-0000-000000000000-ledger-1",
    ],
)
def test_any_other_name_is_foreign(name: str) -> None:
    assert parse(name) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((0, 0, 1), "the UUID is absent"),
        ((1, 0, LEDGER_ID_MAX + 1), "ledger_id is 9223372036854775808, above"),
        ((1, 0, -1), "ledger_id is -1"),
    ],
)
def test_what_makes_no_name_is_refused(given: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ledger_metadata.offloaded_name(*given)
