"""Packs what the executors of Spark need into two files: the code, and its dependencies in the versions of uv.lock.

uv run scripts/build_spark_env.py [--output dist] [--python 3.11] [--platform x86_64-unknown-linux-gnu]

`tarry-spark.zip` is for `--py-files`: `batch` and `storage_backends`, nothing else.
`tarry-spark-env-<python>-<platform>.tar.gz` is for `--archives ...#environment`: the distributions of the group
`executors`, and `bin/python`, which runs the machine's own Python with them. It may lie anywhere. Spark is not in it.
The same lock gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

GROUP = "executors"
PACKAGES = ("batch", "storage_backends")
# Sources and tests of libraries, which no import reaches; a third of the archive
LEFT_OUT = ("lib/bin", "lib/pandas/tests", "lib/pyarrow/include", "lib/pyarrow/src", "lib/pyarrow/tests")
# Archives hold no time of their making. (A zip cannot hold one before 1980.)
ZIP_TIME = (1980, 1, 1, 0, 0, 0)

WRAPPER = """\
#!/bin/sh
# Runs the Python {python} of this machine with the libraries beside this file, wherever that is.
# TARRY_PYTHON names another command (spark.executorEnv.TARRY_PYTHON).
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd -P) || exit 1
python=${{TARRY_PYTHON:-python{python}}}
if ! command -v "$python" >/dev/null 2>&1; then
    echo "$0: there is no $python: install Python {python}, or set TARRY_PYTHON to one" >&2
    exit 127
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1
if [ "$version" != "{python}" ]; then
    echo "$0: $python is Python $version, and these libraries are for Python {python}: set TARRY_PYTHON" >&2
    exit 1
fi
PYTHONPATH=$here/lib${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONPATH
exec "$python" "$@"
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "dist", help="the folder of both files")
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info[:2]), help="major.minor of the executors")
    parser.add_argument("--platform", help="the executors' platform, as uv calls it (this machine's)")
    given = parser.parse_args(arguments)
    given.output.mkdir(parents=True, exist_ok=True)
    for path in (write_code(given.output), write_environment(given.output, given.python, given.platform)):
        print(f"{path} {path.stat().st_size / 1e6:.1f} MB")
    return 0


def write_code(output: Path) -> Path:
    """Write the zip for `--py-files`."""
    target = output / "tarry-spark.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in PACKAGES:
            for path in files_of(REPOSITORY / package):
                if path.suffix != ".py":
                    continue
                entry = zipfile.ZipInfo(path.relative_to(REPOSITORY).as_posix(), ZIP_TIME)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return target


def write_environment(output: Path, python: str, uv_platform: str | None) -> Path:
    """Write the archive for `--archives`."""
    target = output / f"tarry-spark-env-{python}-{uv_platform or this_platform()}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="tarry-spark-env-") as directory:
        root = Path(directory)
        install(root, python, uv_platform)
        for path in LEFT_OUT:
            shutil.rmtree(root / path, ignore_errors=True)
        wrapper = root / "bin" / "python"
        wrapper.parent.mkdir()
        wrapper.write_text(WRAPPER.format(python=python))
        wrapper.chmod(0o755)
        # Level 1: the libraries are packed in a third of the time into a twentieth more.
        with target.open("wb") as file, gzip.GzipFile("", "wb", 1, file, mtime=0) as packed:
            write_tar(packed, root)
    return target


def install(root: Path, python: str, uv_platform: str | None) -> None:
    """Install the distributions of the group, in the versions and with the hashes of the lock, in `root`/lib."""
    requirements = root / "requirements.txt"
    export = [uv(), "export", "--quiet", "--locked", "--no-header", "--only-group", GROUP, "--no-emit-workspace"]
    subprocess.run([*export, "--output-file", str(requirements)], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    into = [uv(), "pip", "install", "--quiet", "--target", str(root / "lib"), "--python-version", python]
    # A build would be for this machine.
    strict = ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    where = [] if uv_platform is None else ["--python-platform", uv_platform]
    subprocess.run(
        [*into, *strict, *where, "--python", sys.executable, "--requirements", str(requirements)],
        cwd=REPOSITORY,
        check=True,
    )


def uv() -> str:
    """Return the uv that runs this, or that of the machine, or the one that `make` has installed."""
    return os.environ.get("UV") or shutil.which("uv") or str(REPOSITORY / ".tools" / "uv")


def write_tar(packed: gzip.GzipFile, root: Path) -> None:
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files_of(root):
            content = path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            entry.size, entry.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(content))


def files_of(folder: Path) -> Iterator[Path]:
    """Yield its files in the order of their names, without those that Python or uv wrote there."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".lock":
            yield path


def this_platform() -> str:
    return f"{platform.machine()}-{platform.system().lower()}"


if __name__ == "__main__":
    sys.exit(main())
