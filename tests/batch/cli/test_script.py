"""`tarry-spark` where not all is installed that it needs."""

from __future__ import annotations

import importlib

import click.testing
import pytest

from batch.cli import entry, script


def test_without_the_extra_the_command_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        script.main()
    # A text is printed by the interpreter, which ends with 1 then.
    assert ended.value.code == ("tarry-spark: click and rich missing; install tarryd[spark] (docs/INSTALL.md)")


def test_a_command_whose_libraries_are_missing_says_which_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(importlib, "import_module", missing)
    result = click.testing.CliRunner().invoke(entry.cli, ["forecast"])
    assert result.exit_code == 1
    assert result.stderr == ("Error: matplotlib is not installed; install tarryd[spark] (docs/INSTALL.md)\n")
