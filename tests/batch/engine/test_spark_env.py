"""What `make spark-env` packs: that it is all an executor needs beside Spark and a Python, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from batch.engine import java
from scripts import build_spark_env
from tests._support import spark as spark_support

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = "{}.{}".format(*sys.version_info[:2])
# The interpreter below this environment: without its libraries.
BARE_PYTHON = getattr(sys, "_base_executable", sys.executable)

# What spark-submit runs: work that imports all modules (executors draw no pictures), and says where and with what.
PROGRAM = f"""\
import importlib, json, os, pkgutil, sys
from batch.engine import spark_engine

def look(number):
    import batch, numpy
    for name in {build_spark_env.PACKAGES}:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, name + "."):
            if module.name != "batch.forecast.picture":
                importlib.import_module(module.name)
    return {{
        "process": os.getpid(),
        "executor": os.path.realpath("."),
        "numpy": numpy.__file__,
        "batch": batch.__file__,
        "python": sys.executable,
    }}

with spark_engine.SparkEngine("looks around") as engine:
    found = [result for _, result in engine.run(look, range(8), lambda ended: None)]
print(json.dumps(found))
"""


def test_the_code_is_the_jobs_and_storage_and_nothing_else_and_the_same_each_time(tmp_path: Path) -> None:
    archive = build_spark_env.write_code(tmp_path)
    names = zipfile.ZipFile(archive).namelist()
    assert {name.partition("/")[0] for name in names} == {"batch", "storage_backends"}
    assert {"batch/engine/spark_engine.py", "storage_backends/formats/generated/bucket_pb2.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    first = archive.read_bytes()
    assert build_spark_env.write_code(tmp_path).read_bytes() == first


def wrapper(directory: Path, python: str) -> Path:
    command = directory / "environment" / "bin" / "python"
    command.parent.mkdir(parents=True)
    command.write_text(build_spark_env.WRAPPER.format(python=python))
    command.chmod(0o755)
    return command


def ran(command: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command, "-c", code],
        env={"PATH": os.defpath, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_wrapper_finds_its_libraries_wherever_it_lies(tmp_path: Path) -> None:
    command = wrapper(tmp_path / "a place", PYTHON)
    library = command.parent.parent / "lib" / "library_of_the_archive.py"
    library.parent.mkdir()
    library.write_text("")
    (tmp_path / "link").symlink_to(command.parent.parent)
    code = "import library_of_the_archive as found, sys; print(found.__file__, *sys.argv[1:])"
    run = ran(tmp_path / "link" / "bin" / "python", code, TARRY_PYTHON=BARE_PYTHON, PYTHONPATH=str(tmp_path))
    assert run.stdout.strip() == str(library), run.stderr


def test_the_wrapper_refuses_another_python_than_its_libraries_are_for(tmp_path: Path) -> None:
    run = ran(wrapper(tmp_path, "3.1"), "print('ran')", TARRY_PYTHON=BARE_PYTHON)
    assert run.returncode == 1
    assert f"is Python {PYTHON}, and these libraries are for Python 3.1: set TARRY_PYTHON" in run.stderr
    assert not run.stdout


def test_the_wrapper_says_what_to_do_where_there_is_no_python(tmp_path: Path) -> None:
    run = ran(wrapper(tmp_path, PYTHON), "print('ran')", TARRY_PYTHON="python-that-is-not-there")
    assert run.returncode == 127
    assert f"there is no python-that-is-not-there: install Python {PYTHON}, or set TARRY_PYTHON" in run.stderr


@pytest.mark.long
def test_executors_that_have_nothing_but_a_python_work_with_what_is_packed(tmp_path: Path) -> None:
    """On separate executor processes, and on the Java from PyPI."""
    assert ran(Path(BARE_PYTHON), "import numpy").returncode != 0, f"{BARE_PYTHON} is not bare"
    packed = tmp_path / "dist"
    packed.mkdir()
    code = build_spark_env.write_code(packed)
    libraries = build_spark_env.write_environment(packed, PYTHON, None)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    home = spark_support.home(tmp_path / "spark-home")
    from_pypi = java.home(java.find({"PATH": str(tmp_path)}), tmp_path / "java")
    command = [
        *(str(home / "bin" / "spark-submit"), "--master", "local-cluster[2,1,1024]"),
        *("--py-files", str(code), "--archives", f"{libraries}#environment"),
        *("--conf", "spark.pyspark.python=./environment/bin/python"),
        *("--conf", f"spark.pyspark.driver.python={sys.executable}"),
        *("--conf", f"spark.executorEnv.TARRY_PYTHON={BARE_PYTHON}"),
        str(program),
    ]
    settings = spark_support.environment(tmp_path / "conf")
    environment = {"PATH": os.defpath, **settings, "SPARK_HOME": str(home), "JAVA_HOME": str(from_pypi)}
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "Java version 25" in run.stderr
    found = json.loads(run.stdout)
    assert len({(one["executor"], one["process"]) for one in found}) == 2, "each executor has a core"
    for one in found:
        environment_of_its_own = Path(one["executor"], "environment")
        assert Path(one["executor"]).is_relative_to(home / "work")
        assert Path(one["numpy"]).is_relative_to(environment_of_its_own)
        assert one["batch"].endswith("tarry-spark.zip/batch/__init__.py")
        assert os.path.realpath(one["python"]) == os.path.realpath(BARE_PYTHON)
