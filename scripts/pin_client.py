"""Packs the client library of a commit as an archive that Python imports.

    python scripts/pin_client.py <commit> tests/client/pinned/tarry_client_<name>.zip

Tests run it against the daemon of today. Each form of the wire that clients in use may speak has an archive; archives
are never made again.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

SOURCES = "client/src/tarry"
# A fixed time gives the same archive from the same commit.
MADE_AT = (1980, 1, 1, 0, 0, 0)


def main() -> None:
    """Parse the arguments, and write the archive."""
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
