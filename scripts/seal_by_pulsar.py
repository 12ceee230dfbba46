"""Has Pulsar's own tracker of delayed messages seal a bucket, for the test that compares its bytes with ours.

    python scripts/seal_by_pulsar.py

It needs Maven and a JDK of version 17 or later on the PATH, and downloads 250 MB of Pulsar into Maven's repository. The
bytes are in the tree; run it to add those of another version of Pulsar, which is set in scripts/pulsar_bucket/pom.xml.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = REPOSITORY / "scripts" / "pulsar_bucket"
GOLDEN = REPOSITORY / "tests" / "storage_backends" / "formats" / "pulsar"
# The limits of a segment; the test cuts by them, too.
TIME_STEP_MS = 60_000
ROWS_MAX = 50


def main() -> None:
    """Write the bucket of GOLDEN/rows.csv next to it."""
    pom = SOURCES / "pom.xml"
    (version,) = set(re.findall(r"<version>(\d+\.\d+\.\d+)</version>", pom.read_text(encoding="utf-8")))
    bucket = GOLDEN / f"bucket-{version}.bin"
    with tempfile.TemporaryDirectory() as jars:
        copy = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        subprocess.run(copy, check=True)
        seal = ["java", "-cp", f"{jars}/*", str(SOURCES / "SealBucket.java"), str(GOLDEN / "rows.csv"), str(bucket)]
        subprocess.run([*seal, str(TIME_STEP_MS), str(ROWS_MAX)], check=True)
    print(f"{bucket.relative_to(REPOSITORY)}: {bucket.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
