"""Reports sizes, importers, names and circles of the code. No count fails anything.

    python scripts/house_counts.py [--list] [--only daemon,storage_backends]

A module is a Python file of a package whose imports pyproject.toml restricts. The report leaves out generated messages,
and counts names only in code that people write: not in the generated client of threads. Imports inside functions and
under TYPE_CHECKING count.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import re
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DAEMON, STORAGE, CLIENT = "daemon", "storage_backends", "tarry"
# Generated from other modules
MADE = "tarry.threads"
# Folders without a package of the product
BESIDE = ("benchmarks", "examples", "scripts", "tests")
SHORT_MODULE_LINES, SHORT_FUNCTION_LINES = 100, 6
LONGEST_FILES, LONGEST_FUNCTIONS, MODULES_LISTED = 12, 3, 40

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = Mapping[str, set[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A file of a package. `name` is what it is imported as; `path` is below the repository."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def is_made(self) -> bool:
        return self.name.startswith(MADE)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]

    @property
    def protocols(self) -> list[str]:
        return [
            node.name
            for node in self.classes
            if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
        ]

    @functools.cached_property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @property
    def lines_for_people(self) -> int:
        """The number of lines of docstrings and comments."""
        documented = (node for node in ast.walk(self.tree) if isinstance(node, ast.Module | ast.ClassDef | Function))
        texts = (ast.get_docstring(node, clean=False) or "" for node in documented)
        comments = sum(bool(re.match(r"\s*#", line)) for line in self.text.splitlines())
        return comments + sum(len(text.splitlines()) for text in texts)

    @property
    def private_functions(self) -> list[Function]:
        return [node for node in self.functions if re.match(r"_(?!_)", node.name)]

    @property
    def functions_named_once(self) -> list[Function]:
        """The private functions that the module names once apart from their definition."""
        named = collections.Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        return [node for node in self.private_functions if named[node.name] == 1]


class House:
    """The modules of the packages, and their imports."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.imports: Graph = {name: self._imports_of(module) for name, module in self.modules.items()}
        self.importers: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, imported in self.imports.items():
            for each in imported:
                self.importers[each].add(name)

    @classmethod
    def at(cls, root: Path, only: Sequence[str] = ()) -> House:
        """Read the packages below `root`, or some of them."""
        tools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
        return cls(
            module
            for package in tools["importlinter"]["root_packages"]
            if not only or package in only
            for folder in (".", *tools["mypy"]["mypy_path"])
            for module in _modules(root, Path(folder), package)
        )

    @property
    def without_heads(self) -> list[Module]:
        """All modules but the heads of packages."""
        return [module for module in self.modules.values() if not module.is_package]

    @property
    def written(self) -> list[Module]:
        """All modules that people write."""
        return [module for module in self.modules.values() if not module.is_made]

    @property
    def folders(self) -> Graph:
        """The imports between the folders of each package. A file at the top of a package is a folder of its own."""
        heads = {name for name, module in self.modules.items() if module.is_package}

        def folder_of(name: str) -> str:
            folder = name if name in heads else name.rpartition(".")[0] or name
            return name if "." not in folder else folder

        found: dict[str, set[str]] = {folder_of(name): set() for name in self.modules}
        for name, imported in self.imports.items():
            here = folder_of(name)
            there = {folder_of(each) for each in imported if each.partition(".")[0] == name.partition(".")[0]}
            found[here] |= there - {here}
        return found

    def _imports_of(self, module: Module) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {each if each in self.modules else node.module for each in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        return found & self.modules.keys() - {module.name}


def _modules(root: Path, folder: Path, package: str) -> Iterator[Module]:
    for path in _files(root / folder / package):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(root / folder).with_suffix("").parts).removesuffix(".__init__")
        yield Module(name, path.relative_to(root), text, ast.parse(text))


def _files(folder: Path) -> list[Path]:
    """List the Python files of a folder, without generated messages."""
    found = sorted(folder.rglob("*.py"))
    return [each for each in found if "_pb2" not in each.name and "generated" not in each.relative_to(folder).parts]


