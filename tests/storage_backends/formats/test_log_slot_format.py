"""A log slot: what is written is read, and every damage is found and costs no more than it has to."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import format_errors, framing, log_slot_format, names
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, Writer
from tests.storage_backends.formats._support import forging

LOG_ID = "01KB2Q0000000000000000000A"
WRITER = Writer("daemon-1", "127.0.0.1:7461", "0.1.0")
counted = st.integers(1, names.NUMBER_MAX)
heads = st.dictionaries(st.integers(0, 2**32 - 1), st.builds(Head, counted, counted), min_size=1, max_size=6)
texts = st.text("ab:é€𝄞", max_size=6)


@st.composite
def slots(draw: st.DrawFn) -> tuple[LogSlotHeader, Mapping[int, bytes]]:
    kind = draw(st.sampled_from(LogSlotKind))
    of_shards = {} if kind is LogSlotKind.OPEN else draw(heads)
    sections: dict[int, bytes] = {}
    if kind is LogSlotKind.DATA:
        with_section = draw(st.sets(st.sampled_from(sorted(of_shards)), min_size=1))
        sections = {shard: draw(st.binary(min_size=1, max_size=30)) for shard in with_section}
    header = LogSlotHeader(
        log_id=LOG_ID,
        number=1 if kind is LogSlotKind.OPEN else draw(st.integers(2, 2**64 - 1)),
        kind=kind,
        heads=of_shards,
        writer=draw(st.builds(Writer, texts, texts, texts)) if kind in (LogSlotKind.OPEN, LogSlotKind.FENCE) else None,
    )
    return header, sections


def example() -> tuple[LogSlotHeader, dict[int, bytes], bytes]:
    """A slot with the sections of two of three shards."""
    of_shards = {0: Head(3, 17), 5: Head(1, 2), 9: Head(7, 4)}
    header = LogSlotHeader(log_id=LOG_ID, number=12, kind=LogSlotKind.DATA, heads=of_shards)
    sections = {0: b"the first section", 9: b"another"}
    return header, sections, log_slot_format.encode_log_slot(header, sections)


@given(slots())
def test_what_is_written_is_read(slot: tuple[LogSlotHeader, Mapping[int, bytes]]) -> None:
    header, sections = slot
    data = log_slot_format.encode_log_slot(header, sections)
    read = log_slot_format.decode_log_slot(data)
    assert read.header == header
    assert {shard: read.section(shard) for shard in read.shards} == dict(sections)
    assert log_slot_format.identity_of(data).kind is header.kind


@given(slots())
def test_slots_that_differ_have_other_identities(slot: tuple[LogSlotHeader, Mapping[int, bytes]]) -> None:
    header, sections = slot
    if not sections:
        return
    shard = min(sections)
    changed = {**sections, shard: sections[shard][:-1] + bytes([sections[shard][-1] ^ 1])}
    one, other = (log_slot_format.encode_log_slot(header, each) for each in (sections, changed))
    assert log_slot_format.identity_of(one) != log_slot_format.identity_of(other)


def test_a_wrong_bit_damages_one_section_or_where_there_is_none_the_slot() -> None:
    _, sections, data = example()
    first = data.index(sections[0])
    for place in range(len(data) * 8):
        altered = bytearray(data)
        altered[place // 8] ^= 1 << place % 8
        if place // 8 < first:
            with pytest.raises(format_errors.FormatError):
                log_slot_format.decode_log_slot(bytes(altered))
            continue
        damaged = 0 if place // 8 < first + len(sections[0]) else 9
        read = log_slot_format.decode_log_slot(bytes(altered))
        with pytest.raises(format_errors.FormatError, match=f"shard {damaged} in slot 12 of log {LOG_ID}"):
            read.section(damaged)
        whole = 9 - damaged
        assert read.section(whole) == sections[whole]


def test_a_slot_that_ends_too_early_has_the_sections_before_its_end() -> None:
    _, sections, data = example()
    first = data.index(sections[0])
    for end in range(len(data)):
        if end < first:
            with pytest.raises(format_errors.FormatError):
                log_slot_format.decode_log_slot(data[:end])
            continue
        read = log_slot_format.decode_log_slot(data[:end])
        with pytest.raises(format_errors.FormatError, match="it ends after"):
            read.section(9)
        if end >= first + len(sections[0]):
            assert read.section(0) == sections[0]


def test_bytes_that_follow_the_last_section_are_damage() -> None:
    with pytest.raises(format_errors.FormatError, match="2 bytes follow"):
        log_slot_format.decode_log_slot(example()[2] + b"..")


def test_no_bytes_break_the_decoder() -> None:
    """Any bytes behind a right checksum are read, or refused as damage."""
    drawn = random.Random(7)
    *_, data = example()
    fixed = log_slot_format.HEADER_BYTES - 4
    end = data.index(b"the first section")
    read = 0
    for _ in range(3_000):
        altered = bytearray(data)
        for _ in range(drawn.randint(1, 4)):
            altered[drawn.randrange(6, end)] = drawn.randrange(256)
        checksum = framing.crc32c(bytes(altered[:fixed]), bytes(altered[fixed + 4 : end]))
        altered[fixed : fixed + 4] = struct.pack("<I", checksum)
        try:
            slot = log_slot_format.decode_log_slot(bytes(altered))
            for shard in slot.shards:
                slot.section(shard)
        except format_errors.FormatError:
            continue
        read += 1
    assert read > 50


def test_a_slot_of_another_version_is_not_read() -> None:
    *_, data = example()
    newer = data[:4] + b"\x09\0" + data[6:]
    with pytest.raises(format_errors.FormatError) as refused:
        log_slot_format.decode_log_slot(newer)
    assert not isinstance(refused.value, format_errors.NewerFormat), "a flipped bit is damage"
    with pytest.raises(format_errors.UnsupportedVersion):
        log_slot_format.decode_log_slot(forging.with_header_checksum(newer))


def test_a_slot_that_is_too_long_is_refused_by_the_section_that_makes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_slot_format, "SLOT_BYTES_MAX", 10_000)
    header, *_ = example()
    with pytest.raises(ValueError, match="shard 9, 1000 bytes, makes a log slot of 10148 bytes: the limit is 10000"):
        log_slot_format.encode_log_slot(header, {0: bytes(9_000), 9: bytes(1_000)})
    log_slot_format.encode_log_slot(header, {0: bytes(9_000)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"log_id": "01kb2q0000000000000000000a"}, "it must be a ULID"),
        ({"number": 1}, "OPEN is number 1"),
        ({"kind": LogSlotKind.OPEN, "number": 1, "writer": WRITER}, "no shard has sections before it"),
        ({"kind": LogSlotKind.FENCE}, "OPEN and FENCE have one"),
        ({"writer": WRITER}, "OPEN and FENCE have one"),
    ],
)
def test_what_no_slot_can_be_is_refused(changed: dict[str, Any], message: str) -> None:
    of_shards = {0: Head(1, 1)}
    fields: dict[str, Any] = {"log_id": LOG_ID, "number": 2, "kind": LogSlotKind.DATA, "heads": of_shards}
    with pytest.raises(ValueError, match=message):
        LogSlotHeader(**(fields | changed))


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        (LogSlotKind.DATA, {}, "DATA with 0 sections"),
        (LogSlotKind.CLOSE, {0: b"x"}, "CLOSE with 1 sections"),
        (LogSlotKind.DATA, {4: b"x"}, r"shards \[4\] are not in the heads"),
        (LogSlotKind.DATA, {0: b""}, "shard 0 is empty"),
    ],
)
def test_sections_that_a_slot_cannot_have_are_refused(
    kind: LogSlotKind, sections: Mapping[int, bytes], message: str
) -> None:
    header = LogSlotHeader(log_id=LOG_ID, number=2, kind=kind, heads={0: Head(1, 1)})
    with pytest.raises(ValueError, match=message):
        log_slot_format.encode_log_slot(header, sections)
