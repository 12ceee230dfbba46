"""The example in the README of storage runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._support import snippets

README = Path(__file__).resolve().parents[2] / "storage_backends" / "README.md"


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = snippets.of(README)
    exec(compile(example.code, README.name, "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == "b'the first'\n"
