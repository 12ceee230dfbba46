"""The distributions: each declares what it imports and nothing else, and all code of ours is in one of them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts import build_spark_env

REPOSITORY = Path(__file__).resolve().parent.parent

# Several distributions are in the package `google`.
OF_GOOGLE = {"google.protobuf": "protobuf", "google.rpc": "googleapis-common-protos"}
# Not of a distribution: what a checkout has beside them.
BESIDE = {"benchmarks", "client", "examples", "tests"}
# That of Debian 12.
OLDEST_PYTHON = "3.11.2"
# Spark needs it for columns, and brings it not.
NOT_IMPORTED = {"tarryd": {"pandas"}}
# In these versions they are a part of Spark, which is declared.
BROUGHT_ALONG = {"py4j": "pyspark"}


@dataclasses.dataclass(frozen=True)
class Distribution:
    """`folder`: where its pyproject.toml is; `packages`: folders of its import packages; `requires`: what it always
    needs; `extras`: what these need.
    """

    name: str
    folder: Path
    packages: tuple[Path, ...]
    requires: frozenset[str]
    extras: frozenset[str]


def distribution(folder: Path, packages: tuple[Path, ...]) -> Distribution:
    said = project(folder)
    optional = [each for extra in said.get("optional-dependencies", {}).values() for each in extra]
    return Distribution(said["name"], folder, packages, names(said["dependencies"]), names(optional))


def project(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return said


def names(requirements: list[str]) -> frozenset[str]:
    return frozenset(normal(re.split(r"[\s<>=!~;\[]", each, maxsplit=1)[0]) for each in requirements)


def normal(name: str) -> str:
    """The form in which two spellings of a distribution's name are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages_of_the_daemon_and_its_jobs() -> tuple[Path, ...]:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    listed: list[str] = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return tuple(REPOSITORY / name for name in listed)


DISTRIBUTIONS = (
    distribution(REPOSITORY / "client", (REPOSITORY / "client" / "src" / "tarry",)),
    distribution(REPOSITORY / "relay", (REPOSITORY / "relay" / "src" / "tarry_relay",)),
    distribution(REPOSITORY / "storage_backends", (REPOSITORY / "storage_backends",)),
    distribution(REPOSITORY, packages_of_the_daemon_and_its_jobs()),
)
OURS: Mapping[str, str] = {package.name: each.name for each in DISTRIBUTIONS for package in each.packages}
by_name = pytest.mark.parametrize("one", DISTRIBUTIONS, ids=[each.name for each in DISTRIBUTIONS])


@functools.cache
def installed() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def of_others(source: str, own: str) -> Iterator[str]:
    """The distributions of what a module imports when it runs, but for Python's own and that of the name `own`."""
    for module in imported(ast.parse(source)):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        for prefix, found in OF_GOOGLE.items():
            if module == prefix or module.startswith(f"{prefix}."):
                yield found
                break
        else:
            found = OURS[top] if top in OURS else normal(installed()[top][0])
            if found != own:
                yield BROUGHT_ALONG.get(found, found)


def imported(tree: ast.AST) -> Iterator[str]:
    """What is imported, anywhere in the module but under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names if node.module == "google")
        yield from imported(node)


def imports_of(folder: Path, own: str) -> frozenset[str]:
    sources = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return frozenset(found for source in sources for found in of_others(source, own))


@by_name
def test_a_distribution_declares_what_it_imports_and_nothing_else(one: Distribution) -> None:
    found = frozenset[str]().union(*(imports_of(package, one.name) for package in one.packages))
    assert found == (one.requires | one.extras) - NOT_IMPORTED.get(one.name, set())


def test_the_daemon_runs_without_the_extras() -> None:
    whole = DISTRIBUTIONS[-1]
    assert imports_of(REPOSITORY / "daemon", whole.name) <= whole.requires


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import yaml", ["pyyaml"]),
        ("def late():\n    from yaml import safe_load", ["pyyaml"]),
        ("from google.protobuf import message", ["protobuf"]),
        ("from google.rpc import status_pb2", ["googleapis-common-protos"]),
        ("from storage_backends.formats import names", ["tarry-storage"]),
        ("import os\nfrom daemon import errors", []),
        ("if TYPE_CHECKING:\n    import yaml", []),
    ],
)
def test_what_an_import_needs_is_found(source: str, found: list[str]) -> None:
    assert list(of_others(source, "tarryd")) == found


def test_every_package_is_in_one_distribution() -> None:
    folders = {path.parent for top in ("*", "*/src/*") for path in REPOSITORY.glob(f"{top}/__init__.py")}
    packages = [package for each in DISTRIBUTIONS for package in each.packages]
    assert sorted(packages) == sorted(folder for folder in folders if folder.name not in BESIDE)


def standing_twice(paths: Iterable[Path]) -> dict[str, list[str]]:
    """The files whose name another one has, by name; but for names that only the client has twice, whose threads are
    made from its event loop, or that it shares with one file of the daemon.
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(path.name, []).append(path.relative_to(REPOSITORY).as_posix())
    del found["__init__.py"]
    return {
        name: sorted(places)
        for name, places in found.items()
        if len(places) > 1
        and (
            sum(place.startswith("daemon/") for place in places) > 1
            or not all(place.startswith(("daemon/", "client/")) for place in places)
        )
    }


