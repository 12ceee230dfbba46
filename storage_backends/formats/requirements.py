"""Names what a reader must know to read objects of version 2.

An object that holds schedule ids, or names one that does, has version 2 of its kind. All other objects keep version 1,
byte for byte. The manifests of a shard and of a topic say in `requires` what their readers must know. A reader refuses
what it does not know, and neither rewrites nor deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from storage_backends.formats import format_errors

SCHEDULE_IDS: Final = "schedule_ids"

KNOWN: frozenset[str] = frozenset({SCHEDULE_IDS})
"""The requirements that this release meets in every daemon and job; a heartbeat reports them.

A name belongs here once rows keep what it stands for on every way that they go. Until then its objects are refused.
"""

_WITHOUT_IDS, _WITH_IDS = 1, 2


def version_of(*, holds_ids: bool) -> int:
    """Return the version of a section, checkpoint, progress or bucket."""
    return _WITH_IDS if holds_ids else _WITHOUT_IDS


def versions_read() -> tuple[int, ...]:
    """Return the versions of sections, checkpoints, progress and buckets that this release reads."""
    return (_WITHOUT_IDS, _WITH_IDS) if SCHEDULE_IDS in KNOWN else (_WITHOUT_IDS,)


def check_version(found: int, what: str, offset: int) -> None:
    """Raise UnsupportedVersion unless this release reads that version of a section, checkpoint, progress or bucket."""
    if found not in (versions := versions_read()):
        raise format_errors.UnsupportedVersion(what, offset, found=found, supported=versions)


def joined(required: Iterable[str], requirement: str) -> tuple[str, ...]:
    """Return the requirements of a manifest with another one, in the order of their names."""
    return tuple(sorted({*required, requirement}))


def check(required: Iterable[str], what: str, offset: int) -> None:
    """Raise UnknownRequirement if this release does not meet one of the requirements of a manifest."""
    if unknown := sorted(set(required) - KNOWN):
        raise format_errors.UnknownRequirement(what, offset, unknown)
