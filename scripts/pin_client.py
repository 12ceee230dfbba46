"""Packs the client library of a commit, as an archive that Python imports: tests run it against the daemon of today.

    python scripts/pin_client.py <commit> tests/client/pinned/tarry_client_<name>.zip

Each form of the wire that clients in use may speak has one; archives are never made anew.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

SOURCES = "client/src/tarry"
# The same archive from the same commit, whenever it is made.
MADE_AT = (1980, 1, 1, 0, 0, 0)


def main() -> None:
    """Reads the arguments, and writes the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("archive", type=Path)
    given = parser.parse_args()
    packed = subprocess.run(["git", "archive", given.commit, SOURCES], check=True, capture_output=True).stdout
    with (
        tarfile.open(fileobj=io.BytesIO(packed)) as sources,
        zipfile.ZipFile(given.archive, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for member in sorted(sources.getmembers(), key=lambda each: each.name):
            if member.name.endswith(".py") and (file := sources.extractfile(member)) is not None:
                name = "tarry" + member.name.removeprefix(SOURCES)
                archive.writestr(zipfile.ZipInfo(name, MADE_AT), file.read(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
