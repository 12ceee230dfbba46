"""The report on the structure counts what a small house has."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import house_counts

SETTINGS = """
[tool.importlinter]
root_packages = ["daemon", "tarry"]
[tool.mypy]
mypy_path = ["client/src"]
"""
FILES = {
    "daemon/__init__.py": "",
    "daemon/rooms.py": """
class Port(Protocol): ...
class Row:
    def _named_once(self): ...
    def _named_twice(self): ...
    def take(self):
        self._named_once()
        self._named_twice(), self._named_twice()
def __dunder(): ...
""",
    "daemon/lower/__init__.py": "",
    "daemon/lower/rows.py": """
from daemon.upper import callers
from daemon import rooms
class Row: ...
""",
    "daemon/upper/__init__.py": "",
    "daemon/upper/callers.py": """
if TYPE_CHECKING:
    from daemon.lower.rows import Row
def call() -> None:
    import daemon.rooms
""",
    "daemon/upper/rows.py": "",
    "client/src/tarry/__init__.py": "from tarry.threads import made\n",
    "client/src/tarry/threads/made.py": "class Row: ...\n",
    "client/src/tarry/v1/wire_pb2.py": "class Row: ...\n",
    "scripts/script.py": "pass\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in ({"pyproject.toml": SETTINGS} | FILES).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def report(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert house_counts.main(arguments, root) == 0
    return capsys.readouterr().out.splitlines()


def test_the_report_counts_modules_names_and_circles(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = report(root, capsys, "--list")
    assert {
        "modules with one importer: 3 of 5; daemon and storage_backends 2 of 4",
        "  daemon.lower.rows, 4 lines <- daemon.upper.callers",
        "private functions that their module names once: 1 of 2, 1 lines; of at most 6 lines 1; the daemon's 1 of 2",
        "Protocols: 1, named in no other module 1; the daemon's 1",
        "  daemon.rooms.Port",
        "public class names that stand twice: 1; the daemon's 1; without the client 1",
        "  Row: daemon.lower.rows, daemon.rooms",
        "file names that stand twice: 1",
        "  rows.py: daemon/lower/rows.py, daemon/upper/rows.py",
        "imports between modules: 5; the daemon's 4",
        "modules with imports under TYPE_CHECKING: 1",
        "circles of modules: 1",
        "  daemon.lower.rows daemon.upper.callers",
        "circles of folders of a package: 1",
        "  daemon.lower daemon.upper",
    } - {*lines} == set()
    assert [line.split()[:3] for line in lines if line.startswith(("daemon ", "tarry ", "scripts "))] == [
        ["daemon", "7", "18"],
        ["tarry", "2", "2"],
        ["scripts", "1", "1"],
    ]


def test_the_report_is_of_some_packages_where_these_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "imports between modules: 1; the daemon's 0" in report(root, capsys, "--only", "tarry")
    with pytest.raises(SystemExit):
        house_counts.main(["--only", "daemons"], root)
    assert "there is no such package" in capsys.readouterr().err
