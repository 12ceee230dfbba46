"""What holds for every command there is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

import tarry.cli
from tarry.cli import commands
from tests.client.cli.conftest import Run


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words, groups included."""
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from walk(below, (*path, name))


EVERY = dict(walk(commands.tarry))
NOT_GROUPS = [path for path, command in EVERY.items() if not isinstance(command, click.Group)]
TAKING_AWAY = {
    ("clear",),
    ("trim",),
    ("delete",),
    ("subscription", "delete"),
    ("dead-letters", "purge"),
    ("deletions", "record"),
    ("deletions", "purge"),
}


def has_examples(path: tuple[str, ...], shown: str) -> bool:
    """Whether there are whole command lines of this command, or of one below it."""
    _, heading, examples = shown.partition("  Examples:\n")
    first = examples.split("\n")[0]
    return bool(heading) and first.startswith("    ") and first.split()[: len(path) + 1] == ["tarry", *path]


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_command_has_examples(run: Run, path: tuple[str, ...]) -> None:
    assert has_examples(path, run(*path, "--help").stdout)


def test_a_command_without_examples_is_found() -> None:
    assert not has_examples(("new",), "Usage: tarry new\n\n  Does it.\n\nOptions:\n")
    assert not has_examples(("new",), "Usage: tarry new\n\n  Examples:\n\nOptions:\n")


@pytest.mark.parametrize("path", NOT_GROUPS, ids=" ".join)
def test_every_command_that_does_something_takes_the_common_options(run: Run, path: tuple[str, ...]) -> None:
    shown = run(*path, "--help").stdout
    for option in ("--json", "--address", "--timeout", "TARRY_ADDRESS"):
        assert option in shown
    assert ("--yes" in shown) == (path in TAKING_AWAY)


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_example_can_be_parsed(path: tuple[str, ...]) -> None:
    help_text = EVERY[path].help or ""
    examples = [
        line.strip() for line in help_text.split("Examples:\n")[1].split("\n\n")[0].splitlines() if line.strip()
    ]
    assert examples
    for example in examples:
        for piece in example.split(" | "):
            program, *words = shlex.split(piece)
            if program != "tarry":
                continue
            words = [word for word in words if word != "rows.csv" and word != "--file"]
            command: click.Command = commands.tarry
            context = click.Context(command, info_name="tarry")
            while isinstance(command, click.Group):
                name, below, words = command.resolve_command(context, words)
                assert below is not None
                context, command = click.Context(below, parent=context, info_name=name), below
            command.parse_args(context, [word for word in words if word != "-"])


def test_the_version_is_the_distribution_s(run: Run) -> None:
    assert run("--version").stdout.startswith("tarry, version ")


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        tarry.cli.main()
    assert ended.value.code == 1
    assert "pip install 'tarry[cli]'" in capsys.readouterr().err
