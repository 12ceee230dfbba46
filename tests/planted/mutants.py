"""Mutants of `daemon/core`: one thing of one function is changed, and the suites of its module must fail.

    python -m tests.planted.mutants                      # those of today
    python -m tests.planted.mutants --date 2026-11-29    # those of another day

Owns: which mutants there are, which of them a day has, which suites run, and the floor of kills. Does not own: planted
bugs, which change what no single node of a function says (`registry`).
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.util
import math
import os
import queue
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from examples.processes import REPOSITORY
from tests._support import parts

CORE = Path("daemon/core")
SUITES = Path("tests") / CORE
# Planted bugs patch what a mutant changes.
PLANTED = "test_planted_bugs*"
MUTANTS = 300
# The share of a day's mutants that must die. Of a sample of 60 it was 51: 18 of 20 deleted statements, 16 of 16 emptied
# results, 15 of 16 negated conditions, and 2 of 8 moved bounds, of which many change nothing.
FLOOR = 0.75
# A mutant that takes so many times the CPU of all suites has found a loop without an end.
CPU_FACTOR = 2
# Some loops fill the memory first.
MEMORY_MAX_BYTES = 4 << 30
MEMORY_ERROR = re.compile(rb"MemoryError|Unable to allocate|Cannot allocate memory")
ANOTHER_BOUND = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
# What is empty of a type, as the body of a function returns it.
EMPTY = {"int": "0", "float": "0.0", "bool": "False", "str": "''", "BitMap64": "BitMap64()", "None": "None"}
EMPTY |= {"list": "[]", "dict": "{}", "set": "set()", "tuple": "()"} | dict.fromkeys(("Collection", "Sequence"), "()")
# What is empty and has the shape of what is returned.
NOTHING_OF = {"Mask": "({}) & False"} | dict.fromkeys(("Places", "U16", "U32", "U64", "I64"), "({}) * 0")
NOTHING_OF |= dict.fromkeys(("KeyedRows", "Rows"), "({}).take(slice(0, 0))")
# Exit statuses of pytest: it passed, tests failed, a module could not be imported.
PASSED, FAILED, INTERRUPTED = 0, 1, 2


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Mutant:
    """A change of one place of a file: `text` replaces the bytes from `first` to `end`."""

    path: str
    function: str
    first: int
    end: int
    kind: str
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.first] + self.text.encode() + source[self.end :]

    def told(self, source: bytes) -> str:
        line = source.count(b"\n", 0, self.first) + 1
        before = " ".join(source[self.first : self.end].decode().split())
        return f"{self.path}:{line} {self.function}: {self.kind}: {before} -> {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """What becomes of the nodes from `first` to `last`; `{}` in the text stands for what they were."""

    kind: str
    first: ast.stmt | ast.expr
    last: ast.stmt | ast.expr
    text: str


def mutants_of(path: Path, source: bytes) -> list[Mutant]:
    """Return the mutants of a module, each once."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: dict[tuple[int, int, str], Mutant] = {}
    for name, function in _functions(ast.parse(source), ""):
        for change in _changes(function):
            first = lines[change.first.lineno - 1] + change.first.col_offset
            end = lines[(change.last.end_lineno or 0) - 1] + (change.last.end_col_offset or 0)
            text = change.text.replace("{}", source[first:end].decode()) if "({})" in change.text else change.text
            # Two changes may come to the same text.
            found.setdefault((first, end, text), Mutant(str(path), name, first, end, change.kind, text))
    return sorted(found.values())


def _functions(tree: ast.AST, within: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield within + node.name, node


def _changes(function: ast.FunctionDef) -> Iterator[_Change]:
    body = function.body[ast.get_docstring(function) is not None :]
    returned = _type_name(function.returns)
    if returned in EMPTY and body and not function.name.startswith("__"):
        yield _Change("empty a result", body[0], body[-1], f"return {EMPTY[returned]}")
    for node in (each for statement in body for each in ast.walk(statement)):
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue():
                yield _Change("delete a statement", node, node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield _Change("delete a statement", node, node, "pass")
            case ast.If(test=condition) | ast.While(test=condition) | ast.IfExp(test=condition):
                yield _Change("negate a condition", condition, condition, "(not ({}))")
            case ast.comprehension(ifs=[condition, *_]):
                yield _Change("negate a condition", condition, condition, "(not ({}))")
            case ast.Compare(ops=[op, *rest]) if type(op) in ANOTHER_BOUND:
                moved = ast.Compare(node.left, [ANOTHER_BOUND[type(op)](), *rest], node.comparators)
                yield _Change("move a bound", node, node, f"({ast.unparse(moved)})")
            case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=int())):
                yield _Change("move a bound", node, node, f"({ast.unparse(node.left)})")
            case ast.Return(value=ast.expr() as value) if returned in NOTHING_OF:
                yield _Change("empty a result", value, value, NOTHING_OF[returned])


def _type_name(annotation: ast.expr | None) -> str:
    """Return the name of a type without its arguments, "None" where it may be None; empty where it has no name."""
    match annotation:
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
            return name
        case ast.Constant(value=None) | ast.BinOp(op=ast.BitOr(), right=ast.Constant(value=None)):
            return "None"
    return ""


def all_mutants(repository: Path) -> list[Mutant]:
    """Return the mutants of `daemon/core`, by path and place."""
    files = sorted(path.relative_to(repository) for path in (repository / CORE).rglob("*.py"))
    return [mutant for path in files for mutant in mutants_of(path, (repository / path).read_bytes())]


