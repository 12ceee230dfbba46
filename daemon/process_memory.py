"""Returns memory that is free inside the process to the machine, and tunes the garbage collector.

Blocks of columns are large and short-lived, and glibc keeps what was freed: after a journal was read or buckets were
sealed, several times what is in use. Without glibc nothing is done to the allocator.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from typing import Any

# Constants of <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Blocks of this size or more are returned to the machine as soon as they are freed. Setting it stops glibc from
# adapting the size.
MMAP_FROM_BYTES = 256 << 10
# Free memory allowed at the end of the heap
TRIM_FROM_BYTES = 1 << 20
# Each arena keeps free memory of its own, and by default there are eight a core; the interpreter's lock lets few
# threads allocate at once.
ARENAS_MAX = 2


# New objects that stay before the young generation is scanned, in half a millisecond; all objects are scanned a hundred
# times less often. Cycles that grow old are few here.
YOUNG_OBJECTS_MAX = 5_000


@functools.cache
def _glibc() -> Any:
    """Return the C library, or None if it is not glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_little() -> None:
    """Return large blocks when they are freed from now on. Call once, before there are threads."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, TRIM_FROM_BYTES)
        library.mallopt(_M_ARENA_MAX, ARENAS_MAX)


def keep_for_good() -> None:
    """Exclude current objects, mostly modules, from scans for cycles, and scan the others rarely.

    A full scan takes the interpreter's lock for 60 ms, and every thread waits. Call this when the process is set up.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)


def give_back() -> None:
    """Return free memory now. It takes milliseconds without the interpreter's lock: not for the event loop."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
