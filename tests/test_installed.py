"""The distributions as others have them: what `make dist` makes, installed where nothing knows of the checkout.

The libraries are those of the lock, from uv's cache; what is not there is fetched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.processes import DaemonProcess, free_port, local_store
from scripts import build_spark_env
from tests._support.installed import BARE_PYTHON, installed, make_dist, surroundings, with_uv
from tests._support.processes import run_child
from tests.test_distributions import DISTRIBUTIONS, project

REPOSITORY = Path(__file__).resolve().parent.parent
# As wheels are called.
PACKAGES = {each.name.replace("-", "_"): each.packages for each in DISTRIBUTIONS}
# Modules beside the packages, which start a command before a package is loaded.
MODULES = {"tarry": {"tarry_command.py"}}
# Beside the package where the folder is the package.
NOT_IN_THE_PACKAGE = {"LICENSE", "README.md", "pyproject.toml"}

RUNNING = "{}.{}".format(*sys.version_info[:2])
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(project(REPOSITORY)["classifiers"]))
PAGE = (REPOSITORY / "docs" / "INSTALL.md").read_text(encoding="utf-8")
TOPIC = ("flights", "departures")

# What a program does with the library.
PROGRAM = """
import json, sys
import numpy, tarry

with tarry.Client(sys.argv[1], timeout_s=300) as client:
    added = client.add("flights", ledger_id=2, entry_id=numpy.arange(1_000), delay_ms=1)
    with client.subscribe("flights", "departures") as subscription:
        received = 0
        while received < 1_000:
            batch = subscription.receive(300)
            subscription.ack(batch)
            received += len(batch)
    backlog = client.stats("flights").subscriptions[0].backlog
