"""The account of answers finds each kind of breach, and lets pass what a lost answer leaves open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import tarry
from tarry import errors
from tests.wire._support.answers import (
    ALREADY_DUE,
    DUPLICATE,
    IGNORED,
    NOT_FOUND,
    OK,
    REFUSED,
    UNKNOWN,
    Answers,
    Asked,
    Identity,
    What,
)
from tests.wire._support.traffic import now_ms

ROW: Identity = ("topic", 1, 0)
DUE_MS = 1_000
FAR_MS = now_ms() + 3_600_000
STREAM, OTHER = 1, 2


class Story:
    """Requests and answers of one row."""

    def __init__(self) -> None:
        self.answers = Answers()

    def ask(
        self, what: What, told: str | None, due_ms: int = DUE_MS, count: int = 0, delay_ms: int = 0
    ) -> Callable[[str], None]:
        """A request and its answer; None: it is given later, to what is returned."""
        numbers = self.answers.asked([ROW], [Asked(what, due_ms, count, delay_ms)], "a call")

        def answer(told: str) -> None:
            self.answers.told([ROW], numbers, [[told]])

        if told is not None:
            answer(told)
        return answer

    def comes(self, count: int = 0, *, stream: int = STREAM, due_ms: int = DUE_MS, at_ms: int | None = None) -> None:
        self.answers.came(stream, [(ROW, due_ms, count)], at_ms=now_ms() if at_ms is None else at_ms)

    def seen(self, *, due_ms: int | None = None, count: int = 0, dead: int = 0) -> None:
        rows = {} if due_ms is None else {ROW: (due_ms, count)}
        self.answers.seen(rows, Counter({ROW: dead}))

    @property
    def reason(self) -> str:
        """Why it cannot have been so; empty if it can."""
        breaches = self.answers.judge()
        assert len(breaches) <= 1
        return breaches[0].partition(": ")[2].partition(":")[0] if breaches else ""


@pytest.fixture
def added() -> Story:
    story = Story()
    story.ask(What.ADD, OK)
    return story


REFUSED_TOOK_EFFECT = "a request that was refused took effect"
NOT_AS_ANSWERED = "it is not as it was answered"
WRONG_COUNT = "its redelivery count is wrong"
IMPOSSIBLE = "no order of what was asked leads to this"


def test_what_goes_as_it_should_breaks_nothing(added: Story) -> None:
    added.comes()
    added.ask(What.NACK, OK)
    added.comes(1, stream=OTHER)
    added.comes(1, stream=3)
    added.ask(What.ACK, IGNORED)
    added.ask(What.ACK, OK, count=1)
    added.seen()
    assert added.reason == ""


@pytest.mark.parametrize("what", [What.ACK, What.REJECT, What.TRIM])
def test_a_refused_request_took_effect(added: Story, what: What) -> None:
    added.comes()
    added.ask(what, REFUSED)
    added.seen(dead=what is What.REJECT)
    assert added.reason == REFUSED_TOOK_EFFECT


def test_a_refused_request_that_took_effect_is_found_by_the_answer_to_the_next_one(added: Story) -> None:
    added.comes()
    added.ask(What.ACK, REFUSED)
    added.ask(What.ACK, IGNORED)
    assert added.reason == REFUSED_TOOK_EFFECT


def test_a_position_of_the_log_comes_once_more_because_a_refused_nack_took_effect() -> None:
    story = Story()
    story.ask(What.NACK, REFUSED, due_ms=0)
    story.comes(1, due_ms=0)
    assert story.reason == REFUSED_TOOK_EFFECT


def test_a_position_of_the_log_that_is_gone_may_be_rejected() -> None:
    story = Story()
    story.ask(What.NACK, OK, due_ms=0)
    story.comes(1, due_ms=0)
    story.ask(What.ACK, OK, due_ms=0, count=1)
    story.ask(What.REJECT, OK, due_ms=0, count=1)
    story.seen(dead=1)
    assert story.reason == ""


@pytest.mark.parametrize("lost", [UNKNOWN, REFUSED])
def test_a_request_that_was_repeated_after_a_lost_answer_may_be_ignored(added: Story, lost: str) -> None:
    added.comes()
    added.ask(What.ACK, lost)
    added.ask(What.ACK, IGNORED)
    assert added.reason == ("" if lost == UNKNOWN else REFUSED_TOOK_EFFECT)


def test_what_is_acknowledged_comes(added: Story) -> None:
    added.comes()
    added.ask(What.ACK, OK)
    added.comes(stream=OTHER)
    assert added.reason == NOT_AS_ANSWERED


def test_what_is_being_acknowledged_may_come(added: Story) -> None:
    added.comes()
    answer = added.ask(What.ACK, None)
    added.comes(stream=OTHER)
    answer(OK)
    assert added.reason == ""


def test_what_was_received_before_the_answer_counts_as_such_though_it_is_noted_later(added: Story) -> None:
    received_ms = now_ms()
    while now_ms() == received_ms:
        pass
    added.ask(What.ACK, OK)
    added.comes(at_ms=received_ms)
    assert added.reason == ""


def test_an_unanswered_add_may_be_a_new_row_at_any_time(added: Story) -> None:
    added.comes()
    added.ask(What.ACK, OK)
    added.ask(What.ADD, UNKNOWN)
    added.comes()
    assert added.reason == ""


@pytest.mark.parametrize("due_ms", [DUE_MS, FAR_MS], ids=["due", "far"])
def test_an_answered_row_is_lost(due_ms: int) -> None:
    story = Story()
    story.ask(What.ADD, OK, due_ms)
    story.seen()
    assert story.reason == NOT_AS_ANSWERED


def test_a_row_comes_early_or_twice_on_one_stream(added: Story) -> None:
    added.comes()
    assert added.reason == ""
    added.comes()
    assert added.reason == IMPOSSIBLE
    early = Story()
    early.ask(What.ADD, OK, FAR_MS)
    early.comes(due_ms=FAR_MS)
    assert early.reason == IMPOSSIBLE


def test_a_nacked_row_comes_before_its_delay(added: Story) -> None:
    added.comes()
    added.ask(What.NACK, OK, delay_ms=60_000)
    added.comes(1)
    assert added.reason == IMPOSSIBLE


@pytest.mark.parametrize("count", [0, 2])
def test_a_redelivery_count_is_wrong(added: Story, count: int) -> None:
    added.comes()
    added.ask(What.NACK, OK)
    added.comes(count, stream=OTHER)
    assert added.reason == (WRONG_COUNT if count else NOT_AS_ANSWERED)


def test_a_nack_that_is_repeated_after_a_lost_answer_counts_once(added: Story) -> None:
    added.comes()
    added.ask(What.NACK, UNKNOWN)
    added.ask(What.NACK, OK)
    added.comes(1)
    assert added.reason == ""
    added.comes(2, stream=OTHER)
    assert added.reason == WRONG_COUNT


@pytest.mark.parametrize("what", [What.CANCEL, What.RESCHEDULE])
def test_a_withdrawal_says_what_is_true(what: What) -> None:
    story = Story()
    story.ask(What.ADD, OK, FAR_MS)
    story.ask(What.ADD, DUPLICATE, FAR_MS + 1)
    story.ask(what, OK)
    story.ask(what, NOT_FOUND if what is What.CANCEL else ALREADY_DUE)
    assert story.reason == ""
    story.comes(due_ms=FAR_MS, at_ms=FAR_MS)
    assert story.reason == NOT_AS_ANSWERED


def test_a_late_add_and_a_late_reject_make_one_dead_letter(added: Story) -> None:
    added.comes()
    added.ask(What.REJECT, UNKNOWN)
    added.ask(What.ADD, UNKNOWN)
    added.seen(due_ms=DUE_MS, dead=1)
    assert added.reason == ""
    added.seen(dead=2)
    assert added.reason == IMPOSSIBLE


def test_what_nobody_sent_and_what_no_daemon_may_say_are_breaches() -> None:
    answers = Answers()
    answers.came(STREAM, [(ROW, DUE_MS, 0)], at_ms=now_ms())
    numbers = answers.asked([("topic", 2, 0)], [Asked(What.ADD)], "a call")
    answers.told([("topic", 2, 0)], numbers, errors.Internal("a bug"))
    assert len(answers.judge()) == 2


@pytest.mark.parametrize(
    ("error", "may_land"),
    [
        (errors.NotOwner("another one"), False),
        (errors.Aborted("a lease"), False),
        (errors.Unavailable("a former owner", former_owner_ms=10), False),
        (errors.Unavailable("the connection is lost"), True),
        (errors.OutcomeUnknown("the shard is lost"), True),
        (errors.DeadlineExceeded("no answer"), True),
    ],
)
def test_a_refusal_says_that_nothing_was_changed(error: tarry.TarryError, may_land: bool) -> None:
    answers = Answers()
    answers.told([ROW], answers.asked([ROW], [Asked(What.ADD, DUE_MS)], "a call"), error)
    answers.seen({ROW: (DUE_MS, 0)}, Counter())
    assert bool(answers.judge()) is not may_land


def test_what_comes_under_an_epoch_that_is_over_is_told_apart() -> None:
    answers = Answers()
    assert answers.reached("topic", 2)
    assert not answers.reached("topic", 1)
    assert answers.reached("other", 1)
