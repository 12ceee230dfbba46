"""Whose a ledger is by its metadata, and whether that is what a record says."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.deletions import metadata
from daemon.core.deletions.metadata import Identity, identify, mismatch, topics_of
from storage_backends.formats.deletions import LedgerComponent, LedgerType, PendingDelete

TOPIC = "persistent://tenant/namespace/orders"
LEDGER = PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.LEDGER, 1)
CURSOR = PendingDelete(LedgerComponent.MANAGED_CURSOR, LedgerType.LEDGER, 1, cursor_name="billing")
SCHEMA = PendingDelete(LedgerComponent.SCHEMA_STORAGE, LedgerType.LEDGER, 1, schema_id="17")

# As PIP-186 prints them.
TABLES = {
    LEDGER: {
        "application": "pulsar",
        "component": "managed-ledger",
        "pulsar/managed-ledger": "tenant/namespace/persistent/orders",
    },
    CURSOR: {
        "application": "pulsar",
        "component": "managed-ledger",
        "pulsar/managed-ledger": "tenant/namespace/persistent/orders",
        "pulsar/cursor": "billing",
    },
    SCHEMA: {"application": "pulsar", "component": "schema", "pulsar/schemaId": "17"},
}
TOPICS = st.one_of(
    st.text(min_size=1, max_size=30),
    st.builds("persistent://{}/{}/{}".format, *[st.text("ab", min_size=1)] * 2, st.text(min_size=1, max_size=20)),
)


@pytest.mark.parametrize("delete", TABLES, ids=lambda delete: delete.component.name)
@pytest.mark.parametrize("found", TABLES.values(), ids=["ledger", "cursor", "schema"])
def test_each_component_matches_its_own_table_and_no_other(delete: PendingDelete, found: dict[str, str]) -> None:
    assert (mismatch(TOPIC, delete, found) is None) is (found == TABLES[delete])


@pytest.mark.parametrize("delete", TABLES, ids=lambda delete: delete.component.name)
def test_every_key_of_the_tables_counts_and_no_other_does(delete: PendingDelete) -> None:
    table = TABLES[delete]
    for key in metadata.KEYS:
        without = {name: value for name, value in table.items() if name != key}
        changed = mismatch(TOPIC, delete, {**table, key: f"{table.get(key, '')}x"})
        assert changed is not None
        assert key in changed
        for value in ("", "x", "null"):
            assert mismatch(TOPIC, delete, {**table, key: value}) is not None, (key, value)
        if key in table:
            assert mismatch(TOPIC, delete, without) == f"metadata {key} is absent, it must be {table[key]!r}"
    assert mismatch(TOPIC, delete, {**table, "pulsar/other": "x", "role": "y", "schemaid": "z"}) is None


def test_names_of_keys_are_compared_as_stores_keep_them() -> None:
    for delete, table in TABLES.items():
        for change in (str.lower, str.upper, lambda key: key.replace("/", "-"), lambda key: key.replace("/", "_")):
            assert mismatch(TOPIC, delete, {change(key): value for key, value in table.items()}) is None
    hidden = {**TABLES[LEDGER], "Pulsar-Cursor": "billing"}
    assert mismatch(TOPIC, LEDGER, hidden) == "metadata pulsar/cursor is 'billing', it must be absent"


def test_a_key_that_is_there_twice_is_not_believed() -> None:
    found = {**TABLES[CURSOR], "pulsar-cursor": "billing"}
    assert mismatch(TOPIC, CURSOR, found) == "metadata pulsar/cursor is there more than once"
    assert identify(found) is None


def test_values_are_compared_to_the_letter() -> None:
    for value in ("Pulsar", " pulsar", "pulsar ", "%70ulsar"):
        assert mismatch(TOPIC, LEDGER, {**TABLES[LEDGER], "application": value}) is not None
    for value in ("Billing", "billing%20", "b%69lling"):
        assert mismatch(TOPIC, CURSOR, {**TABLES[CURSOR], "pulsar/cursor": value}) is not None


@pytest.mark.parametrize(
    ("topic", "ledger"),
    [
        (TOPIC, "tenant/namespace/persistent/orders"),
        (TOPIC, TOPIC),
        ("tenant/namespace/persistent/orders", "tenant/namespace/persistent/orders"),
        ("persistent://t/n/a b+c", "t/n/persistent/a+b%2Bc"),
        ("persistent://t/n/a/b", "t/n/persistent/a%2Fb"),
        ("persistent://t/n/ü~", "t/n/persistent/%C3%BC%7E"),
        ("ü", "ü"),
        ("ü", "%C3%BC"),
        (" edge", "%20edge"),
        ("a b", "a b"),
        ("a\nb%", "a%0Ab%25"),
    ],
)
def test_a_topics_ledger_may_be_called_so(topic: str, ledger: str) -> None:
    assert mismatch(topic, LEDGER, {**TABLES[LEDGER], "pulsar/managed-ledger": ledger}) is None
    assert topic in topics_of(ledger)


@pytest.mark.parametrize(
    ("topic", "ledger"),
    [
        (TOPIC, "tenant/namespace/orders"),
        (TOPIC, "tenant/namespace/non-persistent/orders"),
        (TOPIC, "tenant/namespace/persistent/Orders"),
        (TOPIC, "tenant/namespace/persistent/%6Frders"),
        (TOPIC, ""),
        ("non-persistent://tenant/namespace/orders", "tenant/namespace/persistent/orders"),
        ("persistent://tenant/namespace/", "tenant/namespace/persistent/"),
        ("a b", "a%20b"),
        ("a%20b", "a b"),
        ("ü", "u"),
    ],
)
def test_and_not_so(topic: str, ledger: str) -> None:
    assert mismatch(topic, LEDGER, {**TABLES[LEDGER], "pulsar/managed-ledger": ledger}) is not None
    assert topic not in topics_of(ledger)


@given(st.text(min_size=1, max_size=40))
def test_a_local_name_is_encoded_as_forms_are(local: str) -> None:
    # Java's encoder keeps the asterisk and encodes the tilde.
    encoded = urllib.parse.quote_plus(local, safe="*").replace("~", "%7E")
    assert metadata.ledger_names(f"persistent://t/n/{local}")[0] == f"t/n/persistent/{encoded}"


@given(TOPICS)
def test_whatever_a_topics_ledger_is_called_the_topic_is_found_and_its_record_matches(topic: str) -> None:
    for ledger in metadata.ledger_names(topic):
        identity = identify({**TABLES[CURSOR], "pulsar/managed-ledger": ledger})
        assert identity is not None
        assert topic in identity.topics
        assert (identity.component, identity.cursor_name) == (LedgerComponent.MANAGED_CURSOR, "billing")
        for candidate in identity.topics:
            assert mismatch(candidate, CURSOR, {**TABLES[CURSOR], "pulsar/managed-ledger": ledger}) is None


def test_a_ledger_is_identified_with_the_likeliest_topic_first() -> None:
    assert identify(TABLES[LEDGER]) == Identity(
        (TOPIC, "tenant/namespace/persistent/orders"), LedgerComponent.MANAGED_LEDGER
    )
    cursor = {**TABLES[CURSOR], "pulsar/managed-ledger": "%C3%BC", "pulsar/cursor": "%C3%A4"}
    assert identify(cursor) == Identity(("ü", "%C3%BC"), LedgerComponent.MANAGED_CURSOR, "ä")


@pytest.mark.parametrize(
    "found",
    [
        {},
        TABLES[SCHEMA],
        {**TABLES[LEDGER], "application": "other"},
        {**TABLES[LEDGER], "component": "schema"},
        {**TABLES[LEDGER], "pulsar/schemaId": "17"},
        {**TABLES[LEDGER], "pulsar/managed-ledger": ""},
        {**TABLES[LEDGER], "pulsar/cursor": ""},
        {"application": "pulsar", "component": "managed-ledger"},
    ],
)
def test_what_does_not_say_whose_it_is_is_not_identified(found: dict[str, str]) -> None:
    assert identify(found) is None


def test_a_long_value_is_not_shown_whole() -> None:
    text = mismatch(TOPIC, LEDGER, {**TABLES[LEDGER], "component": "x" * 10_000})
    assert text is not None
    assert len(text) < 300
