"""The two clients have the same names, arguments and defaults."""

from __future__ import annotations

import inspect

import pytest

import tarry
import tarry.aio
from tarry.aio import session

PAIRS = [
    (tarry.Client, tarry.aio.Client),
    (tarry.AddStream, tarry.aio.AddStream),
    (tarry.Producer, tarry.aio.Producer),
    (tarry.Subscription, tarry.aio.Subscription),
    (tarry.KeySharedSubscription, tarry.aio.KeySharedSubscription),
]


def public(kind: type) -> dict[str, object]:
    """What a program may use: not what the session calls."""
    hidden = vars(session.Handler)
    named = {name: member for base in reversed(kind.__mro__[:-1]) for name, member in vars(base).items()}
    return {name: member for name, member in named.items() if not name.startswith("_") and name not in hidden}


def parameters(member: object) -> list[tuple[str, object, object]]:
    if isinstance(member, property):
        return []
    assert callable(member)
    return [(each.name, each.kind, each.default) for each in inspect.signature(member).parameters.values()]


@pytest.mark.parametrize(("threads", "loop"), PAIRS, ids=[threads.__name__ for threads, _ in PAIRS])
def test_they_are_the_same(threads: type, loop: type) -> None:
    assert public(threads).keys() == public(loop).keys()
    for name, member in public(threads).items():
        other = public(loop)[name]
        assert isinstance(member, property) == isinstance(other, property), name
        assert parameters(member) == parameters(other), name
    assert parameters(vars(threads)["__init__"]) == parameters(vars(loop)["__init__"])


@pytest.mark.parametrize("kind", [each for pair in PAIRS for each in pair])
def test_everything_public_is_documented(kind: type) -> None:
    assert all(getattr(member, "__doc__", None) for member in public(kind).values())
