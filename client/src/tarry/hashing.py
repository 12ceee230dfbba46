"""The hash of ordering keys, the one that every producer of a topic must use.

Owns: Murmur3 32-bit with seed 0 over the key's bytes.
Does not own: which key a message has; what the daemon does with the hash.
"""

from __future__ import annotations

from collections.abc import Iterable

import mmh3
import numpy as np
from numpy.typing import NDArray


def key_hash(keys: str | bytes | Iterable[str | bytes | None]) -> NDArray[np.uint32]:
    """Murmur3 32-bit, seed 0, of each key. Text is hashed as UTF-8; None (no key) is 0.

    One key gives a column of length 1.
    """
    if isinstance(keys, (str, bytes)):
        keys = (keys,)
    return np.fromiter((0 if key is None else mmh3.hash(key, 0, signed=False) for key in keys), dtype=np.uint32)
