"""What holds for every command there is."""

from __future__ import annotations

import itertools
import re
import shlex
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import click.testing
import pytest

import tarry.cli
from tarry.cli import commands
from tests.client.cli.conftest import Run

REPOSITORY = Path(__file__).resolve().parents[3]


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
    for option in ("--json", "--address", "--timeout", "TARRY_ADDRESS", "--tls-key", "TARRY_TOKEN_FILE"):
        assert option in shown
    assert ("--yes" in shown) == (path in TAKING_AWAY)


def test_each_command_is_shown_once_under_a_heading(run: Run) -> None:
    shown = run("--help").stdout
    listed = [str(command.name) for group in commands.GROUPS.values() for command in group]
    assert sorted(listed) == sorted(commands.tarry.commands)
    assert [heading for heading in commands.GROUPS if f"\n{heading}:\n" in shown] == list(commands.GROUPS)
    assert re.findall(r"^  ([a-z][a-z-]*)  ", shown, re.MULTILINE) == listed


def test_the_options_of_every_command_are_shown_before_any_command_is_named(run: Run) -> None:
    shown = run("--help").stdout
    for option in ("--json", "--address", "--timeout", "TARRY_ADDRESS", "--tls-key", "TARRY_TOKEN_FILE"):
        assert option in shown


def parse(words: Sequence[str]) -> None:
    """Raises click.UsageError for a command line that the command would refuse. Files need not be there."""
    words = [word for word in words if word not in ("--file", "rows.csv", "-")]
    command: click.Command = commands.tarry
    context = click.Context(command, info_name="tarry")
    while isinstance(command, click.Group):
        _, words, _ = command.make_parser(context).parse_args(args=list(words))
        name, below, words = command.resolve_command(context, words)
        assert below is not None
        context, command = click.Context(below, parent=context, info_name=name), below
    command.parse_args(context, words)


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
            if program == "tarry":
                parse(words)


SESSION = re.compile(r"^(?:\$|>) +(.*\btarry .*)$", re.MULTILINE)
# What the shell puts into the lines of documents.
VARIABLES = {"hour": "11", "DUE": "2026-11-26 23:15:07.603+00:00"}


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each `tarry` of a line of a shell session."""
    lexer = shlex.shlex(string.Template(line).substitute(VARIABLES), posix=True, punctuation_chars="|;&")
    lexer.whitespace_split = True
    for is_separator, words in itertools.groupby(lexer, lambda word: set(word) <= set("|;&")):
        program, *rest = words
        if not is_separator and program == "tarry":
            yield rest


@pytest.mark.parametrize("document", ["README.md", "docs/TOUR.md"])
def test_every_command_of_a_document_can_be_parsed(document: str) -> None:
    lines = SESSION.findall((REPOSITORY / document).read_text(encoding="utf-8"))
    assert lines
    for line in lines:
        for words in commands_of(line):
            parse(words)


def test_a_command_that_is_no_more_is_found() -> None:
    (words,) = commands_of("sleep 1; tarry backlog flights departures --limit ${hour} | wc -l  # some")
    parse(words)
    with pytest.raises(click.UsageError):
        parse([*words, "--nothing"])


def test_the_version_is_the_distribution_s(run: Run) -> None:
    assert run("--version").stdout.startswith("tarry, version ")


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        tarry.cli.main()
    assert ended.value.code == 1
    assert "tarry: click and rich missing: install tarry with its extra, tarry[cli]" in capsys.readouterr().err


def test_the_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        monkeypatch.setenv("_TARRY_COMPLETE", "bash_complete")
        shown = click.testing.CliRunner().invoke(commands.tarry, prog_name="tarry").stdout
        return shown.splitlines()

    assert completed("tarry wa") == ["plain,watch"]
    assert completed("tarry receive --perm") == ["plain,--permits"]
    assert completed("tarry topics --tok") == ["plain,--token-file"]
