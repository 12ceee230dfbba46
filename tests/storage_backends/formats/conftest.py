"""The formats are tested with schedule ids; whoever tests a release that does not know them says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage_backends.formats._support import known_ids


@pytest.fixture(scope="module", autouse=True)
def _known_ids() -> Iterator[None]:
    with known_ids.known_ids():
        yield
