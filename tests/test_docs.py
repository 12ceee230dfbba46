"""What documents name exists: links, paths, `make` targets, settings, series. And no file names a machine's paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# What make, the tools and a run of the daemon leave in a checkout.
NOT_OURS = {"__pycache__", "build", "dist", "tarry-data"}
SOURCES = {".cfg", ".json", ".md", ".proto", ".py", ".pyi", ".service", ".sh", ".toml", ".yaml", ".yml"}
# Made by tools, or long texts of others.
# Where the history is elsewhere, `.git` is a file.
NOT_READ = {"uv.lock", "gen_proto.py.lock", "LICENSE", ".git"}

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
INSTALLED_BY_NAME = re.compile(r"(?:pip|tool) install (?:-\S+ )*['\"]?tarry|uv add (?:-\S+ )*['\"]?tarry")
MACHINE_PATH = re.compile(r"(?<![\w.}/-])/(?:work|root|home)/\w")


def walk() -> Iterator[Path]:
    for folder, folders, names in os.walk(REPOSITORY):
        folders[:] = sorted(name for name in folders if name not in NOT_OURS and (name[0] != "." or name == ".ci"))
        for name in sorted(names):
            yield Path(folder, name)


FILES = tuple(walk())
DOCUMENTS = tuple(path for path in FILES if path.suffix == ".md")


def inline_code(text: str) -> list[str]:
    return INLINE_CODE.findall(FENCE.sub("", text))


def code(text: str) -> str:
    return "\n".join([*FENCE.findall(text), *inline_code(text)])


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(text: str, document: Path) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        if not path.exists():
            broken.append(target)
        elif anchor and path.suffix == ".md":
            linked = text if path == document else path.read_text(encoding="utf-8")
            if anchor not in map(slug, HEADING.findall(FENCE.sub("", linked))):
                broken.append(target)
    return broken


def absent_paths(text: str, document: Path) -> list[str]:
    """Code that looks like a path below the root of the repository and is none."""
    top = {path.name for path in REPOSITORY.iterdir()} - NOT_OURS
    named = (name for name in inline_code(text) if re.fullmatch(r"\.?\w[\w.-]*(/[\w.*-]+)+/?", name))
    ours = (name for name in named if name.split("/", 1)[0] in top)
    return [name for name in ours if not list(REPOSITORY.glob(name.rstrip("/")))]


def absent_targets(text: str, document: Path) -> list[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    return sorted(set(re.findall(r"\bmake ([a-z][a-z-]*)", code(text))) - targets)


def absent_settings(text: str, document: Path) -> list[str]:
    """Code such as `store.path` that is neither a setting nor a module."""
    configuration = (REPOSITORY / "docs" / "CONFIGURATION.md").read_text(encoding="utf-8")
    settings, sections = set(), []
    for line in configuration.splitlines():
        if heading := re.fullmatch(r"## `(?:\[\[)?([\w.]+)(?:\]\])?`", line):
            sections.append(heading[1])
        elif sections and (row := re.match(r"\| `(\w+)` \|", line)):
            settings.add(f"{sections[-1]}.{row[1]}")
    named = set(
        re.findall(rf"(?<![\w./])(?:{'|'.join(map(re.escape, sections))})\.\w+(?![\w.])", "\n".join(inline_code(text)))
    )
    return sorted(name for name in named - settings - set(sections) if not is_module(name))


def is_module(name: str) -> bool:
    """Whether it is a module, or a name in one."""
    for dotted in (name, name.rpartition(".")[0]):
        path = REPOSITORY.joinpath(*dotted.split("."))
        if path.is_dir() or path.with_suffix(".py").is_file():
            return dotted == name or path.is_file() or path.with_suffix(".py").is_file()
    return False


def absent_series(text: str, document: Path) -> list[str]:
    pages = (REPOSITORY / "docs" / "METRICS.md", REPOSITORY / "relay" / "README.md")
    known = "".join(page.read_text(encoding="utf-8") for page in pages)
    return sorted({name for name in re.findall(r"\btarry_[a-z_]*[a-z]\b(?!\.py|-)", code(text)) if name not in known})


CHECKS: dict[str, Callable[[str, Path], list[str]]] = {
    "links": broken_links,
    "paths": absent_paths,
    "make targets": absent_targets,
    "settings": absent_settings,
    "series": absent_series,
}


README_WORDS_MAX = 800
# A command that takes a file, or one that makes it.
FILE_TAKEN_OR_MADE = re.compile(r"--(?:file|config) ([\w.]+)|>{1,2}([\w.]+)")
TERM = re.compile(r"^\| \*\*([^*]+)\*\* \|", re.MULTILINE)


def unmade_files(text: str) -> list[str]:
    """Files that a session of commands takes before a command of it has made them."""
    made: set[str] = set()
    unmade = []
    for taken, written in FILE_TAKEN_OR_MADE.findall("\n".join(FENCE.findall(text))):
        if taken and taken not in made:
            unmade.append(taken)
        made.add(written)
    return unmade


def unused_terms(glossary: str, texts: Iterable[str]) -> list[str]:
    """Terms of a glossary that none of the texts has, in capitals or not."""
    everything = "\n".join(texts).lower()
    return [term for term in TERM.findall(glossary) if not re.search(rf"\b{re.escape(term.lower())}\b", everything)]


def named(paths: Iterable[Path]) -> list[str]:
    return [path.relative_to(REPOSITORY).as_posix() for path in paths]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("document", DOCUMENTS, ids=named(DOCUMENTS))
def test_what_a_document_names_exists(document: Path, check: str) -> None:
    assert CHECKS[check](document.read_text(encoding="utf-8"), document) == []


@pytest.mark.parametrize(
    ("check", "text", "absent"),
    [
        ("links", "[a](docs/NOWHERE.md), [b](README.md), [c](https://example.org)", "docs/NOWHERE.md"),
        ("links", "# Here\n[a](#there), [b](#here)", "#there"),
        ("paths", "`daemon/nowhere.py`, `daemon/main.py`, `shards/00/journal`", "daemon/nowhere.py"),
        ("make targets", "`make nothing`, `make test`", "nothing"),
        ("make targets", "```\nmake nothing\n```", "nothing"),
        ("settings", "`store.nothing`, `store.path`, `daemon.main`", "store.nothing"),
        ("series", "`tarry_nothing_total`, `tarry_serving`", "tarry_nothing_total"),
    ],
)
def test_what_does_not_exist_is_found(check: str, text: str, absent: str) -> None:
    assert CHECKS[check](text, REPOSITORY / "README.md") == [absent]


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS_MAX


def test_the_tour_makes_the_files_that_it_uses() -> None:
    assert unmade_files((REPOSITORY / "docs" / "TOUR.md").read_text(encoding="utf-8")) == []


def test_a_file_that_is_used_before_it_is_made_is_found() -> None:
    made_late = "$ tarry add flights --file rows.csv\n$ python3 - >rows.csv <<'END'\n"
    assert unmade_files(f"```\n{made_late}$ tarryd --config rows.csv\n```\n") == ["rows.csv"]


def test_the_example_of_sizing_adds_up() -> None:
    example = (REPOSITORY / "docs" / "SIZING.md").read_text(encoding="utf-8").partition("## An example")[2]
    parts_mb, sums = 0, []
    for is_sum, size_mb in re.findall(r"^\| (\*\*)?.*? (?:\*\*)?([\d,]+) MB(?:\*\*)? \|$", example, re.MULTILINE):
        if is_sum:
            sums.append((parts_mb, int(size_mb.replace(",", ""))))
            parts_mb = 0
        else:
            parts_mb += int(size_mb.replace(",", ""))
    assert len(sums) == 2
    assert all(added == said for added, said in sums)


def test_every_term_of_the_glossary_is_used() -> None:
    glossary = REPOSITORY / "docs" / "GLOSSARY.md"
    text = glossary.read_text(encoding="utf-8")
    others = (path.read_text(encoding="utf-8") for path in DOCUMENTS if path != glossary)
    assert len(TERM.findall(text)) >= 30
    assert unused_terms(text, others) == []


def test_a_term_that_nobody_uses_is_found() -> None:
    glossary = "| **head** | a place | none |\n| **lane** | a way | none |\n"
    assert unused_terms(glossary, ["Behind the Head.", "planes"]) == ["lane"]


def test_nothing_of_ours_is_installed_by_a_name_that_no_index_has() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in FILES if path.suffix in SOURCES}
    assert named(path for path, text in texts.items() if INSTALLED_BY_NAME.search(text)) == []


@pytest.mark.parametrize("command", ["pip install", "uv tool install", "uv add"])
@pytest.mark.parametrize("name", ["tarry", "'tarryd[spark]'", "--upgrade tarry-storage"])
def test_an_installation_by_name_is_found(command: str, name: str) -> None:
    assert INSTALLED_BY_NAME.search(f"{command} {name}")
    assert not INSTALLED_BY_NAME.search(f"{command} --quiet dist/tarry-0.1.0-py3-none-any.whl")


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in FILES:
        if path.name not in NOT_READ and (path.suffix in SOURCES or not path.suffix):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if MACHINE_PATH.search(line):
                    found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_a_path_of_one_machine_is_found(folder: str) -> None:
    assert MACHINE_PATH.search(f"see /{folder}/x")
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/x and a/{folder}/x and {{tmp}}/{folder}/x")
