"""Forges stored objects under atheris, which looks for inputs that reach new code: `make fuzz`."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import atheris  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

with atheris.instrument_imports(include=["storage_backends.formats"]):
    from tests.storage_backends.formats import test_forged
    from tests.storage_backends.formats._support.forging import KINDS
    from tests.storage_backends.formats._support.known_ids import known_ids


@given(st.sampled_from(sorted(KINDS)), st.data())
def forge(name: str, data: st.DataObject) -> None:
    with known_ids():
        test_forged.damage_of(KINDS[name].read, data.draw(test_forged.forged(name)))


if __name__ == "__main__":
    # Each start of it leaves some 3 KB behind.
    tracemalloc.start()
    harness: Any = forge
    atheris.Setup(sys.argv, harness.hypothesis.fuzz_one_input)
    atheris.Fuzz()