def test_a_file_of_the_daemon_of_storage_or_of_a_job_has_a_name_of_its_own() -> None:
    packages = [package for each in DISTRIBUTIONS for package in each.packages]
    paths = [path for package in packages for path in package.rglob("*.py")]
    assert standing_twice(paths) == {}
    added = [
        REPOSITORY / "batch" / "engine" / "process.py",
        REPOSITORY / "daemon/shard/index.py",
    ]
    assert standing_twice([*paths, *added]) == {
        "index.py": ["daemon/core/index/index.py", "daemon/shard/index.py"],
        "process.py": ["batch/engine/process.py", "daemon/process.py"],
    }


def test_the_daemon_takes_the_libraries_of_its_own_commit() -> None:
    projects = {each.name: project(each.folder) for each in DISTRIBUTIONS}
    versions = {name: each["version"] for name, each in projects.items()}
    assert len(set(versions.values())) == 1
    ours = {each for each in projects["tarryd"]["dependencies"] if normal(each).startswith("tarry")}
    assert ours == {f"{name}=={versions[name]}" for name in ("tarry", "tarry-storage")}


def test_every_distribution_needs_the_python_that_the_pages_name() -> None:
    assert {project(each.folder)["requires-python"] for each in DISTRIBUTIONS} == {f">={OLDEST_PYTHON}"}
    for page in ("README.md", "CONTRIBUTING.md", "client/README.md", "docs/INSTALL.md"):
        said = re.findall(r"Python\s(3[\d.]+)\sor\snewer", (REPOSITORY / page).read_text(encoding="utf-8"))
        assert set(said) == {OLDEST_PYTHON}, page


def test_make_takes_no_system_python_that_is_too_old() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (oldest,) = re.findall(r"sys\.version_info < \(([\d, ]+)\)", makefile)
    assert oldest.replace(", ", ".") == OLDEST_PYTHON


def test_make_runs_the_tests_with_the_newest_python_that_the_pages_name() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (newest,) = re.findall(r"^NEWEST_PYTHON := 3\.(\d+)$", makefile, re.MULTILINE)
    said = re.findall(r"\b3\.(\d+)\b", (REPOSITORY / "docs" / "INSTALL.md").read_text(encoding="utf-8"))
    assert max(map(int, said)) == int(newest)


def test_the_image_and_the_archive_for_executors_get_each_package() -> None:
    packages = {path.name for path in packages_of_the_daemon_and_its_jobs()} | {"storage_backends"}
    copied = re.findall(r"^COPY (\w+) \1$", (REPOSITORY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    allowed = re.findall(r"^!(\w+)/$", (REPOSITORY / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(copied) == set(allowed) == packages | {"client", "deploy", "relay"}
    assert set(build_spark_env.PACKAGES) == packages - {"daemon"}


@by_name
def test_every_dependency_has_its_reason(one: Distribution) -> None:
    page = (REPOSITORY / "docs" / "DEPENDENCIES.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {one.name}$\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| ([\w.-]+)(?: \(extra `\w+`\))? \| ", section, re.MULTILINE)
    assert sorted(set(listed) - {"distribution"}) == sorted(one.requires | one.extras)
