"""Memory that is free inside the process goes back to the machine.

Owns: how the C library's allocator and the garbage collector are told. Does not own: when it is worth it (the engine,
`daemon.process`).

Blocks of columns are large and short-lived, and glibc keeps what was freed: after a journal was read or buckets were
sealed, several times what is in use. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from typing import Any

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Blocks from this size on are the machine's again as soon as they are freed. That glibc learns larger ones by itself
# ends when it is set.
MMAP_FROM_BYTES = 256 << 10
# So much may lie free at the end of the heap.
TRIM_FROM_BYTES = 1 << 20
# Each arena keeps free memory of its own, and by default there are eight a core; the interpreter's lock lets few
# threads allocate at once.
ARENAS_MAX = 2


# Objects that come and stay before the young ones are looked through, in half a millisecond; all of them a hundred
# times as seldom. Cycles that grow old are few here.
YOUNG_OBJECTS_MAX = 5_000


@functools.cache
def _glibc() -> Any:
    """None where it is not the C library."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_little() -> None:
    """From now on large blocks are given back when they are freed. Call once, before there are threads."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, TRIM_FROM_BYTES)
        library.mallopt(_M_ARENA_MAX, ARENAS_MAX)


def keep_for_good() -> None:
    """What is in memory now, modules for the most part, is not looked through for cycles any more, and the rest seldom.

    A full look takes the interpreter's lock for 60 ms, and every thread waits. Call when the process is set up.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)


def give_back() -> None:
    """Gives back what is free now. It takes milliseconds, without the interpreter's lock: not for the event loop."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
