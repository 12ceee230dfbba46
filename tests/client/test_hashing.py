"""The key hash is Murmur3 32-bit with seed 0 of the ordering key before the key, so that every producer agrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tarry

KEYS = Path(__file__).resolve().parents[2] / "docs" / "KEYS.md"


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
        ("t", 0xCA87DF4D),
        ("te", 0xEDB8EE1B),
        ("tes", 0x0BB90E5A),
        ("test", 0xBA6BD213),
        ("testy", 0x44AF8342),
        ("foo", 4138058784),
        ("hello", 0x248BFA47),
        ("hello, world", 0x149BBB7F),
        ("Hello, world!", 0xC0363E43),
        ("19 Jan 2038 at 3:14:07 AM", 0xE31E8A70),
        ("The quick brown fox jumps over the lazy dog", 0x2E4FF723),
        ("The quick brown fox jumps over the lazy dog.", 0xD5C48BFC),
    ],
)
def test_published_vectors(key: str | bytes, expected: int) -> None:
    assert tarry.key_hash(key).tolist() == [expected]
    assert tarry.key_hash(ordering_keys=key).tolist() == [expected]


def test_text_is_hashed_as_utf_8_and_no_key_is_0() -> None:
    hashes = tarry.key_hash(["Zürich", None, "Zürich".encode()])
    assert hashes.dtype == np.uint32
    assert hashes[0] == hashes[2] != 0
    assert hashes[1] == 0
    assert tarry.key_hash(None).tolist() == [0]
    assert tarry.key_hash([]).tolist() == []


def test_the_ordering_key_comes_before_the_key_also_when_it_is_empty() -> None:
    key, ordering_key = int(tarry.key_hash("N14228")[0]), int(tarry.key_hash("LAX")[0])
    both = tarry.key_hash(["N14228", "N14228", "N14228", None, None], ordering_keys=["LAX", None, "", "LAX", None])
    assert both.dtype == np.uint32
    assert both.tolist() == [ordering_key, key, 0, ordering_key, 0]


def test_one_key_or_one_ordering_key_is_that_of_all_messages() -> None:
    key, ordering_key = int(tarry.key_hash("N14228")[0]), int(tarry.key_hash("LAX")[0])
    assert tarry.key_hash("N14228", ordering_keys=[None, "LAX"]).tolist() == [key, ordering_key]
    assert tarry.key_hash(["N14228", None], ordering_keys="LAX").tolist() == [ordering_key, ordering_key]
    assert tarry.key_hash("N14228", ordering_keys=iter([None])).tolist() == [key]


@pytest.mark.parametrize(("keys", "ordering_keys"), [(2, 3), (3, 2), (0, 2)])
def test_several_of_both_must_be_as_many(keys: int, ordering_keys: int) -> None:
    with pytest.raises(tarry.InvalidArgument, match=f"ordering_keys has {ordering_keys} rows and keys has {keys}"):
        tarry.key_hash(["a"] * keys, ordering_keys=["b"] * ordering_keys)


def documented() -> Iterator[tuple[str | None, str | bytes | None, bytes | None, int, int]]:
    """The test vectors: ordering key, key, what is hashed, hash, slot."""
    _, _, behind = KEYS.read_text(encoding="utf-8").partition("\n## Key hash\n")
    section, _, _ = behind.partition("\n## ")
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        ordering_key, key, hashed, value, slot = (cell.strip() for cell in line.strip("|").split("|"))
        yield text_of(ordering_key), key_of(key), bytes_of(hashed), int(value.strip("`"), 16), int(slot)


def text_of(cell: str) -> str | None:
    return {"none": None, "empty": ""}[cell] if "`" not in cell else cell.strip("`")


def key_of(cell: str) -> str | bytes | None:
    return bytes_of(cell.removeprefix("bytes ")) if cell.startswith("bytes ") else text_of(cell)


def bytes_of(cell: str) -> bytes | None:
    text = text_of(cell)
    return None if text is None else bytes.fromhex(text)


def test_the_documented_vectors_are_what_the_client_computes() -> None:
    vectors = list(documented())
    assert len(vectors) >= 16
    for ordering_key, key, hashed, value, slot in vectors:
        assert tarry.key_hash(key, ordering_keys=ordering_key).tolist() == [value]
        assert tarry.key_hash(hashed).tolist() == [value]
        assert slot == value & 0xFFFF


def test_the_documented_vectors_have_every_length_up_to_5_text_beyond_ascii_and_both_kinds_of_keys() -> None:
    vectors = list(documented())
    assert {len(hashed) for _, _, hashed, _, _ in vectors if hashed is not None} >= set(range(6))
    assert any(isinstance(key, str) and not key.isascii() for _, key, _, _, _ in vectors)
    assert any(value >= 1 << 31 for _, _, _, value, _ in vectors)
    assert any(ordering_key and key for ordering_key, key, _, _, _ in vectors)
    assert (None, None, None, 0, 0) in vectors
