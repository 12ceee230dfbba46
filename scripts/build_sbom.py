"""Writes the components of tarryd, with versions, hashes and licences, as CycloneDX.

    uv run scripts/build_sbom.py [--output dist]

One file is for the daemon, one for the daemon with the batch jobs. Versions and hashes are those of uv.lock; licences
are those in the metadata of the installed distributions. If an installed one has none, the script prints its name and
ends with status 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
# Name of the file -> its components beyond the daemon
DOCUMENTS = {"tarryd": (), "tarryd-jobs": ("--extra", "spark")}


def document(options: tuple[str, ...]) -> dict[str, Any]:
    """Return the components of the lock that this machine installs, with their licences."""
    uv = os.environ.get("UV") or shutil.which("uv") or str(REPOSITORY / ".tools" / "uv")
    form = ["--format", "cyclonedx1.5", "--preview-features", "sbom-export"]
    export = [uv, "export", "--quiet", "--locked", "--no-default-groups", "--package", "tarryd", *options, *form]
    told = subprocess.run(export, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    made: dict[str, Any] = json.loads(told.stdout)
    for component in made["components"]:
        component["licenses"] = [{"license": {"name": name}} for name in licences(component["name"])]
    return made


def licences(distribution: str) -> list[str]:
    """Return the licences in the metadata of a distribution, or nothing if it is not installed."""
    try:
        metadata = importlib.metadata.metadata(distribution).json
    except importlib.metadata.PackageNotFoundError:
        return []
    if expression := metadata.get("license_expression"):
        return [str(expression)]
    classified = [each for each in metadata.get("classifier", []) if each.startswith("License ::")]
    if classified:
        return [each.rpartition(" :: ")[2] for each in classified]
    return str(metadata.get("license", "")).splitlines()[:1]


def unsaid(made: dict[str, Any]) -> list[str]:
    """Return the installed components without a licence.

    Those of the lock that only other machines need are ignored.
    """
    here = {each.name.lower().replace("_", "-") for each in importlib.metadata.distributions()}
    return [each["name"] for each in made["components"] if not each["licenses"] and each["name"] in here]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the bill of materials.")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "dist", help="the folder (dist)")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    missing = []
    for name, options in DOCUMENTS.items():
        made = document(options)
        missing += unsaid(made)
        path = output / f"{name}.cdx.json"
        path.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        print(f"{path}: {len(made['components'])} components")
    for name in dict.fromkeys(missing):
        print(f"{name}: it does not say its licence", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
