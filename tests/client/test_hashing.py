"""The key hash is Murmur3 32-bit with seed 0, so that every producer of a topic agrees."""

from __future__ import annotations

import numpy as np
import pytest

import tarry


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"", 0),
        (b"\xff\xff\xff\xff", 0x76293B50),
        (b"\x21\x43\x65\x87", 0xF55B516B),
        (b"\x21\x43\x65", 0x7E4A8634),
        (b"\x21\x43", 0xA0F7B07A),
        (b"\x21", 0x72661CF4),
        (b"\x00\x00\x00\x00", 0x2362F9DE),
        ("foo", 4138058784),
        ("The quick brown fox jumps over the lazy dog", 0x2E4FF723),
    ],
)
def test_published_vectors(key: str | bytes, expected: int) -> None:
    assert tarry.key_hash(key).tolist() == [expected]


def test_text_is_hashed_as_utf_8_and_no_key_is_0() -> None:
    hashes = tarry.key_hash(["Zürich", None, "Zürich".encode()])
    assert hashes.dtype == np.uint32
    assert hashes[0] == hashes[2] != 0
    assert hashes[1] == 0
