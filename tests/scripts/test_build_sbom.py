"""The bill of materials has every library of the daemon, with its licence."""

from __future__ import annotations

import os
import re
import shutil
import tomllib

import pytest

from scripts import build_sbom


@pytest.mark.skipif(
    not (os.environ.get("UV") or shutil.which("uv") or (build_sbom.REPOSITORY / ".tools" / "uv").exists()),
    reason="there is no uv here",
)
def test_every_dependency_is_there_with_version_hash_and_licence() -> None:
    made = build_sbom.document(())
    declared = tomllib.loads((build_sbom.REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split("[=>]", each)[0] for each in declared}
    components = {each["name"]: each for each in made["components"]}
    assert names <= components.keys()
    assert all(components[name]["version"] and components[name]["licenses"] for name in names)
    assert "pytest" not in components
    assert build_sbom.unsaid(made) == []


def test_what_does_not_say_its_licence_is_found() -> None:
    silent = {"name": "pytest", "licenses": []}
    assert build_sbom.unsaid({"components": [silent, {"name": "of-another-machine", "licenses": []}]}) == ["pytest"]
    assert build_sbom.licences("pytest") == ["MIT"]
    assert build_sbom.licences("of-another-machine") == []
