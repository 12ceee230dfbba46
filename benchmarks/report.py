"""Shows measurements: tables for people, JSON for programs.

A figure has one value a round, with median, range and goal; ratios are taken round by round.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

Value = float | int | str | bool


@dataclasses.dataclass(frozen=True)
class Goal:
    """The value that a median should reach, or keep below. A missed goal is no failure."""

    least: float | None = None
    most: float | None = None

    def is_met(self, median: float) -> bool:
        return (self.least is None or median >= self.least) and (self.most is None or median <= self.most)

    def __str__(self) -> str:
        bounds = [f">= {_number(self.least)}"] if self.least is not None else []
        return " ".join([*bounds, *([f"<= {_number(self.most)}"] if self.most is not None else [])])


@dataclasses.dataclass(frozen=True)
class Figure:
    """One quantity, with the values of all rounds in their order."""

    name: str
    unit: str
    values: tuple[float, ...]
    goal: Goal | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        goal = None if self.goal is None else {"text": str(self.goal), "met": self.goal.is_met(self.median)}
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "least": min(self.values),
            "most": max(self.values),
            "values": self.values,
            "goal": goal,
        }


def ratio(over: Figure, under: Figure, goal: Goal | None = None) -> Figure:
    """Return the quotients of the values that were taken in the same round."""
    values = tuple(mine / theirs for mine, theirs in zip(over.values, under.values, strict=True))
    return Figure(f"{over.name} / {under.name}", "x", values, goal)


@dataclasses.dataclass(frozen=True)
class Result:
    """One measurement.

    `problems` are rows that are not accounted for; `notes` are what a reader must know about the figures.
    """

    name: str
    parameters: Mapping[str, Value]
    figures: Sequence[Figure]
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "measurement": self.name,
            "parameters": dict(self.parameters),
            "figures": [figure.to_json() for figure in self.figures],
            "problems": list(self.problems),
            "notes": list(self.notes),
        }

    def show(self, console: Console) -> None:
        """Print the table, and below it the parameters, the notes and the problems."""
        table = Table(title=self.name, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
        table.add_column("figure", overflow="fold")
        for column in ("median", "least", "most"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("unit", no_wrap=True)
        table.add_column("goal", no_wrap=True)
        for figure in self.figures:
            numbers = (_number(each) for each in (figure.median, min(figure.values), max(figure.values)))
            table.add_row(figure.name, *numbers, figure.unit, _goal_text(figure))
        console.print(table)
        said = ", ".join(f"{name} {_text(value)}" for name, value in self.parameters.items())
        console.print(f"  {said}", style="dim", highlight=False)
        for note in self.notes:
            console.print(f"  {note}", highlight=False)
        for problem in self.problems:
            console.print(f"  NOT ACCOUNTED FOR: {problem}", style="bold red", highlight=False)


def write_json(path: Path, machine: Mapping[str, Value], results: Sequence[Result]) -> None:
    document = {"machine": dict(machine), "results": [result.to_json() for result in results]}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def show_machine(console: Console, machine: Mapping[str, Value]) -> None:
    console.print(", ".join(f"{name} {_text(value)}" for name, value in machine.items()), style="dim", highlight=False)


def _goal_text(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    return f"{figure.goal} {'met' if figure.goal.is_met(figure.median) else 'MISSED'}"


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.{1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3}f}"


def _text(value: Value) -> str:
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else _number(value)