def chosen(mutants: Sequence[Mutant], day: datetime.date, count: int) -> list[Mutant]:
    """Return those of a day."""
    return sorted(random.Random(day.toordinal()).sample(mutants, min(count, len(mutants))))


def suites_of(module: Path, repository: Path) -> tuple[list[str], list[str]]:
    """Return the files that test a module: those of its room and those that import it, the one of its name first; and
    those that reach it through what they import.
    """
    room = SUITES / module.parent.relative_to(CORE)
    near, far = [], []
    for path in sorted((repository / SUITES).rglob("test_*.py")):
        file = path.relative_to(repository)
        if path.match(PLANTED) or module not in _reached_by(file, repository):
            continue
        if file.parent == room or module in _imports_of(file, repository):
            near.append((file.name != f"test_{module.name}", file.parent != room, str(file)))
        else:
            far.append(str(file))
    return [file for *_, file in sorted(near)], far


@functools.cache
def _reached_by(file: Path, repository: Path) -> frozenset[Path]:
    """Return the files of the core and of its suites that a file imports, and those that these import."""
    reached, left = set[Path](), [file]
    while left:
        new = _imports_of(left.pop(), repository) - reached
        reached |= new
        left += new
    return frozenset(reached)


@functools.cache
def _imports_of(file: Path, repository: Path) -> frozenset[Path]:
    """Return the files of the core and of its suites that a file imports."""
    names = set[str]()
    for node in ast.walk(ast.parse((repository / file).read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    paths = {Path(*name.split(".")).with_suffix(".py") for name in names}
    return frozenset(path for path in paths if {CORE, SUITES} & {*path.parents} and (repository / path).is_file())


class Copy:
    """A copy of the tree, in which one mutant at a time lives."""

    def __init__(self, repository: Path, folder: Path, part: int) -> None:
        self.root = folder / "tree"
        self._part = part
        shutil.copytree(repository, self.root, ignore=shutil.ignore_patterns(".*", *parts.MADE))

    def run(self, suites: Sequence[str], cpu_max_s: int) -> int:
        """Run suites until a test fails; return pytest's exit status, or the negative number of a signal."""
        arguments = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", f"--part={self._part}"]
        command = [sys.executable, "-m", "pytest", *arguments, *suites]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, cwd=self.root, env=environment, stdout=output, stderr=output)
            try:
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu_max_s, cpu_max_s))
                resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
                status = process.wait()
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            # A signal, or no memory, is the end of a mutant.
            if status > INTERRUPTED and not MEMORY_ERROR.search(said := output.read()):
                raise RuntimeError(f"pytest ended with {status}: {said.decode()}")
            return status

    def lives(self, mutant: Mutant, suites: Sequence[Sequence[str]], cpu_max_s: int) -> bool:
        """Tell whether the suites of a module pass with a mutant: the near ones, then the far ones."""
        path = self.root / mutant.path
        source = path.read_bytes()
        try:
            self._write(path, mutant.applied(source))
            return all(self.run(each, cpu_max_s) == PASSED for each in suites if each)
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        # A file of the same second and size would be taken for the one that was compiled.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def main() -> int:
    """0 when as many mutants die as the floor says."""
    parser = argparse.ArgumentParser(description="Mutants of daemon/core, and how many of them their suites kill.")
    parser.add_argument("--date", type=datetime.date.fromisoformat, default=datetime.datetime.now(datetime.UTC).date())
    parser.add_argument("--count", type=int, default=MUTANTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--floor", type=float, default=FLOOR)
    parser.add_argument("--of", default="", metavar="TEXT", help="those alone in whose path and function is this text")
    options = parser.parse_args()
    every = [each for each in all_mutants(REPOSITORY) if options.of in f"{each.path} {each.function}"]
    mutants = chosen(every, options.date, options.count)
    suites = {path: suites_of(Path(path), REPOSITORY) for path in {mutant.path for mutant in mutants}}
    say(f"{len(mutants)} mutants of {len(every)}, those of {options.date}")
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        part = options.date.toordinal() % parts.PARTS
        made = [Copy(REPOSITORY, Path(folder) / str(number), part) for number in range(options.jobs)]
        cpu_max_s = _cpu_max_s(made[0], suites)
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in made:
            copies.put(copy)

        def lives(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                return copy.lives(mutant, suites[mutant.path], cpu_max_s)
            finally:
                copies.put(copy)

        kinds, killed = collections.Counter(mutant.kind for mutant in mutants), collections.Counter[str]()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for mutant, is_alive in zip(mutants, pool.map(lives, mutants), strict=True):
                if is_alive:
                    say(f"lives: {mutant.told((REPOSITORY / mutant.path).read_bytes())}")
                killed[mutant.kind] += not is_alive
    for kind, count in sorted(kinds.items()):
        say(f"{kind}: {killed[kind]} of {count} killed")
    share = killed.total() / max(1, len(mutants))
    say(f"killed {share:.1%}, floor {options.floor:.1%}; {time.monotonic() - begun_s:.0f} s")
    return 0 if share >= options.floor else 1


def _cpu_max_s(copy: Copy, suites: Mapping[str, Sequence[Sequence[str]]]) -> int:
    """Return how much CPU a mutant may take. The suites pass without one, else all would die."""
    files = sorted({file for near_and_far in suites.values() for each in near_and_far for file in each})
    if copy.run(files, resource.RLIM_INFINITY) != PASSED:
        raise RuntimeError("the suites fail without a mutant: run them, and mend that first")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return CPU_FACTOR * math.ceil(used.ru_utime + used.ru_stime)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
