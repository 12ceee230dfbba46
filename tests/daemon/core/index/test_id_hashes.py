"""Hashes of schedule ids: equal for equal ids, and as the formula says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.index.id_hashes import IdHasher
from daemon.errors import InvariantViolated
from storage_backends.formats.schedule_ids import ScheduleIds

SECRET = bytes(range(16))
ids = st.text(max_size=64).map(str.encode)


def column(listed: list[bytes]) -> ScheduleIds:
    return ScheduleIds.of_piece(np.array(list(map(len, listed)), np.uint64), b"".join(listed))


def hashed(listed: list[bytes], secret: bytes = SECRET) -> list[tuple[int, int]]:
    hashes = IdHasher(secret).hashes_of(column(listed))
    assert hashes.rows == len(listed)
    return list(zip(hashes.high.tolist(), hashes.low.tolist(), strict=True))


def summed(schedule_id: bytes) -> tuple[int, int]:
    """The hash of one id, in whole numbers."""
    numbers = np.frombuffer(hashlib.shake_256(SECRET).digest(8 * 4 * 66), np.uint64).tolist()
    padded = schedule_id + bytes(-len(schedule_id) % 4)
    words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
    sums = [
        sum(word * numbers[4 * place + each] for place, word in enumerate([1, len(schedule_id), *words])) % (1 << 64)
        for each in range(4)
    ]
    upper = [each >> 32 for each in sums]
    return upper[0] << 32 | upper[1], upper[2] << 32 | upper[3]


@given(st.lists(ids, min_size=1, max_size=40))
def test_a_hash_depends_on_the_id_alone_and_is_that_of_the_formula(listed: list[bytes]) -> None:
    assert hashed(listed) == [summed(each) for each in listed]


def test_the_longest_id_has_a_hash() -> None:
    assert hashed([b"i" * 256]) == [summed(b"i" * 256)]


def test_ids_that_differ_in_zeros_at_their_end_differ() -> None:
    alike = [b"a", b"a\0", b"a\0\0\0", b"a\0\0\0\0", b""]
    assert len(set(hashed(alike))) == len(alike)


def test_another_secret_gives_other_hashes() -> None:
    (one,), (other,) = hashed([b"order-4711"]), hashed([b"order-4711"], SECRET[::-1])
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_hashes_of_ids_that_follow_each_other_are_spread() -> None:
    halves = [half for each in hashed([f"order-{number}".encode() for number in range(4_000)]) for half in each]
    for bit in range(64):
        ones = sum(half >> bit & 1 for half in halves)
        assert 3_500 < ones < 4_500


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(InvariantViolated, match="15 bytes; it needs 16"):
        IdHasher(SECRET[:15])
