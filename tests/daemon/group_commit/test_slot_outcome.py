"""What became of a slot, by its answers, and what a certain slot confirms."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daemon.errors import Corruption
from daemon.group_commit.daemon_log import Certain, Lost, Next, SlotOutcome
from storage_backends.formats.log_slot_format import LogSlotKind, SlotIdentity
from tests.planted import registry

OWN = SlotIdentity(LogSlotKind.DATA, 7)
ANOTHER = SlotIdentity(LogSlotKind.DATA, 8)
FENCE = SlotIdentity(LogSlotKind.FENCE, 9)


def outcome(*sent_at_s: float) -> SlotOutcome:
    """Of slot 5, of which copies were sent at these times."""
    made = SlotOutcome("log", 5, OWN)
    for at_s in sent_at_s:
        made.sent(at_s)
    return made


def test_a_slot_that_the_only_copy_created_is_certain_and_confirms_when_it_was_sent() -> None:
    assert outcome(3.0).created(3.0) == Certain(3.0)


def test_after_any_other_answer_the_slot_is_asked_for() -> None:
    assert outcome(3.0).open() is Next.ASK


def test_a_slot_that_is_found_confirms_when_it_was_sent_first() -> None:
    assert outcome(3.0, 9.0).asked(OWN) == Certain(3.0)


def test_a_slot_that_is_absent_is_sent_again() -> None:
    assert outcome(3.0).asked(None) is Next.SEND_AGAIN


def test_a_slot_that_a_second_copy_may_have_created_is_certain_after_a_look_behind_it() -> None:
    slot = outcome(3.0, 9.0)
    assert slot.created(9.0) is Next.LOOK
    assert slot.looked(None) == Certain(9.0)


def test_a_slot_with_a_fence_in_its_place_or_behind_it_is_lost() -> None:
    assert outcome(3.0).asked(FENCE) == Lost(5)
    slot = outcome(3.0, 9.0)
    slot.created(9.0)
    assert slot.looked(FENCE) == Lost(6)


@pytest.mark.parametrize("kind", [LogSlotKind.DATA, LogSlotKind.CLOSE, LogSlotKind.OPEN])
def test_a_slot_that_nobody_else_can_have_written_is_a_store_that_breaks_its_promises(kind: LogSlotKind) -> None:
    with pytest.raises(Corruption, match="slot 5 holds a"):
        outcome(3.0).asked(SlotIdentity(kind, 8))


def test_a_slot_behind_one_that_is_not_certain_is_a_store_that_breaks_its_promises() -> None:
    slot = outcome(3.0, 9.0)
    slot.created(9.0)
    with pytest.raises(Corruption, match="slot 6 exists"):
        slot.looked(ANOTHER)


# ---- planted bugs


def a_slot_that_is_found_confirms_when_it_was_sent_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotOutcome, "asked", lambda self, found: Certain(self._sent_at_s[-1]))


def an_absent_slot_has_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotOutcome, "asked", lambda self, found: Lost(5) if found is None else Next.ASK)


def a_hedge_is_no_second_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotOutcome, "created", lambda self, sent_at_s: Certain(sent_at_s))


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    a_slot_that_is_found_confirms_when_it_was_sent_last: test_a_slot_that_is_found_confirms_when_it_was_sent_first,
    an_absent_slot_has_failed: test_a_slot_that_is_absent_is_sent_again,
    a_hedge_is_no_second_copy: test_a_slot_that_a_second_copy_may_have_created_is_certain_after_a_look_behind_it,
}


@pytest.mark.parametrize(("plant", "test"), PLANTED.items(), ids=lambda each: each.__name__)
def test_a_planted_bug_of_outcomes_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test()


registry.register("outcomes of a log slot", PLANTED)
