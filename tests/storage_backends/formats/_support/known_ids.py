"""Lets the formats read what has schedule ids, also while no daemon or job does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from storage_backends.formats import requirements


@contextlib.contextmanager
def known_ids() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requirements, "KNOWN", frozenset({requirements.SCHEDULE_IDS}))
        yield
