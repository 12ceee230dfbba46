"""The table of Pulsar's tests is whole, and each test that it names is there."""

from __future__ import annotations

from tests.peers import table
from tests.peers.entries import Standing

# How many tests each section of Pulsar's has, as they were counted.
COUNTED = {
    "4.1": 3,
    "4.5a": 11,
    "4.5b": 5,
    "4.5c": 9,
    "5": 17,
    "9.1": 7,
    "9.3": 36,
    "9.4": 4,
    "9.5": 3,
    "9.7": 5,
    "9.8": 9,
}


def test_each_test_of_pulsar_is_listed_once() -> None:
    assert {section.title.split()[0]: len(section.peers) for section in table.SECTIONS} == COUNTED
    names = [peer.name for peer in table.peers()]
    assert len(set(names)) == len(names)


def test_each_test_that_the_table_names_is_there() -> None:
    assert not table.missing({test for peer in table.peers() for test in peer.tests})


def test_a_test_that_is_not_there_is_missed() -> None:
    module = "tests.peers.test_table"
    absent = [f"{module}:test_that_was_renamed", "tests.peers.test_no_module:test_anything"]
    assert table.missing([f"{module}:test_a_test_that_is_not_there_is_missed", *absent]) == absent


def test_each_entry_has_a_test_and_says_why_where_it_differs() -> None:
    for peer in table.peers():
        assert peer.tests, peer.name
        assert peer.note or peer.standing is Standing.HERE, f"{peer.name} says no reason"
