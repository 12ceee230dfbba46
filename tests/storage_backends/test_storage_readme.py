"""The example in the README of storage runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "storage_backends" / "README.md"


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(example, README.name, "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == "b'the first'\n"
