"""Packs the daemon, the jobs and their storage of a commit as an archive that tests unpack and run.

    python scripts/pin_daemon.py <commit> tests/wire/pinned/tarryd_<name>.tar.xz

Tests run it on what this release writes. Each release that must refuse what it does not know has an archive; archives
are never made again. Its packages lie side by side, the client library, from which the daemon takes the wire, among
them.
"""

from __future__ import annotations

import argparse
import io
import lzma
import subprocess
import tarfile
from pathlib import Path

PACKAGES = {"batch": "batch", "daemon": "daemon", "storage_backends": "storage_backends", "client/src/tarry": "tarry"}
COMMAND_LINE = "tarry/cli/"


def main() -> None:
    """Parse the arguments, and write the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("archive", type=Path)
    given = parser.parse_args()
    packed = subprocess.run(["git", "archive", given.commit, *PACKAGES], check=True, capture_output=True).stdout
    with (
        tarfile.open(fileobj=io.BytesIO(packed)) as sources,
        lzma.open(given.archive, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for member in sorted(sources.getmembers(), key=lambda each: each.name):
            if (name := _name(member.name)) and (file := sources.extractfile(member)) is not None:
                # Without times, modes and owners the same commit gives the same archive.
                same = tarfile.TarInfo(name)
                same.size = member.size
                archive.addfile(same, file)


def _name(path: str) -> str:
    """Return the place of a file in the archive, or an empty text if it is not packed."""
    for folder, package in PACKAGES.items():
        if path.startswith(f"{folder}/") and path.endswith(".py"):
            name = package + path.removeprefix(folder)
            return "" if name.startswith(COMMAND_LINE) else name
    return ""


if __name__ == "__main__":
    main()
