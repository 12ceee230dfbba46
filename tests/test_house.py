"""The structure of the code: rooms, and the imports between their files, those for types alone included."""

from __future__ import annotations

import ast
import graphlib
import itertools
import tokenize
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


# A text that opens with one of these has no subject, or one that stands elsewhere.
OPENINGS = {"As", "How", "Of", "So", "What", "Where", "Whether", "Which", "Whoever"}
# A docstring is also shown by itself: nobody sees what these stand for.
POINTING = {"It", "Its", "That", "Their", "They", "These", "This"}


def opening_of(text: str) -> str:
    return text.split()[0].strip(",:;.")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Give line, name and text of each docstring: of the module, of classes and of functions, private ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = "" if isinstance(node, ast.Module) else node.name
                yield getattr(node, "lineno", 1), name, text


def test_a_docstring_stands_by_itself() -> None:
    pointing = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text.splitlines()[0]}"
        for path in modules().values()
        for line, name, text in docstrings(ast.parse(path.read_text()))
        if opening_of(text) in OPENINGS
        or (not name.startswith("_") and (opening_of(text) in POINTING or text.startswith("The same")))
    ]
    assert pointing == []


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Give line and text of the comments that have a line to themselves, a block as one."""
    before = -1
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                line = token.start[0]
                if line != before + 1 and (text := token.string.lstrip("#- ")):
                    yield line, text
                before = line


def test_a_comment_has_a_subject() -> None:
    openings = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text}"
        for path in modules().values()
        for line, text in comments(path)
        if opening_of(text) in OPENINGS
    ]
    assert openings == []


def test_no_public_class_of_the_daemon_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        if name.startswith("daemon."):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


LINES_MAX = 70
# Declarations, one after the other.
LISTS = {"daemon.metrics._declare_rows", "daemon.metrics._declare_storage"}


def test_a_function_can_be_seen_at_once() -> None:
    long = [
        f"{name}.{node.name}: {lines} lines"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > LINES_MAX and f"{name}.{node.name}" not in LISTS
    ]
    assert long == []


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
