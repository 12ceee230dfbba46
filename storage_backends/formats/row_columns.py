"""Holds rows as columns: the form in which positions travel from a request to the disk.

It has their order and their hash. `column_format`, `slot_format` and `bucket_format` encode them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from storage_backends.formats import schedule_ids
from storage_backends.formats.schedule_ids import ScheduleIds

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
Index = schedule_ids.Index

_U64 = np.dtype(np.uint64)

# Up to this many rows plain Python sorts faster than numpy.
FEW_ROWS = 16
# Rows hashed at a time: the working set stays in a core's cache.
HASH_ROWS = 8192
_HASH_SEEDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_HASH_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0xFF51AFD7ED558CCD)
_U64_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """n rows: `deliver_at_ms`, `ledger_id`, `entry_id` u64[n]; `key_hash` u32[n], or None if no row has one.

    `schedule_ids` are those of n rows, or None if no row has one. The columns are not copied and must not be changed
    afterwards.
    """

    deliver_at_ms: U64
    ledger_id: U64
    entry_id: U64
    key_hash: U32 | None = None
    schedule_ids: ScheduleIds | None = None

    def __post_init__(self) -> None:
        times, ledgers, entries = self.deliver_at_ms, self.ledger_id, self.entry_id
        if (
            times.dtype is ledgers.dtype is entries.dtype is _U64
            and self.key_hash is None
            and self.schedule_ids is None
            and len(times.shape) == 1
            and times.shape == ledgers.shape == entries.shape
        ):
            return
        self._check()

    def _check(self) -> None:
        shape = self.deliver_at_ms.shape
        if len(shape) != 1 or self.ledger_id.shape != shape or self.entry_id.shape != shape:
            raise ValueError(
                f"columns of rows differ in shape: deliver_at_ms {shape}, ledger_id {self.ledger_id.shape}, "
                f"entry_id {self.entry_id.shape}"
            )
        for column in (self.deliver_at_ms, self.ledger_id, self.entry_id):
            if column.dtype != np.uint64:
                raise ValueError(f"a column of rows is {column.dtype}, it must be uint64")
        if self.key_hash is not None and (self.key_hash.shape != shape or self.key_hash.dtype != np.uint32):
            raise ValueError(f"key_hash is {self.key_hash.dtype}{self.key_hash.shape}, it must be uint32{shape}")
        if self.schedule_ids is not None and len(self.schedule_ids) != len(self):
            raise ValueError(f"there are {len(self.schedule_ids)} schedule ids for {len(self)} rows")

    @property
    def has_ids(self) -> bool:
        """True if a row has a schedule id."""
        return self.schedule_ids is not None and bool(self.schedule_ids)

    def listed_ids(self) -> list[bytes]:
        """Return the schedule id of each row; empty bytes stand for none."""
        return [b""] * len(self) if self.schedule_ids is None else self.schedule_ids.tolist()

    def __len__(self) -> int:
        return len(self.deliver_at_ms)

    def take(self, index: Index) -> Rows:
        """Return the rows that an index array, a mask of n or a slice selects."""
        return Rows(
            self.deliver_at_ms[index],
            self.ledger_id[index],
            self.entry_id[index],
            None if self.key_hash is None else self.key_hash[index],
            None if self.schedule_ids is None else self.schedule_ids.take(index),
        )

    @staticmethod
    def empty() -> Rows:
        return _NO_ROWS

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """Concatenate the parts. If any part has key hashes, the others count as having 0; likewise schedule ids."""
        parts = [part for part in parts if len(part)]
        if not parts:
            return Rows.empty()
        if len(parts) == 1:
            return parts[0]
        key_hash = None
        if any(part.key_hash is not None for part in parts):
            key_hash = np.concatenate(
                [np.zeros(len(part), np.uint32) if part.key_hash is None else part.key_hash for part in parts]
            )
        schedule_ids = None
        for part in parts:
            if part.schedule_ids is not None:
                schedule_ids = ScheduleIds.concat([each.schedule_ids for each in parts], list(map(len, parts)))
                break
        return Rows(
            np.concatenate([part.deliver_at_ms for part in parts]),
            np.concatenate([part.ledger_id for part in parts]),
            np.concatenate([part.entry_id for part in parts]),
            key_hash,
            schedule_ids,
        )

    @staticmethod
    def merged_by_due(parts: Sequence[Rows]) -> Rows:
        """Merge the parts, each in the order (deliver_at, ledger, entry), into this order."""
        parts = [part for part in parts if len(part)]
        merged = None
        if len(parts) > 1 and all(part.key_hash is None and part.schedule_ids is None for part in parts):
            merged = _packed_merge(parts)
        return Rows.concat(parts).sorted_by_due() if merged is None else merged

    def in_position_order(self) -> bool:
        """Return whether (ledger, entry) never falls."""
        ledger, entry = self.ledger_id, self.entry_id
        if len(self) < 2:
            return True
        entry_rises = entry[1:] >= entry[:-1]
        if ledger[0] == ledger[-1] and (ledger == ledger[0]).all():
            return bool(entry_rises.all())
        return bool(((ledger[1:] > ledger[:-1]) | ((ledger[1:] == ledger[:-1]) & entry_rises)).all())

    def due_order(self) -> npt.NDArray[np.int64]:
        """Return the index that sorts the rows by (deliver_at, ledger, entry); stable."""
        if len(self) <= FEW_ROWS:
            places = list(
                zip(self.deliver_at_ms.tolist(), self.ledger_id.tolist(), self.entry_id.tolist(), strict=True)
            )
            return np.array(sorted(range(len(places)), key=places.__getitem__), np.int64)
        # If the rows are in position order, their index stands for the position.
        keys = [self.deliver_at_ms] if self.in_position_order() else [self.deliver_at_ms, self.ledger_id, self.entry_id]
        order = _packed_order(keys)
        if order is None:
            order = np.lexsort((self.entry_id, self.ledger_id, self.deliver_at_ms))
        return order

    def sorted_by_due(self) -> Rows:
        """Return the rows in the order (deliver_at, ledger, entry)."""
        return self.take(self.due_order())


_NOTHING = np.empty(0, np.uint64)
_NO_ROWS = Rows(_NOTHING, _NOTHING, _NOTHING)


def _packed_order(keys: Sequence[U64]) -> npt.NDArray[np.int64] | None:
    """Return the stable order by the keys, the most significant first, or None if it cannot be packed.

    It sorts one integer a row, with the offsets above the index. Returns None if offsets and index need more than 64
    bits.
    """
    rows = len(keys[0])
    if rows < 2:
        return np.arange(rows)
    index_bits = (rows - 1).bit_length()
    bits = index_bits
    fields: list[tuple[U64, int]] = []
    for key in reversed(keys):
        minimum = key.min()
        span_bits = int(key.max() - minimum).bit_length()
        if span_bits:
            fields.append((key - minimum, bits))
            bits += span_bits
    if bits > 64:
        return None
    packed = np.arange(rows, dtype=np.uint64)
    for offset, shift in fields:
        packed |= offset << np.uint64(shift)
    packed.sort()
    packed &= np.uint64((1 << index_bits) - 1)
    return packed.astype(np.int64)


def _packed_merge(parts: Sequence[Rows]) -> Rows | None:
    """Merge rows without key hashes as `Rows.merged_by_due` does, by sorting one integer that holds each row.

    Returns None if the offsets need more than 64 bits.
    """
    dues = _span([part.deliver_at_ms for part in parts])
    ledgers = _span([part.ledger_id for part in parts])
    entries = _span([part.entry_id for part in parts])
    if dues[1] + ledgers[1] + entries[1] > 64:
        return None
    packed = np.empty(sum(map(len, parts)), np.uint64)
    start = 0
    for part in parts:
        place = packed[start : start + len(part)]
        np.subtract(part.deliver_at_ms, np.uint64(dues[0]), out=place)
        for column, (least, bits) in ((part.ledger_id, ledgers), (part.entry_id, entries)):
            place <<= np.uint64(bits)
            place |= column - np.uint64(least)
        start += len(part)
    # numpy's stable sort merges, which takes a third of the time if there are runs.
    packed.sort(kind="stable")
    columns = []
    for least, bits in (entries, ledgers):
        column = packed & np.uint64((1 << bits) - 1)
        column += np.uint64(least)
        columns.append(column)
        packed >>= np.uint64(bits)
    packed += np.uint64(dues[0])
    entry_id, ledger_id = columns
    return Rows(packed, ledger_id, entry_id)


def _span(columns: Sequence[U64]) -> tuple[int, int]:
    """Return the least value of columns of at least one row, and how many bits the offsets from it take."""
    least = min(int(column.min()) for column in columns)
    return least, (max(int(column.max()) for column in columns) - least).bit_length()


def row_hash(rows: Rows) -> tuple[int, int]:
    """Return (low, high): two 64-bit mixes of each row, each summed over the rows modulo 2^64.

    No rows give (0, 0). The sum does not depend on the order of the rows, so the rows before and after a seal or a
    merge compare by one number. A row without key hash counts as one with 0.

    mix(row): h = seed; for x in key_hash, ledger_id, entry_id, deliver_at_ms: h = (h ^ x) * multiplier, h ^= h >> 32.
    """
    low = high = 0
    for start in range(0, len(rows), HASH_ROWS):
        part = rows.take(slice(start, start + HASH_ROWS))
        low += int(_mixed(part, _HASH_SEEDS[0], _HASH_MULTIPLIERS[0]).sum())
        high += int(_mixed(part, _HASH_SEEDS[1], _HASH_MULTIPLIERS[1]).sum())
    return low & _U64_MASK, high & _U64_MASK


def id_hash(rows: Rows) -> tuple[int, int]:
    """Return (low, high) of the rows that have a schedule id, and of these ids: summed as in `row_hash`.

    mix(row with id): h = mix(row); for x in length of the id, its words of 8 bytes: h = (h ^ x) * multiplier,
    h ^= h >> 32. Words are little-endian, the last one with zeros behind the id.
    """
    if rows.schedule_ids is None:
        return 0, 0
    low = high = 0
    with_ids = np.flatnonzero(rows.schedule_ids.lengths)
    for start in range(0, len(with_ids), HASH_ROWS):
        part = rows.take(with_ids[start : start + HASH_ROWS])
        low += _mix_id_sum(part, _HASH_SEEDS[0], _HASH_MULTIPLIERS[0])
        high += _mix_id_sum(part, _HASH_SEEDS[1], _HASH_MULTIPLIERS[1])
    return low & _U64_MASK, high & _U64_MASK


def _mix_id_sum(rows: Rows, seed: int, multiplier: int) -> int:
    """Return the sum of the mixes of rows that all have an id."""
    ids = ScheduleIds.none(len(rows)) if rows.schedule_ids is None else rows.schedule_ids
    lengths, factor, half = ids.lengths, np.uint64(multiplier), np.uint64(32)
    state = _mixed(rows, seed, multiplier)
    state ^= lengths
    state *= factor
    state ^= state >> half
    for number, word in enumerate(ids.words().T):
        has_word = lengths > 8 * number
        mixed = state[has_word] ^ word[has_word]
        mixed *= factor
        mixed ^= mixed >> half
        state[has_word] = mixed
    return int(state.sum())


def _mixed(rows: Rows, seed: int, multiplier: int) -> U64:
    factor, half = np.uint64(multiplier), np.uint64(32)
    if rows.key_hash is None:
        mixed = (seed * multiplier) & _U64_MASK
        state = rows.ledger_id ^ np.uint64(mixed ^ (mixed >> 32))
    else:
        state = rows.key_hash ^ np.uint64(seed)
        state *= factor
        state ^= state >> half
        state ^= rows.ledger_id
    state *= factor
    state ^= state >> half
    for column in (rows.entry_id, rows.deliver_at_ms):
        state ^= column
        state *= factor
        state ^= state >> half
    return state
