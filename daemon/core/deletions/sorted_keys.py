"""Keeps a sorted set of byte strings of one length, in few more bytes than they have.

Keys are found by prefix. They are in chunks that are replaced, never changed. So a change costs as much as the chunks
that it touches, and a snapshot is a copy of the list of chunks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

CHUNK_KEYS = 2048

# Byte strings of one length, `S<width>`. Keys that differ only in trailing zeros cannot collide, since all have one
# length.
Keys = npt.NDArray[np.bytes_]
Mask = npt.NDArray[np.bool_]


def joined(columns: Sequence[npt.NDArray[np.unsignedinteger[Any]]]) -> Keys:
    """Build a key of each row from its values, one after the other, so that keys ascend as rows do."""
    rows = len(columns[0])
    parts = [
        np.ascontiguousarray(column.astype(column.dtype.newbyteorder(">")))
        .view(np.uint8)
        .reshape(rows, column.itemsize)
        for column in columns
    ]
    return _as_keys(np.concatenate(parts, axis=1))


def bytes_of(keys: Keys) -> npt.NDArray[np.uint8]:
    """Return the bytes as u8[n, width]."""
    return np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), keys.itemsize)


def moved(keys: Keys, order: Sequence[slice]) -> Keys:
    """Return keys of the given slices of each key's bytes."""
    matrix = bytes_of(keys)
    return _as_keys(np.concatenate([matrix[:, part] for part in order], axis=1))


def ascending(keys: Keys) -> Keys:
    """Return the distinct keys, ascending."""
    keys = np.sort(keys)
    return keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys


def contained(keys: Keys, wanted: Keys) -> Mask:
    """Return the mask of keys that are among `wanted`, which ascends."""
    return _find(wanted, keys)[1]


