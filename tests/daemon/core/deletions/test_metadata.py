"""Whose a ledger is by its metadata, and whether that is what a record says."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.deletions import ledger_metadata
from daemon.core.deletions.ledger_metadata import KEYS, LedgerIdentity, identify, mismatch, topic_of
from storage_backends.formats.deletion_format import LedgerComponent, LedgerType, PendingDelete
from storage_backends.object_store import check_metadata

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
    for key in ledger_metadata.KEYS:
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
        ("persistent://t/n/a b+c", "t/n/persistent/a+b%2Bc"),
        ("persistent://t/n/a b+c", "persistent://t/n/a b+c"),
        ("persistent://t/n/a/b", "t/n/persistent/a%2Fb"),
        ("persistent://t/n/ü~*", "t/n/persistent/%C3%BC%7E*"),
        ("persistent://100%/ü/x", "100%25/%C3%BC/persistent/x"),
        ("ü", "%C3%BC"),
        ("100%", "100%25"),
        ("100%25", "100%2525"),
        (" a b  ", "%20a b%20%20"),
        ("   ", "%20%20%20"),
        ("a\nb", "a%0Ab"),
        ("non-persistent://t/n/x", "non-persistent://t/n/x"),
        ("persistent://t/n", "persistent://t/n"),
    ],
)
def test_a_topics_ledger_may_be_called_so_in_an_object_store(topic: str, ledger: str) -> None:
    found = {**TABLES[LEDGER], "pulsar/managed-ledger": ledger}
    assert mismatch(topic, LEDGER, found) is None
    assert topic_of(ledger) == topic
    check_metadata({"name": ledger})


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
        ("persistent://t/n/ü", "t/n/persistent/%c3%bc"),
        ("persistent://t/n/a b", "t/n/persistent/a%20b"),
        ("a b", "a%20b"),
        ("a%20b", "a b"),
        ("100%", "100%"),
        ("ü", "u"),
        ("ü", "ü"),
    ],
)
def test_and_not_so(topic: str, ledger: str) -> None:
    assert mismatch(topic, LEDGER, {**TABLES[LEDGER], "pulsar/managed-ledger": ledger}) is not None
    assert topic_of(ledger) != topic


@pytest.mark.parametrize("ledger", ["100%", "%41", "%C3", "%c3%bc", " a", "ü", "\ud800", "t/n/persistent/%41", ""])
def test_a_name_that_nothing_is_stored_as_is_nobodys(ledger: str) -> None:
    assert identify({**TABLES[LEDGER], "pulsar/managed-ledger": ledger}) is None
    assert not ledger or identify({**TABLES[CURSOR], "pulsar/cursor": ledger}) is None


@given(st.text(min_size=1, max_size=40))
def test_a_local_name_is_encoded_as_forms_are(local: str) -> None:
    # Java's encoder keeps the asterisk and encodes the tilde.
    encoded = urllib.parse.quote_plus(local, safe="*").replace("~", "%7E")
    assert ledger_metadata.ledger_name(f"persistent://t/n/{local}") == f"t/n/persistent/{encoded}"


@given(TOPICS, TOPICS)
def test_no_two_topics_have_a_stored_ledger_name_in_common(one: str, other: str) -> None:
    """Given that none is called as Pulsar calls a ledger; such topics are not recorded."""
    for topic in (one, other):
        for ledger in ledger_metadata.stored_ledger_names(topic):
            if "/persistent/" not in topic:
                assert topic_of(ledger) == topic
            check_metadata({"name": ledger})
    if one != other and "/persistent/" not in one + other:
        assert not set(ledger_metadata.stored_ledger_names(one)) & set(ledger_metadata.stored_ledger_names(other))


@given(TOPICS, st.text(min_size=1, max_size=30))
def test_whoever_is_identified_has_a_record_that_matches(topic: str, cursor: str) -> None:
    delete = PendingDelete(LedgerComponent.MANAGED_CURSOR, LedgerType.LEDGER, 1, cursor_name=cursor)
    for ledger in ledger_metadata.stored_ledger_names(topic):
        found = {**TABLES[CURSOR], "pulsar/managed-ledger": ledger, "pulsar/cursor": ledger_metadata.as_stored(cursor)}
        assert mismatch(topic, delete, found) is None
        identity = identify(found)
        assert identity is not None
        assert (identity.component, identity.cursor_name) == (LedgerComponent.MANAGED_CURSOR, cursor)
        assert mismatch(identity.topic, delete, found) is None


def test_a_ledger_is_identified_by_topic_component_and_cursor() -> None:
    assert identify(TABLES[LEDGER]) == LedgerIdentity(TOPIC, LedgerComponent.MANAGED_LEDGER)
    assert identify({**TABLES[LEDGER], "pulsar/managed-ledger": TOPIC}) == LedgerIdentity(
        TOPIC, LedgerComponent.MANAGED_LEDGER
    )
    cursor = {**TABLES[CURSOR], "pulsar/managed-ledger": "%C3%BC", "pulsar/cursor": "%C3%A4"}
    assert identify(cursor) == LedgerIdentity("ü", LedgerComponent.MANAGED_CURSOR, "ä")


def test_where_nothing_is_encoded_names_are_as_they_are() -> None:
    cursor = PendingDelete(LedgerComponent.MANAGED_CURSOR, LedgerType.LEDGER, 1, cursor_name="100% ü")
    assert ledger_metadata.table("100% ü", cursor) == {
        "application": "pulsar",
        "component": "managed-ledger",
        "pulsar/managed-ledger": "100% ü",
        "pulsar/cursor": "100% ü",
        "pulsar/schemaId": None,
    }
    assert [dict.fromkeys(KEYS) | found for found in TABLES.values()] == [
        ledger_metadata.table(TOPIC, each) for each in TABLES
    ]


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
