"""How code of an event loop becomes code of threads. That what is checked in is made so is a step of the gate."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, of a checkout of its own that has the client alone."""
    spec = importlib.util.spec_from_file_location("gen_threads", REPOSITORY / "scripts" / "gen_threads.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = Path("client", "src", "tarry")
    shutil.copytree(REPOSITORY / client, tmp_path / client, ignore=shutil.ignore_patterns("v1", "cli", "__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gen_threads.py", *arguments])
    status = script.main()
    assert isinstance(status, int)
    return status


def append(script: ModuleType, folder: Path, name: str, text: str) -> None:
    with (script.REPOSITORY / folder / name).open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("event_loop", "threads"),
    [
        ("async def get(self) -> AsyncIterator[int]: ...", "def get(self) -> Iterator[int]: ..."),
        ("async with a as b: return await b.c()", "with a as b: return b.c()"),
        ("[each async for each in await a()]", "[each for each in a()]"),
        ("`(await client.stats(name(1))).pending`", "`client.stats(name(1)).pending`"),
        ("`sum([each.rows async for each in pages()])`", "`sum(each.rows for each in pages())`"),
        ("Callable[[str], Awaitable[Page[T]]]", "Callable[[str], Page[T]]"),
        ("on_event_loop.promise() # `tarry.aio.Client`", "in_threads.promise() # `tarry.Client`"),
        ("from tarry.aio import session", "from tarry.threads import session"),
        ("    @on_event_loop.opening\n    async def open(self): ...", "    def open(self): ..."),
        ("async def __aenter__(self): raise StopAsyncIteration", "def __enter__(self): raise StopIteration"),
    ],
)
def test_what_is_awaited_on_an_event_loop_is_called_in_a_thread(
    script: ModuleType, event_loop: str, threads: str
) -> None:
    assert script.threaded(event_loop) == threads


def test_what_differs_is_named_and_made_good(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append(script, script.WRITTEN, "session.py", "\n\nasync def added() -> None: ...\n")
    append(script, script.GENERATED, "futures.py", "# by hand\n")
    append(script, script.GENERATED, "left_over.py", "")
    assert run(script, monkeypatch, "--check") == 1
    said = capsys.readouterr().err
    assert [line.split(":")[0].rsplit("/")[-1] for line in said.splitlines()] == [
        "futures.py",
        "left_over.py",
        "session.py",
    ]
    assert run(script, monkeypatch) == 0
    assert "\ndef added() -> None: ...\n" in (script.REPOSITORY / script.GENERATED / "session.py").read_text()
    assert run(script, monkeypatch, "--check") == 0


def test_a_phrase_that_nobody_says_any_more_is_refused(script: ModuleType) -> None:
    script.PHRASES["What nobody says."] = ""
    with pytest.raises(SystemExit, match="What nobody says"):
        script.generate()


@pytest.mark.parametrize("unknown", ["asyncio.sleep(1)", "value: Awaitable[Callable[[list[int]], int]]"])
def test_what_no_rule_makes_code_of_threads_is_refused(script: ModuleType, unknown: str) -> None:
    append(script, script.WRITTEN, "futures.py", f"\n\n{unknown}\n")
    with pytest.raises(SystemExit, match="no rule says what this is in threads"):
        script.generate()