class SortedKeys:
    def __init__(self, width: int) -> None:
        self._kind = np.dtype(f"S{width}")
        self._chunks: list[Keys] = []
        self._firsts: list[bytes] = []
        self._keys = 0

    def __len__(self) -> int:
        return self._keys

    def chunks(self) -> tuple[Keys, ...]:
        """Return the keys as they are now, ascending, in chunks that never change."""
        return tuple(self._chunks)

    def add(self, keys: Keys) -> Keys:
        """Add ascending keys; return those that were new."""
        replaced: list[tuple[int, Keys]] = []
        new: list[Keys] = []
        for number, part in self._by_chunk(keys):
            chunk = self._chunks[number] if self._chunks else np.empty(0, self._kind)
            places, present = _find(chunk, part)
            if not present.all():
                new.append(part[~present])
                replaced.append((number, np.insert(chunk, places[~present], new[-1])))
        self._replace(replaced)
        return self._concatenated(new)

    def remove(self, keys: Keys) -> Keys:
        """Remove ascending keys; return those that existed."""
        replaced: list[tuple[int, Keys]] = []
        gone: list[Keys] = []
        for number, part in self._by_chunk(keys) if self._chunks else ():
            places, present = _find(self._chunks[number], part)
            if present.any():
                gone.append(part[present])
                replaced.append((number, np.delete(self._chunks[number], places[present])))
        self._replace(replaced)
        return self._concatenated(gone)

    def beginning_with(self, prefixes: Keys) -> Keys:
        """Return all keys that begin with one of the ascending prefixes."""
        return self._concatenated(list(self._beginning_with(prefixes)))

    def has(self, prefix: bytes) -> bool:
        """Return whether any key begins with the prefix."""
        if not self._chunks:
            return False
        low = prefix.ljust(self._kind.itemsize, b"\0")
        number = max(0, bisect.bisect_right(self._firsts, low) - 1)
        # The first key that is not below it is in this chunk, or begins the next one.
        for chunk in self._chunks[number : number + 2]:
            place = int(np.searchsorted(chunk, np.array(low, self._kind)))
            if place < len(chunk):
                return _bytes_at(chunk, place).startswith(prefix)
        return False

    def count(self, prefix: bytes) -> int:
        """Return how many keys begin with the prefix."""
        whole = self._kind.itemsize
        return self._below(prefix.ljust(whole, b"\xff"), "right") - self._below(prefix.ljust(whole, b"\0"), "left")

    def _below(self, key: bytes, side: Literal["left", "right"]) -> int:
        """Return how many keys are below the given one or, with `right`, not above it."""
        number = bisect.bisect_right(self._firsts, key) - 1
        if number < 0:
            return 0
        place = np.searchsorted(self._chunks[number], np.array(key, self._kind), side)
        return sum(map(len, self._chunks[:number])) + int(place)

    def _beginning_with(self, prefixes: Keys) -> Iterator[Keys]:
        if not len(prefixes) or not self._chunks:
            return
        width, whole = prefixes.itemsize, self._kind.itemsize
        low = _bytes_at(prefixes, 0).ljust(whole, b"\0")
        high = _bytes_at(prefixes, len(prefixes) - 1).ljust(whole, b"\xff")
        for number in range(max(0, bisect.bisect_right(self._firsts, low) - 1), len(self._chunks)):
            if self._firsts[number] > high:
                return
            chunk = self._chunks[number]
            beginnings = moved(chunk[[0, -1]], [slice(width)])
            start = int(np.searchsorted(prefixes, beginnings[0]))
            end = int(np.searchsorted(prefixes, beginnings[1], side="right"))
            if start == end:
                continue
            found = chunk[contained(moved(chunk, [slice(width)]), prefixes[start:end])]
            if len(found):
                yield found

    def _by_chunk(self, keys: Keys) -> Iterator[tuple[int, Keys]]:
        """Yield the keys with the number of the chunk in which they are, or would be."""
        start = 0
        while start < len(keys):
            number = max(0, bisect.bisect_right(self._firsts, _bytes_at(keys, start)) - 1)
            end = len(keys)
            if number + 1 < len(self._firsts):
                end = int(np.searchsorted(keys, np.array(self._firsts[number + 1], self._kind)))
            yield number, keys[start:end]
            start = end

    def _replace(self, replaced: Sequence[tuple[int, Keys]]) -> None:
        """Replace chunks, given by ascending number."""
        if not replaced:
            return
        first, behind = replaced[0][0], len(self._chunks) - replaced[-1][0]
        for number, keys in reversed(replaced):
            self._keys += len(keys) - (len(self._chunks[number]) if self._chunks else 0)
            self._put(number, number + 1, keys)
        # Join small neighbors only after all replacements, since joining changes the numbers of chunks.
        for number in reversed(range(first - 1, len(self._chunks) - behind + 1)):
            if 0 <= number < len(self._chunks) - 1:
                pair = self._chunks[number : number + 2]
                if len(pair[0]) + len(pair[1]) <= CHUNK_KEYS // 2:
                    self._put(number, number + 2, np.concatenate(pair))

    def _put(self, start: int, end: int, keys: Keys) -> None:
        pieces = 1 if len(keys) <= CHUNK_KEYS else -(-len(keys) // (CHUNK_KEYS // 2))
        # Copies: a piece of a larger array would keep all of it.
        chunks = [piece.copy() for piece in np.array_split(keys, pieces) if len(piece)]
        self._chunks[start:end] = chunks
        self._firsts[start:end] = [_bytes_at(chunk, 0) for chunk in chunks]

    def _concatenated(self, parts: list[Keys]) -> Keys:
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self._kind)


def _find(among: Keys, keys: Keys) -> tuple[npt.NDArray[np.intp], Mask]:
    """Return the index of each key in an ascending array, and the mask of keys that are there."""
    places = np.searchsorted(among, keys)
    if not len(among):
        return places, np.zeros(len(keys), np.bool_)
    present: Mask = among[np.minimum(places, len(among) - 1)] == keys
    return places, present


def _bytes_at(keys: Keys, place: int) -> bytes:
    # An element of the array would have lost its trailing zeros.
    return keys[place : place + 1].tobytes()


def _as_keys(matrix: npt.NDArray[np.uint8]) -> Keys:
    keys: Keys = np.ascontiguousarray(matrix).view(f"S{matrix.shape[1]}").reshape(-1)
    return keys
