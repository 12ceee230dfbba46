"""The structure of the code: rooms, and the imports between their files, those for types alone included."""

from __future__ import annotations

import ast
import graphlib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# By folder, what its modules are imported as.
PACKAGES = {
    "daemon": "daemon",
    "storage_backends": "storage_backends",
    "batch": "batch",
    "client/src/tarry": "tarry",
    "relay/src/tarry_relay": "tarry_relay",
}
# Made from other files.
GENERATED = ("storage_backends.formats.generated", "tarry.v1", "tarry.threads")


def modules() -> dict[str, Path]:
    """The files of the product, by the names of their modules."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if not name.startswith(GENERATED):
                found[name] = path
    return found


def imports_of(path: Path) -> Iterator[str]:
    """What a file names in its imports: modules, and names in modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def arrows(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """By module, the modules that it imports."""
    return {
        name: {module for each in imports_of(path) if (module := module_named(each, files)) not in (None, name)}
        for name, path in files.items()
    }


def module_named(imported: str, files: Mapping[str, Path]) -> str | None:
    if imported in files:
        return imported
    parent = imported.rpartition(".")[0]
    return parent if parent in files else None


def circle_in(graph: Mapping[str, Set[str]]) -> list[str]:
    """The modules of a circle; empty where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def layers() -> list[set[str]]:
    """The rooms of the daemon from the highest on, as the import contracts name them."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (names,) = (each["layers"] for each in contracts if each.get("containers") == ["daemon"])
    return [set(name.split(" | ")) for name in names]


@pytest.mark.parametrize("package", sorted(set(PACKAGES.values())))
def test_no_modules_of_a_package_import_each_other_in_a_circle(package: str) -> None:
    files = {name: path for name, path in modules().items() if name.split(".")[0] == package}
    assert len(files) > 1
    # A package imports what it shows of its modules.
    plain = {name: path for name, path in files.items() if path.name != "__init__.py"}
    assert circle_in(arrows(plain)) == []


def test_no_room_of_the_daemon_imports_a_higher_one() -> None:
    rank = {room: place for place, rooms in enumerate(layers()) for room in rooms}
    upwards = [
        f"{name} -> {imported}"
        for name, found in arrows(modules()).items()
        for imported in found
        if name.startswith("daemon.") and imported.startswith("daemon.")
        if rank[imported.split(".")[1]] < rank[name.split(".")[1]]
    ]
    assert upwards == []


def test_a_circle_is_found() -> None:
    rooms = ["a", "b", "c"]
    graph = {name: {after} for name, after in itertools.pairwise([*rooms, rooms[0]])}
    assert set(circle_in(graph)) == set(rooms)


# What a docstring that is shown by itself does not begin with: nobody sees what they stand for.
POINTING = {"As", "It", "Its", "Of", "So", "That", "Their", "They", "These", "This"}


def test_a_docstring_stands_by_itself() -> None:
    pointing = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {text.splitlines()[0]}"
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        if (text := ast.get_docstring(node))
        and (text.split()[0].strip(",:;.") in POINTING or text.startswith("The same"))
    ]
    assert pointing == []


# Programs and models of their own, which a suite runs, and servers.
PROGRAMS = ("brokers", "simulation", "planted", "models", "peers", "golden_root", "batch/compaction/observer")


def test_what_is_no_test_stands_in_a_folder_of_support() -> None:
    tests = REPOSITORY / "tests"
    others = [
        name
        for path in tests.rglob("*.py")
        if not path.name.startswith(("test_", "conftest", "__init__"))
        if not (name := path.relative_to(tests).as_posix()).startswith(PROGRAMS) and "_support/" not in name
    ]
    assert others == []
