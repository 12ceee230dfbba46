"""What the table of Pulsar's tests is made of.

Owns: the form of an entry, and what stands in one. Does not own: the entries (`table`, `table_of_keys`).
"""

from __future__ import annotations

import dataclasses
import enum


class Standing(enum.Enum):
    """How a test of Pulsar stands here."""

    HERE = "has its equivalent"
    DIFFERS = "differs on purpose: the equivalent tests our rule"
    MEASURED = "is measured: never an assertion on time in a test"


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """`tests`: `module:name` under this repository. `note`: the rule that differs, or why."""

    name: str
    tests: tuple[str, ...] = ()
    standing: Standing = Standing.HERE
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    title: str
    peers: tuple[Peer, ...]


def here(name: str, *tests: str, note: str = "") -> Peer:
    return Peer(name, tests, note=note)


def differs(name: str, *tests: str, rule: str) -> Peer:
    return Peer(name, tests, Standing.DIFFERS, rule)


def measured(name: str, *places: str, note: str) -> Peer:
    return Peer(name, places, Standing.MEASURED, note)
