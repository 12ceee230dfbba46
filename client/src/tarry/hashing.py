"""Computes the hash that orders messages by key, which every producer of a topic must use.

Owns: what of a message is hashed, its ordering key before its key, and the hash: Murmur3 32-bit, x86, with seed 0.
Does not own: which keys a message has; which consumer gets a hash: the daemon divides the low 16 bits among them.

`docs/KEYS.md` has the rule and test vectors for other languages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeAlias

import mmh3
import numpy as np
from numpy.typing import NDArray

from tarry import errors

Key: TypeAlias = str | bytes | None
"""Text is hashed as UTF-8. None means no key; an empty key is one, with the hash 0."""


def key_hash(keys: Key | Iterable[Key] = None, *, ordering_keys: Key | Iterable[Key] = None) -> NDArray[np.uint32]:
    """Return the hash of each message's ordering key, or else of its key, or else 0.

    One key, or one ordering key, applies to all messages; alone it gives a column of length 1. Raises InvalidArgument
    if there are several of both, in different numbers.
    Example: `key_hash(["N14228", "N24211"], ordering_keys=[None, "LAX"])`
    """
    of_messages, before_them = _listed(keys), _listed(ordering_keys)
    rows = max(len(of_messages), len(before_them)) if of_messages and before_them else 0
    if {len(of_messages), len(before_them)} - {1, rows}:
        raise errors.InvalidArgument(
            f"ordering_keys has {len(before_them)} rows and keys has {len(of_messages)}; give as many, or one"
        )
    pairs = zip(_for_each(before_them, rows), _for_each(of_messages, rows), strict=True)
    chosen = (key if first is None else first for first, key in pairs)
    hashes = (0 if key is None else mmh3.hash(key, 0, signed=False) for key in chosen)
    return np.fromiter(hashes, dtype=np.uint32, count=rows)


def _listed(keys: Key | Iterable[Key]) -> list[Key]:
    return [keys] if keys is None or isinstance(keys, (str, bytes)) else list(keys)


def _for_each(keys: list[Key], rows: int) -> Iterable[Key]:
    return itertools.repeat(keys[0], rows) if len(keys) == 1 else keys
