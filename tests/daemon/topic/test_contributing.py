"""The tests that CONTRIBUTING.md shows: they pass as they stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests._support import snippets
from tests._support.engine_fixture import EngineFixture

PAGE = Path(__file__).resolve().parents[3] / "CONTRIBUTING.md"


async def test_the_first_tests_of_the_page_pass(machines: EngineFixture) -> None:
    of_core, of_engine = (_test_of(block.code) for block in snippets.of(PAGE))
    of_core()
    await of_engine(machines)


def _test_of(code: str) -> Any:
    """Return the test function that the code defines."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, PAGE.name, "exec", dont_inherit=True), names)
    (found,) = (value for name, value in names.items() if name.startswith("test_"))
    return found
