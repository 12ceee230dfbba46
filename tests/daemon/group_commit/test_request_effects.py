"""A request without effects is refused; one that has some is not."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import InvariantViolated, NotFound, NotOwner, OutcomeUnknown, TarryError
from daemon.group_commit.request_effects import RequestEffects
from storage_backends import commit

LOST = NotOwner("it is another's", owner_address="another:1")


def test_a_request_without_effects_is_refused() -> None:
    with pytest.raises(NotOwner) as refused, RequestEffects():
        raise LOST
    assert refused.value is LOST


@pytest.mark.parametrize("error", [LOST, NotFound("there is none")])
def test_the_outcome_of_a_request_with_effects_is_unknown_for_the_reason_that_ended_it(error: TarryError) -> None:
    effects = RequestEffects()
    effects.begin()
    with pytest.raises(OutcomeUnknown, match=str(error)) as unknown, effects:
        raise error
    assert unknown.value.__cause__ is error
    assert unknown.value.owner_address == getattr(error, "owner_address", "")


def test_an_outcome_that_is_unknown_and_what_is_no_answer_stay_as_they_are() -> None:
    for error in (OutcomeUnknown("no answer for 10 s"), asyncio.CancelledError(), KeyError("a bug")):
        with pytest.raises(type(error)) as raised, RequestEffects(begun=True):
            raise error
        assert raised.value is error


def test_an_invariant_that_is_violated_is_told_before_its_caller_hears_of_an_unknown_outcome() -> None:
    failed: list[BaseException] = []
    violated = InvariantViolated("a row is waiting twice")
    with pytest.raises(OutcomeUnknown), RequestEffects(failed.append, begun=True):
        raise violated
    assert failed == [violated]
    for effects in (RequestEffects(begun=True), RequestEffects(failed.append)):
        with pytest.raises(InvariantViolated), effects:
            raise violated
    assert failed == [violated]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), TimeoutError(), LOST])
def test_a_commit_is_an_effect_even_if_the_wait_for_it_ends_otherwise(error: BaseException) -> None:
    effects = RequestEffects()
    with pytest.raises(type(error)), effects.committing():
        raise error
    with pytest.raises(OutcomeUnknown), effects:
        raise LOST


def test_a_commit_is_an_effect() -> None:
    effects = RequestEffects()
    with effects.committing():
        pass
    with pytest.raises(OutcomeUnknown), effects:
        raise LOST


def test_a_commit_that_is_refused_is_none() -> None:
    effects = RequestEffects()
    with pytest.raises(commit.Refused), effects.committing():
        raise commit.Refused("the epoch is 2, not 1", None)
    with pytest.raises(NotOwner), effects:
        raise LOST