def circles(graph: Graph) -> list[list[str]]:
    """Find the groups of more than one node in which each node leads to all others."""
    reached = {node: _reached_from(node, graph) for node in graph}
    groups = {frozenset(each for each in reached[node] if node in reached[each]) for node in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached_from(node: str, graph: Graph) -> set[str]:
    found: set[str] = set()
    waiting = [node]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def twice(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Find the names that stand in several places, with these places."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for name, place in named:
        places[name].append(place)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


# ---- the report, line by line; with `listed`, the names behind a count are indented below it


def sizes(house: House, root: Path) -> Iterator[str]:
    """Report the size of each package and of the folders next to them."""
    yield "package            files   lines  median    most   functions: median, p95, most lines   for people"
    for package in dict.fromkeys(module.package for module in house.modules.values()):
        of = [module for module in house.modules.values() if module.package == package]
        lines = [module.lines for module in of]
        lengths = sorted(length(node) for module in of for node in module.functions) or [0]
        p95, share = lengths[int(len(lengths) * 0.95)], sum(module.lines_for_people for module in of) / sum(lines)
        yield (
            f"{package:<18}{len(of):>6}{sum(lines):>8}{statistics.median(lines):>8.0f}{max(lines):>8}"
            f"{len(lengths):>12}: {statistics.median(lengths):>6.0f}, {p95:>3}, {lengths[-1]:>4}{share:>24.0%}"
        )
    for folder in BESIDE:
        if paths := _files(root / folder):
            lines = [path.read_text(encoding="utf-8").count("\n") for path in paths]
            yield f"{folder:<18}{len(paths):>6}{sum(lines):>8}"


def importers(house: House, *, listed: bool) -> Iterator[str]:
    """Report the modules that one other imports, and the short ones."""
    plain = house.without_heads
    single = [module for module in plain if len(house.importers[module.name]) == 1]
    core = [module for module in plain if module.package in (DAEMON, STORAGE)]
    of_core = [module for module in single if module.package in (DAEMON, STORAGE)]
    yield (
        f"modules with one importer: {len(single)} of {len(plain)}; "
        f"daemon and storage_backends {len(of_core)} of {len(core)}"
    )
    if listed:
        for module in single:
            (importer,) = house.importers[module.name]
            yield f"  {module.name}, {module.lines} lines <- {importer}"
    daemon = [module for module in plain if module.package == DAEMON]
    within = [[each for each in house.importers[module.name] if each.startswith(DAEMON)] for module in daemon]
    yield f"the daemon's, by importers within it: {sum(len(found) == 1 for found in within)} of {len(daemon)}"
    short = sum(module.lines <= SHORT_MODULE_LINES for module in plain)
    yield f"modules of at most {SHORT_MODULE_LINES} lines: {short}"


def grain(house: House, *, listed: bool) -> Iterator[str]:
    """Report private functions with one use, and protocols."""
    once = {module.name: module.functions_named_once for module in house.written}
    lines = [length(node) for found in once.values() for node in found]
    private = {module.name: len(module.private_functions) for module in house.written}
    of_daemon = [name for name in once if name.startswith(DAEMON)]
    yield (
        f"private functions that their module names once: {len(lines)} of {sum(private.values())}, {sum(lines)} lines; "
        f"of at most {SHORT_FUNCTION_LINES} lines {sum(each <= SHORT_FUNCTION_LINES for each in lines)}; "
        f"the daemon's {sum(len(once[name]) for name in of_daemon)} of {sum(private[name] for name in of_daemon)}"
    )
    if listed:
        for name in sorted(once, key=lambda name: -len(once[name]))[:MODULES_LISTED]:
            yield f"  {len(once[name]):>3} {name}"
    ports = [(module.name, name) for module in house.modules.values() for name in module.protocols]
    words = {name: set(re.findall(r"\w+", module.text)) for name, module in house.modules.items()}
    alone = [name for place, name in ports if not any(name in found for at, found in words.items() if at != place)]
    of_daemon = [place for place, _ in ports if place.startswith(DAEMON)]
    yield f"Protocols: {len(ports)}, named in no other module {len(alone)}; the daemon's {len(of_daemon)}"
    if listed:
        yield from (f"  {place}.{name}" for place, name in ports)


def names(house: House, *, listed: bool) -> Iterator[str]:
    """Report names that stand twice."""
    classes = [(node.name, module) for module in house.written for node in module.classes]
    public = [(name, module) for name, module in classes if not name.startswith("_")]
    everywhere = twice((name, module.name) for name, module in public)
    of_daemon = twice((name, module.name) for name, module in public if module.package == DAEMON)
    # The client has values of the daemon as its callers see them, with the same names.
    without_client = twice((name, module.name) for name, module in public if module.package != CLIENT)
    yield (
        f"public class names that stand twice: {len(everywhere)}; the daemon's {len(of_daemon)}; "
        f"without the client {len(without_client)}"
    )
    if listed:
        yield from (f"  {name}: {', '.join(places)}" for name, places in everywhere.items())
    files = twice((each.path.name, each.path.as_posix()) for each in house.written if not each.is_package)
    yield f"file names that stand twice: {len(files)}"
    if listed:
        yield from (f"  {name}: {', '.join(places)}" for name, places in files.items())


def arrows(house: House, *, listed: bool) -> Iterator[str]:
    """Report imports and their circles."""
    every = sum(map(len, house.imports.values()))
    of_daemon = sum(len(found) for name, found in house.imports.items() if name.startswith(DAEMON))
    yield f"imports between modules: {every}; the daemon's {of_daemon}"
    for_types = [name for name, module in house.modules.items() if "if TYPE_CHECKING" in module.text]
    yield f"modules with imports under TYPE_CHECKING: {len(for_types)}"
    if listed:
        yield from (f"  {name}" for name in for_types)
    for what, graph in (("modules", house.imports), ("folders of a package", house.folders)):
        found = circles(graph)
        yield f"circles of {what}: {len(found)}"
        yield from (f"  {' '.join(group)}" for group in found)


def longest(house: House) -> Iterator[str]:
    """Report the longest files and functions."""
    yield "longest files"
    for module in sorted(house.modules.values(), key=lambda module: -module.lines)[:LONGEST_FILES]:
        yield f"  {module.lines:>5} {module.path.as_posix()}"
    yield "longest functions"
    functions = [
        (length(node), f"{name}.{node.name}") for name, module in house.modules.items() for node in module.functions
    ]
    for lines, name in sorted(functions, reverse=True)[:LONGEST_FUNCTIONS]:
        yield f"  {lines:>5} {name}"


def main(arguments: Sequence[str] | None = None, root: Path = REPOSITORY) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name what is behind the counts")
    parser.add_argument("--only", default="", metavar="PACKAGES", help="some packages, by comma")
    options = parser.parse_args(arguments)
    house = House.at(root, tuple(filter(None, options.only.split(","))))
    if not house.modules:
        parser.error(f"--only {options.only}: there is no such package")
    sections = [sizes(house, root), *(each(house, listed=options.list) for each in (importers, grain, names, arrows))]
    for section in (*sections, longest(house)):
        print("\n".join(section), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