print(json.dumps([tarry.__file__, added.accepted, received, backlog]))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes."""
    made = tmp_path_factory.mktemp("dist")
    make_dist(made)
    return made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed at once, for environments are large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def wheel(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"{name}-[0-9]*.whl")
    return found


def files_of_packages(name: str) -> Iterator[str]:
    for package in PACKAGES[name]:
        for path in package.rglob("*"):
            relative = path.relative_to(package)
            if path.is_file() and "__pycache__" not in path.parts and relative.name not in NOT_IN_THE_PACKAGE:
                yield f"{package.name}/{relative.as_posix()}"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_has_each_file_of_its_packages_and_nothing_else(dist: Path, name: str) -> None:
    names = set(zipfile.ZipFile(wheel(dist, name)).namelist())
    assert {each for each in names if not each.startswith(f"{name}-")} == {
        *files_of_packages(name),
        *MODULES.get(name, ()),
    }
    beside = {each.partition(".data/data/")[2] for each in names} - {""}
    deployed = (path.relative_to(REPOSITORY / "deploy") for path in (REPOSITORY / "deploy").rglob("*"))
    assert beside == (
        {f"share/tarryd/{path.as_posix()}" for path in deployed if path.suffix and "__pycache__" not in path.parts}
        if name == "tarryd"
        else set()
    )


def test_the_checkout_and_its_source_archives_make_the_same_wheels(dist: Path, tmp_path: Path) -> None:
    # `make dist` builds wheels from the archives.
    with_uv(build_spark_env.uv(), "build", "--all-packages", "--wheel", "--out-dir", str(tmp_path))
    for name in PACKAGES:
        assert wheel(tmp_path, name).read_bytes() == wheel(dist, name).read_bytes()


def test_the_page_names_the_files_that_are_made(dist: Path) -> None:
    made = {path.name for path in dist.iterdir()}
    assert set(re.findall(r"\bdist/([\w.-]+)", PAGE)) <= made
    assert {path.name for path in dist.glob("*.whl")} <= set(re.findall(r"[\w.-]+\.whl", PAGE))


def daemon_and_clients_work(dist: Path, directory: Path, python: str) -> Path:
    """In environments of their own; the root that the daemon has served."""
    of_the_daemon = installed(dist, directory / "daemon", python, "tarryd")
    of_clients = installed(dist, directory / "client", python, "tarry", "cli")
    program = (str(of_the_daemon.folder / "bin" / "tarryd"),)
    root = directory / "root"
    daemon = DaemonProcess("installed", directory, local_store(root), program=program, checkout=of_the_daemon.elsewhere)
    with daemon:
        daemon.start_serving()
        at = ("--address", daemon.address)
        assert "departures is created" in of_clients.run("tarry", *at, "subscription", "create", *TOPIC).stdout
        rows = ("--ledger", "1", "--entries", "0-4", "--in", "1s")
        added = of_clients.run("tarry", *at, "--json", "add", "flights", *rows)
        assert json.loads(added.stdout)["accepted"] == 5
        received = of_clients.run("tarry", *at, "receive", *TOPIC, "--count", "5").stdout
        assert re.findall(r"ledger 1  entry (\d)", received) == list("01234")
        told = json.loads(of_clients.run("python", "-c", PROGRAM, daemon.address).stdout)
        assert Path(told[0]).is_relative_to(of_clients.folder)
        assert told[1:] == [1_000, 1_000, 0]
        assert daemon.terminate() == 0
    assert "Usage: tarry " in of_clients.run("tarry", "--help").stdout
    where = of_the_daemon.run("python", "-c", "import daemon, tarry; print(daemon.__file__, tarry.__file__)").stdout
    assert all(Path(each).is_relative_to(of_the_daemon.folder) for each in where.split())
    unit = of_the_daemon.folder / "share" / "tarryd" / "tarryd.service"
    assert unit.read_bytes() == (REPOSITORY / "deploy" / "tarryd.service").read_bytes()
    missing = of_the_daemon.run("tarry-spark", "--help", status=1)
    assert missing.stderr.startswith("tarry-spark: click and rich missing; ")
    return root


@pytest.mark.long
def test_daemon_command_and_library_work_where_there_is_no_checkout(dist: Path, place: Path) -> None:
    daemon_and_clients_work(dist, place, BARE_PYTHON)


@pytest.mark.long
def test_the_relay_works_where_there_is_no_checkout(dist: Path, place: Path) -> None:
    of_the_relay = installed(dist, place / "relay", BARE_PYTHON, "tarry-relay", "nats", "redis")
    version = project(REPOSITORY / "relay")["version"]
    assert of_the_relay.run("tarry-relay", "--version").stdout == f"tarry-relay, version {version}\n"
    assert of_the_relay.run("tarry", "--version").stdout == f"tarry, version {version}\n"
    file = place / "relay.toml"
    for kind in ("nats", "redis"):
        url = f"{kind}://127.0.0.1:{free_port()}"
        file.write_text(
            f'broker = {{ kind = "{kind}", url = "{url}" }}\nrelay.topic = "orders"\ntargets = [{{ name = "due" }}]\n'
            'source = { name = "orders", dead_letters = "dead" }\n'
        )
        # Nobody is there: the client of the broker is.
        assert "tarry-relay: " in of_the_relay.run("tarry-relay", "check", str(file), status=3).stderr


def interpreter(version: str) -> str:
    """The path of one; those of pyenv need not be on the PATH."""
    if version == RUNNING:
        return BARE_PYTHON
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin")
    given = os.environ | {"PATH": os.pathsep.join([*map(str, sorted(of_pyenv)), os.environ["PATH"]])}
    found = run_child([build_spark_env.uv(), "python", "find", "--no-project", version], env=given)
    if found.returncode != 0:
        pytest.skip(f"there is no Python {version} here; `uv python install {version}` brings it: {found.stderr}")
    return found.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_runs_daemon_command_library_and_jobs(dist: Path, place: Path, version: str) -> None:
    python = interpreter(version)
    root = daemon_and_clients_work(dist, place, python)
    of_jobs = installed(dist, place / "jobs", python, "tarryd", "spark", "java")
    assert of_jobs.run("python", "--version").stdout.startswith(f"Python {version}.")
    assert "Usage: tarry-spark " in of_jobs.run("tarry-spark", "--help").stdout
    for engine in ("local", "spark"):
        of_jobs.run("tarry-spark", "audit", "--store", str(root), "--engine", engine, "--json")


@pytest.mark.long
def test_the_page_installs_what_it_says(dist: Path, place: Path) -> None:
    """Its lines for a shell, one after the other, with the index of this machine; those for root are not run."""
    programs = place / "programs"
    programs.mkdir()
    (programs / "uv").symlink_to(build_spark_env.uv())
    (programs / "python3").symlink_to(BARE_PYTHON)
    (place / "dist").symlink_to(dist)
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    # Only that one needs the checkout; it is made already.
    lines = lines.replace("make dist\n", "").replace("/opt/tarry", str(place / "tarry"))
    given = surroundings(
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        UV_PYTHON=BARE_PYTHON,
        UV_TOOL_BIN_DIR=str(programs),
        UV_TOOL_DIR=str(place / "tools"),
    )
    ended = run_child(["sh", "-euxc", lines], env=given, cwd=place, timeout_s=3_000)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    version = project(REPOSITORY)["version"]
    said = [f"tarryd {version}", f"tarry, version {version}", "<class 'tarry.threads.client.Client'>"]
    said.append(f"tarry-relay, version {version}")
    assert [line for line in ended.stdout.splitlines() if line.startswith(("tarry", "<"))] == said
    assert ended.stdout.count("Usage: tarry-spark ") == 2
