"""The tip of a sequence of manifests: found with few requests, never an older one, never a damaged one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from storage_backends import commit
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Damaged, StoreUnavailable
from tests._support.fault_store import FaultStore
from tests._support.virtual_clock import VirtualClock
from tests.storage_backends._support.small_manifest import (
    DAY_S,
    PREFIX,
    Append,
    Words,
    at,
    emptied_up_to_the_tip,
    encode,
    filled,
    key,
    log_of,
    operations,
    put,
    stored,
)

# ---- reading the tip


def test_a_cold_read_lists_and_gets_once() -> None:
    store = FaultStore(filled(5))
    tip = log_of(store).read_tip()
    assert tip is not None
    assert tip.number == 5
    assert operations(store) == ["list", "get_with_metadata"]


def test_there_is_no_tip_before_the_first_manifest() -> None:
    assert log_of(MemoryStore()).read_tip() is None


@pytest.mark.parametrize(("behind", "calls"), [(0, ["get"]), (1, ["get"] * 2), (3, ["get"] * 4)])
def test_a_warm_read_probes_the_numbers_behind_the_known_tip(behind: int, calls: list[str]) -> None:
    inner = filled(2)
    store = FaultStore(inner)
    log = log_of(store)
    warm = log.read_tip()
    filled(behind, inner, name="later")
    before = len(store.calls)
    tip = log.read_tip(warm)
    assert tip is not None
    assert tip.number == 2 + behind
    assert [each.removesuffix("_with_metadata") for each in operations(store)[before:]] == calls


def test_a_warm_read_lists_when_four_numbers_behind_the_known_tip_are_there() -> None:
    inner = filled(2)
    store = FaultStore(inner)
    log = log_of(store)
    warm = log.read_tip()
    filled(9, inner, name="later")
    tip = log.read_tip(warm)
    assert tip is not None
    assert tip.number == 11
    assert operations(store)[2:] == ["get_with_metadata"] * commit.PROBES_MAX + ["list", "get_with_metadata"]


def test_a_tip_that_was_read_half_a_day_ago_is_not_probed_behind() -> None:
    store, clock = filled(2), VirtualClock()
    log = log_of(store, clock)
    warm = log.read_tip()
    clock.now_s += DAY_S
    emptied_up_to_the_tip(store)
    tip = log.read_tip(warm)
    assert tip is not None
    assert tip.number == 7


def test_a_probe_that_a_long_pause_interrupts_is_not_believed() -> None:
    inner, clock = filled(2), VirtualClock()

    def pause() -> None:
        clock.now_s += DAY_S
        emptied_up_to_the_tip(inner)

    warm = log_of(inner, clock).read_tip()
    tip = log_of(FaultStore(inner, at("get_with_metadata", pause)), clock).read_tip(warm)
    assert tip is not None
    assert tip.number == 7


def test_a_manifest_collected_between_listing_and_reading_is_listed_again() -> None:
    inner = filled(2)
    store = FaultStore(inner, at("get_with_metadata", lambda: emptied_up_to_the_tip(inner)))
    tip = log_of(store).read_tip()
    assert tip is not None
    assert tip.number == 7
    assert operations(store) == ["list", "get_with_metadata"] * 2


def test_a_store_that_lists_what_it_does_not_have_is_an_error_and_no_endless_loop() -> None:
    class Forgetful(MemoryStore):
        def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
            return MemoryStore().get_with_metadata(key)

    store = Forgetful()
    store.put(key(3), b"")
    with pytest.raises(StoreUnavailable, match=f"{key(3)}: it is the last one listed"):
        log_of(store).read_tip()


def test_the_time_of_a_tip_is_when_its_read_was_sent() -> None:
    clock = VirtualClock(50.0)
    inner = filled(1)

    def slow() -> None:
        clock.now_s += 7

    assert (tip := log_of(FaultStore(inner, at("list", slow)), clock).read_tip()) is not None
    assert tip.read_at == 50.0
    assert (tip := log_of(FaultStore(inner, at("get_with_metadata", slow)), clock).read_tip(tip)) is not None
    assert tip.read_at == 57.0
    assert put(log_of(FaultStore(inner, at("put_if_absent", slow)), clock), Append("a"), warm=tip).read_at == 64.0


# ---- damage


def test_a_damaged_tip_is_named_with_its_offset_and_no_older_one_is_taken() -> None:
    store = filled(3)
    body = bytearray(store.get(key(3)))
    body[4] ^= 1
    store.put(key(3), bytes(body))
    for act in (lambda log: log.read_tip(), lambda log: put(log, Append("a"))):
        with pytest.raises(Damaged, match=f"{key(3)}: words is damaged at byte {len(body) - 4}: wrong CRC"):
            act(log_of(store))
    assert len(list(store.list(PREFIX))) == 3


def test_a_manifest_under_another_number_is_damage() -> None:
    store = filled(2)
    store.put(key(3), store.get(key(2)))
    with pytest.raises(Damaged, match="it says that its number is 2"):
        log_of(store).read_tip()


@pytest.mark.parametrize("name", ["notes.txt", f"{7:020d}-x", "7", "9" * 20, f"{1 << 63:020d}", "0" * 20])
def test_what_has_no_name_of_a_manifest_is_none(name: str) -> None:
    store = filled(2)
    store.put(PREFIX + name, b"")
    tip = log_of(store).read_tip()
    assert tip is not None
    assert tip.number == 2


def test_a_manifest_that_does_not_follow_the_known_tip_is_damage() -> None:
    store = filled(2)
    log = log_of(store)
    warm = log.read_tip()
    head = dataclasses.replace(stored(store, 2).head, number=3, previous_sha256=b"\1" * 32)
    store.put(key(3), encode(Words(head)))
    with pytest.raises(Damaged, match=f"{key(3)}: it follows a manifest with SHA-256 0101"):
        log.read_tip(warm)
