from __future__ import annotations

import random

import numpy as np
import pytest

from daemon.core.deletions import sorted_keys
from daemon.core.deletions.sorted_keys import Keys, SortedKeys, ascending, bytes_of, contained, joined, moved

WIDTH = 4


def keys_of(*texts: bytes) -> Keys:
    return ascending(np.array(texts, f"S{WIDTH}"))


def found(keys: Keys) -> list[bytes]:
    return [bytes(row) for row in bytes_of(keys)]


def any_key(draw: random.Random) -> bytes:
    """Of few bytes, so that many begin alike; zeros at the ends, too."""
    return bytes(draw.choice([0, 1, 255]) for _ in range(WIDTH))


@pytest.mark.parametrize("chunk_keys", [2, 4, 9, 2048])
def test_keys_are_those_of_a_set_however_small_the_chunks_are(chunk_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_keys, "CHUNK_KEYS", chunk_keys)
    draw = random.Random(chunk_keys)
    keys, expected = SortedKeys(WIDTH), set[bytes]()
    for _ in range(300):
        some = {any_key(draw) for _ in range(draw.choice([0, 1, 1, 3, 20]))}
        if draw.random() < 0.55:
            assert set(found(keys.add(keys_of(*some)))) == some - expected
            expected |= some
        else:
            assert set(found(keys.remove(keys_of(*some)))) == some & expected
            expected -= some
        assert len(keys) == len(expected)
        assert [each for chunk in keys.chunks() for each in found(chunk)] == sorted(expected)
        assert all(0 < len(chunk) <= chunk_keys for chunk in keys.chunks())
        prefix = any_key(draw)[: draw.randint(1, WIDTH)]
        beginning = sorted(each for each in expected if each.startswith(prefix))
        assert keys.has(prefix) == bool(beginning)
        assert keys.count(prefix) == len(beginning)
        assert found(keys.beginning_with(np.array([prefix], f"S{len(prefix)}"))) == beginning
        prefixes = ascending(np.array([any_key(draw)[:2] for _ in range(3)], "S2"))
        wanted = {bytes(row) for row in bytes_of(prefixes)}
        assert found(keys.beginning_with(prefixes)) == sorted(each for each in expected if each[:2] in wanted)


def test_chunks_are_as_they_were_when_they_were_asked_for() -> None:
    keys = SortedKeys(WIDTH)
    keys.add(keys_of(b"aaaa", b"bbbb"))
    before = keys.chunks()
    keys.add(keys_of(b"abcd"))
    keys.remove(keys_of(b"aaaa"))
    assert [found(chunk) for chunk in before] == [[b"aaaa", b"bbbb"]]


def test_chunks_that_are_left_nearly_empty_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_keys, "CHUNK_KEYS", 8)
    keys = SortedKeys(2)
    many = joined([np.arange(1_000, dtype=np.uint16)])
    keys.add(many)
    assert len(keys.chunks()) >= 125
    keys.remove(many[np.arange(1_000) % 50 != 0])
    assert len(keys) == 20
    assert len(keys.chunks()) < 20


def test_keys_ascend_as_the_rows_do_of_which_they_are_made() -> None:
    first = np.array([2, 1, 1, 256], np.uint32)
    second = np.array([0, (1 << 64) - 1, 256, 1], np.uint64)
    keys = joined([first, second])
    rows = list(zip(first.tolist(), second.tolist(), strict=True))
    assert np.argsort(keys).tolist() == [rows.index(row) for row in sorted(rows)]
    swapped = moved(keys, [slice(4, 12), slice(0, 4)])
    assert found(swapped) == found(joined([second, first]))


def test_keys_that_end_in_zeros_are_found() -> None:
    keys = keys_of(b"a\0\0\0", b"b\0\0\0")
    assert contained(keys_of(b"a\0\0\0", b"a\0\0\1", b"c\0\0\0"), keys).tolist() == [True, False, False]
    assert contained(keys, keys_of()).tolist() == [False, False]
