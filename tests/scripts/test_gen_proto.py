"""The generated code, as other people's environments meet it. That it is what proto/ says is a step of the gate."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CLIENT = REPOSITORY / "client"
STORED = REPOSITORY / "storage_backends" / "formats" / "generated"


def lower_bound(distribution: str) -> tuple[int, ...]:
    """The oldest version of the distribution that the client says it runs with."""
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]
    (version,) = [
        found[1]
        for requirement in project["dependencies"]
        if (found := re.fullmatch(rf"{distribution}>=([0-9.]+)", requirement))
    ]
    return tuple(int(part) for part in version.split("."))


def generated(pattern: str) -> list[Path]:
    files = sorted((CLIENT / "src" / "tarry" / "v1").glob(pattern))
    assert files
    return files


@pytest.mark.parametrize("path", generated("*_pb2.py"), ids=lambda path: path.name)
def test_the_messages_run_with_the_oldest_protobuf_that_the_client_allows(path: Path) -> None:
    made_by = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", path.read_text())
    assert made_by is not None
    assert tuple(int(part) for part in made_by.groups()) <= lower_bound("protobuf")


def test_stored_messages_do_not_import_the_client() -> None:
    for path in STORED.glob("*.py*"):
        assert not re.search(r"^(from|import) tarry\b", path.read_text(), flags=re.MULTILINE), path.name
