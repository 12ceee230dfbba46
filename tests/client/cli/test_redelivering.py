"""What `nack`, `levels` and `dead-letters` send and print, and what of redeliveries other commands show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import grpc
import pytest

import tarry
from tarry.cli import dead_letters, dispatching, output, policy_text
from tarry.v1 import admin_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests.client._support.fake_daemon import FakeDaemon, Requests, accept_all, answer, messages, opened, refuse
from tests.client.cli.conftest import Run

WHOLE = tarry.NO_BATCH_INDEX


# What is handed out again.


def test_what_was_redelivered_is_shown_with_its_count_and_message(daemon: FakeDaemon, run: Run) -> None:
    def due(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        requests.take()
        yield opened()
        batch = messages(range(3), redelivery_count=[0, 2, 1], batch_index=[WHOLE, WHOLE, 5])
        batch.messages.deliver_at_ms[2] = 0
        yield batch
        yield from ()
        for _ in requests:
            pass

    daemon.script("Subscribe", due)
    first, second, third = run("receive", "t", "s", "--count", "3", "--no-ack").stdout.splitlines()
    assert "redelivered" not in first
    # It comes as late as it was asked to: that is not lateness.
    assert second.endswith("  redelivered 2")
    assert "late" not in second
    # One that Tarry never had a time for.
    assert third.endswith("  ledger 7  entry 2  batch index 5  redelivered 1")
    lines = run("receive", "t", "s", "--count", "3", "--no-ack", "--json").stdout.splitlines()
    parsed = [json.loads(line) for line in lines]
    assert [(each["redelivery_count"], each["batch_index"]) for each in parsed] == [(0, None), (2, None), (1, 5)]
    assert parsed[2]["lateness_ms"] is None


# nack.


@pytest.fixture
def nacking(daemon: FakeDaemon) -> FakeDaemon:
    daemon.script("NegativeAcknowledge", answer(dispatch_pb2.NegativeAcknowledgeResponse()))
    return daemon


def asked(daemon: FakeDaemon) -> dispatch_pb2.NegativeAcknowledgeRequest:
    (request,) = daemon.requests("NegativeAcknowledge")
    assert isinstance(request, dispatch_pb2.NegativeAcknowledgeRequest)
    return request


def test_what_get_prints_can_be_nacked(nacking: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "POSITIONS_IN_REQUEST", 2)
    leased = dispatch_pb2.GetScheduledMessagesResponse(
        messages=messages(range(3), batch_index=[WHOLE, 5, WHOLE]).messages, lease_ms=9
    )
    nacking.script("GetScheduledMessages", answer(leased))
    nacking.script("NegativeAcknowledge", answer(dispatch_pb2.NegativeAcknowledgeResponse(ignored=1)))
    taken = run("get", "t", "s", "--json").stdout
    result = run("nack", "t", "s", "--file", "-", "--delay", "10s", stdin=taken)
    assert result.stdout == "redelivered later: 1 row, ignored: 2\n"
    first, second = nacking.requests("NegativeAcknowledge")
    assert (list(first.entry_id), list(first.deliver_at_ms), list(first.batch_index)) == (
        [0, 1],
        [1000, 1001],
        [WHOLE, 5],
    )
    assert (list(first.delay_ms), list(second.entry_id), first.reject) == ([10_000], [2], False)


def test_messages_that_tarry_did_not_hand_out_are_nacked_by_their_position(nacking: FakeDaemon, run: Run) -> None:
    result = run("nack", "t", "s", "--ledger", "9", "--entries", "0-4", "--level", "3", "--key", "N14228")
    assert result.stdout == "redelivered later: 5 rows, ignored: 0\n"
    request = asked(nacking)
    assert (list(request.ledger_id), list(request.deliver_at_ms)) == ([9] * 5, [0] * 5)
    assert (list(request.delay_level), list(request.key_hash)) == ([3], tarry.key_hash("N14228").tolist())


def test_by_default_the_policy_says_when(nacking: FakeDaemon, run: Run) -> None:
    arguments = ("--ledger", "9", "--entries", "5", "--deliver-at", "1000", "--batch-index", "2")
    parsed = json.loads(run("nack", "t", "s", *arguments, "--json").stdout)
    counts = {"given": 1, "ignored": 0, "ignored_rows": [], "dead_lettered": 0}
    assert parsed == {"topic": "t", "subscription": "s", **counts}
    request = asked(nacking)
    assert (list(request.deliver_at_ms), list(request.batch_index)) == ([1000], [2])
    assert (list(request.delay_ms), list(request.delay_level), request.reject) == ([], [], False)


def test_rejected_ones_become_dead_letters(nacking: FakeDaemon, run: Run) -> None:
    nacking.script("NegativeAcknowledge", answer(dispatch_pb2.NegativeAcknowledgeResponse(dead_lettered=2)))
    result = run("nack", "t", "s", "--ledger", "9", "--entries", "5-6", "--reject", "--reason", "no such gate")
    assert result.stdout == "dead letters: 2 rows, ignored: 0\n"
    assert (asked(nacking).reject, asked(nacking).reason) == (True, "no such gate")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give --ledger and --entries, or --file"),
        (("--ledger", "1", "--entries", "1", "--delay", "1s", "--level", "1"), "at most one of --delay and --level"),
        (("--ledger", "1", "--entries", "1", "--reject", "--level", "1"), "leave out --delay and --level"),
        (("--ledger", "1", "--entries", "1", "--reason", "x"), "--reason is for --reject"),
        (("--ledger", "1", "--entries", "1", "--at", "5", "--key", "x"), "--key is for positions that Tarry did not"),
        (("--file", "-", "--batch-index", "1"), "--file has the positions"),
        (("--ledger", "1", "--entries", "1", "--batch-index", "65536"), "65536 is not in the range"),
    ],
)
def test_a_wrong_nack_is_told_and_not_sent(daemon: FakeDaemon, run: Run, arguments: tuple[str, ...], says: str) -> None:
    result = run("nack", "t", "s", *arguments, stdin="")
    assert result.exit_code == output.EXIT_INPUT
    assert says in result.stderr
    assert daemon.calls == []


# Delay levels.

LEVELS = admin_pb2.DelayLevels(table="1s 5s 1m", clamp=False)


@pytest.fixture
def with_levels(daemon: FakeDaemon) -> FakeDaemon:
    in_force = admin_pb2.GetDelayLevelsResponse(
        levels=LEVELS, delay_ms=[1_000, 5_000, 60_000], of_topic=True, pending=[0, 2_000, 0, 7]
    )
    daemon.script("GetDelayLevels", answer(in_force))
    daemon.script(
        "SetDelayLevels",
        answer(admin_pb2.SetDelayLevelsResponse(levels=LEVELS, warnings=["level 2 is shorter than level 1"])),
    )
    return daemon


def test_levels_are_shown_with_what_is_pending_by_each(with_levels: FakeDaemon, run: Run) -> None:
    result = run("levels", "t")
    assert result.stdout.splitlines() == [
        "level\tdelay\tpending", "1\t1s\t0", "2\t5s\t2000", "3\t1m\t0", "4\t-\t7"
    ]  # fmt: skip
    assert result.stderr == "tarry: set for the topic; a level above 3 is refused\n"
    assert json.loads(run("levels", "t", "--json").stdout) == {
        "topic": "t", "table": "1s 5s 1m", "clamp": False, "of_topic": True, "delay_ms": [1_000, 5_000, 60_000],
        "pending": [0, 2_000, 0, 7], "warnings": [],
    }  # fmt: skip
    assert with_levels.count("SetDelayLevels") == 0


def test_the_daemon_s_own_levels_have_nothing_pending(daemon: FakeDaemon, run: Run) -> None:
    own = admin_pb2.GetDelayLevelsResponse(levels=admin_pb2.DelayLevels(table="1s"), delay_ms=[1_000])
    daemon.script("GetDelayLevels", answer(own))
    result = run("levels")
    assert result.stdout.splitlines() == ["level\tdelay", "1\t1s"]
    assert result.stderr == "tarry: the daemon's; a level above 1 is level 1\n"
    assert daemon.requests("GetDelayLevels") == [admin_pb2.GetDelayLevelsRequest()]


def test_levels_are_set_and_warnings_shown(with_levels: FakeDaemon, run: Run) -> None:
    result = run("levels", "t", "--set", "5s 1s")
    assert result.exit_code == 0, result.output
    assert "tarry: level 2 is shorter than level 1\n" in result.stderr
    run("levels", "t", "--set", "5s 1s", "--no-clamp")
    run("levels", "t", "--clamp")
    run("levels", "t", "--reset")
    sent = with_levels.requests("SetDelayLevels")
    assert [(each.levels.table, each.levels.clamp) for each in sent[:3]] == [
        ("5s 1s", True), ("5s 1s", False), ("1s 5s 1m", True)
    ]  # fmt: skip
    assert not sent[3].HasField("levels")


def test_a_table_that_cannot_be_read_is_told_with_the_place(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SetDelayLevels", refuse(grpc.StatusCode.INVALID_ARGUMENT, "levels.table, character 4: '5x' is"))
    result = run("levels", "t", "--set", "1s 5x")
    assert result.exit_code == output.EXIT_INPUT
    assert "character 4: '5x'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "1s"), "name the TOPIC"),
        (("t", "--reset", "--clamp"), "leave out --set and --clamp"),
        (("t", "--reset", "--set", "1s"), "leave out --set and --clamp"),
    ],
)
def test_a_wrong_change_of_levels_is_told_and_not_sent(
    daemon: FakeDaemon, run: Run, arguments: tuple[str, ...], says: str
) -> None:
    result = run("levels", *arguments)
    assert result.exit_code == output.EXIT_INPUT
    assert says in result.stderr
    assert daemon.calls == []


def test_rows_are_added_by_level(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    assert run("add", "t", "--ledger", "1", "--entries", "0-2", "--level", "3").exit_code == 0
    (requests,) = daemon.requests("StreamAddMessages")
    (sent,) = requests.taken
    assert isinstance(sent, delayed_delivery_pb2.StreamAddMessagesRequest)
    assert (list(sent.add.delay_level), list(sent.add.delay_ms)) == ([3], [])


# Dead letters.


def letters(*ids: int, dead_at_ms: int = 50, as_of_ms: int = 100, token: str = "") -> Any:
    """Of ledger 7; the odd ones were rejected."""
    return inspect_pb2.ListDeadLettersResponse(
        dead_letter_id=ids,
        ledger_id=[7] * len(ids),
        entry_id=[10 + each for each in ids],
        deliver_at_ms=[0] * len(ids),
        key_hash=[9] * len(ids),
        redelivery_count=[each + 1 for each in ids],
        dead_at_ms=[dead_at_ms] * len(ids),
        reason=[
            inspect_pb2.DEAD_LETTER_REASON_REJECTED if each % 2 else inspect_pb2.DEAD_LETTER_REASON_TOO_OFTEN
            for each in ids
        ],
        text_index=[each % 2 for each in ids],
        texts=["", "no such gate"],
        next_page_token=token,
        as_of_ms=as_of_ms,
    )


@pytest.fixture
def with_letters(daemon: FakeDaemon) -> FakeDaemon:
    """Two pages of dead letters."""
    daemon.script("ListDeadLetters", answer(letters(1, 2, token="a")), answer(letters(5)))
    stats = inspect_pb2.SubscriptionStats(subscription="s", dead_letters=3)
    daemon.script("ListSubscriptions", answer(inspect_pb2.ListSubscriptionsResponse(subscriptions=[stats])))
    daemon.script("ReplayDeadLetters", answer(admin_pb2.ReplayDeadLettersResponse(replayed=1)))
    daemon.script("PurgeDeadLetters", answer(admin_pb2.PurgeDeadLettersResponse(purged=1)))
    return daemon


def test_dead_letters_are_listed_with_why(with_letters: FakeDaemon, run: Run) -> None:
    lines = [line.split("\t") for line in run("dead-letters", "list", "t", "s").stdout.splitlines()]
    assert lines[0] == list(dead_letters._COLUMNS)
    dead = output.time_text(50)
    assert lines[1:] == [
        ["1", dead, "7", "11", "-", "2", "rejected", "no such gate", "-", "9"],
        ["2", dead, "7", "12", "-", "3", "too often", "-", "-", "9"],
        ["5", dead, "7", "15", "-", "6", "rejected", "no such gate", "-", "9"],
    ]
    with_letters.script("ListDeadLetters", answer(letters(1)))
    assert json.loads(run("dead-letters", "list", "t", "s", "--json").stdout) == {
        "dead_letter_id": 1, "ledger_id": 7, "entry_id": 11, "deliver_at_ms": 0, "redelivery_count": 2,
        "dead_at_ms": 50, "batch_index": None, "key_hash": 9, "reason": "rejected", "text": "no such gate",
    }  # fmt: skip


@pytest.mark.parametrize(("command", "method"), [("ack", "Acknowledge"), ("nack", "NegativeAcknowledge")])
def test_a_position_that_is_refused_is_named_by_its_line(
    daemon: FakeDaemon, run: Run, command: str, method: str
) -> None:
    text = "entry_id[1]: position (1, 2) is that of entry_id[0], too"
    daemon.script(method, refuse(grpc.StatusCode.INVALID_ARGUMENT, text))
    line = '{"ledger_id": 1, "entry_id": 2, "deliver_at_ms": 3}\n'
    result = run(command, "t", "s", "--file", "-", stdin=f"{line}\n{line}")
    assert result.exit_code == output.EXIT_INPUT
    assert result.stderr == "tarry: -, line 3: entry_id: position (1, 2) is that of -, line 1: entry_id, too.\n"


def test_the_delay_of_a_negative_acknowledgement_that_is_refused_is_named_by_its_option(
    daemon: FakeDaemon, run: Run
) -> None:
    daemon.script("NegativeAcknowledge", refuse(grpc.StatusCode.OUT_OF_RANGE, "delay_ms[0] is 9; the largest is 8"))
    line = '{"ledger_id": 1, "entry_id": 2, "deliver_at_ms": 3}'
    for given, stdin in ((("--ledger", "1", "--entries", "2"), None), (("--file", "-"), line)):
        result = run("nack", "t", "s", *given, "--delay", "9ms", stdin=stdin)
        assert (result.exit_code, result.stderr) == (output.EXIT_INPUT, "tarry: --delay is 9; the largest is 8.\n")


def test_dead_letters_are_chosen(with_letters: FakeDaemon, run: Run) -> None:
    result = run(
        "dead-letters", "list", "t", "s", "--id", "9", "--id", "3", "--ledger", "7", "--reason", "too-often",
        "--since", "1900000000000", "--until", "1900000001000", "--limit", "2",
    )  # fmt: skip
    assert "there are more rows" in result.stderr
    (request,) = with_letters.requests("ListDeadLetters")
    assert request == inspect_pb2.ListDeadLettersRequest(
        topic="t",
        subscription="s",
        filter=inspect_pb2.DeadLetterFilter(
            dead_letter_id=[3, 9],
            ledgers=inspect_pb2.LedgerRange(first_ledger_id=7, last_ledger_id=7),
            reason=inspect_pb2.DEAD_LETTER_REASON_TOO_OFTEN,
            from_ms=1_900_000_000_000,
            until_ms=1_900_000_001_000,
        ),
        page_size=2,
    )


def test_that_there_are_no_dead_letters_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListDeadLetters", answer(letters()))
    assert "there are no dead letters of t for subscription s" in run("dead-letters", "list", "t", "s").stderr
    assert "there are no dead letters of these of" in run("dead-letters", "list", "t", "s", "--id", "3").stderr
    assert run("dead-letters", "list", "t", "s", "--json").stdout == ""


def test_dead_letters_are_replayed_in_portions(with_letters: FakeDaemon, run: Run) -> None:
    result = run("dead-letters", "replay", "t", "s", "--delay", "10s")
    assert (result.exit_code, result.stdout) == (0, "replayed 2 dead letters of s\n")
    sent = with_letters.requests("ReplayDeadLetters")
    assert [(list(each.filter.dead_letter_id), each.delay_ms) for each in sent] == [([1, 2], 10_000), ([5], 10_000)]


def test_dead_letters_that_stay_are_told_by_the_exit_status(with_letters: FakeDaemon, run: Run) -> None:
    with_letters.script("ReplayDeadLetters", answer(admin_pb2.ReplayDeadLettersResponse(replayed=1, skipped=1)))
    result = run("dead-letters", "replay", "t", "s")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert result.stdout == "replayed 2 dead letters of s; 2 stay, because a row of their position exists\n"


def test_what_dies_again_while_it_is_replayed_is_not_replayed_for_ever(with_letters: FakeDaemon, run: Run) -> None:
    newer = letters(8, 9, dead_at_ms=150, as_of_ms=200, token="c")
    with_letters.script("ListDeadLetters", answer(letters(1, token="a")), answer(letters(token="b")), answer(newer))
    parsed = json.loads(run("dead-letters", "replay", "t", "s", "--json").stdout)
    assert parsed == {"topic": "t", "subscription": "s", "replayed": 1, "skipped": 0}
    assert with_letters.count("ListDeadLetters") == 3


def test_dead_letters_are_purged(with_letters: FakeDaemon, run: Run) -> None:
    result = run("dead-letters", "purge", "t", "s", "--reason", "rejected", "--yes")
    assert result.stdout == "forgot 2 dead letters of s\n"
    assert with_letters.requests("ListDeadLetters")[0].filter.reason == inspect_pb2.DEAD_LETTER_REASON_REJECTED
    assert [list(each.filter.dead_letter_id) for each in with_letters.requests("PurgeDeadLetters")] == [[1, 2], [5]]


def test_where_nothing_is_taken_away_nobody_is_asked(with_letters: FakeDaemon, run: Run) -> None:
    stats = inspect_pb2.SubscriptionStats(subscription="s")
    with_letters.script("ListSubscriptions", answer(inspect_pb2.ListSubscriptionsResponse(subscriptions=[stats])))
    with_letters.script("ListDeadLetters", answer(letters()))
    result = run("dead-letters", "purge", "t", "s", stdin="")
    assert (result.exit_code, result.stdout) == (0, "forgot 0 dead letters of s\n")
    with_letters.script("DeleteSubscription", answer(dispatch_pb2.DeleteSubscriptionResponse()))
    assert "Delete subscription s of t? " in run("subscription", "delete", "t", "s", stdin="y\n").stderr


def test_a_subscription_that_is_not_there_is_told(with_letters: FakeDaemon, run: Run) -> None:
    result = run("dead-letters", "replay", "t", "other")
    assert result.exit_code == output.EXIT_REFUSED
    assert "topic 't' has no subscription 'other'" in result.stderr
    assert with_letters.count("ReplayDeadLetters") == 0


# Redelivery policies as text.


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("constant 10s", tarry.ConstantDelay(10_000)),
        ("constant 0ms", tarry.ConstantDelay(0)),
        ("linear 1s +5s max 1m", tarry.LinearDelay(1_000, 5_000, 60_000)),
        ("linear 1s +1500ms", tarry.LinearDelay(1_000, 1_500)),
        ("exponential 1s x2 max 10m jitter 0.2", tarry.ExponentialDelay(1_000, 2.0, 600_000, 0.2)),
        ("exponential 1s x1.2345678", tarry.ExponentialDelay(1_000, 1.2345678)),
        ("list 1s 5s 30s", tarry.DelayList((1_000, 5_000, 30_000))),
        ("ladder", tarry.DelayLadder()),
    ],
)
def test_a_redelivery_policy_is_written_as_it_is_read(text: str, policy: tarry.RedeliveryPolicy) -> None:
    assert policy_text.parse(text) == policy
    assert policy_text.redelivery_text(policy) == text


def test_what_goes_without_saying_may_be_left_out() -> None:
    assert policy_text.parse("exponential  1s") == tarry.ExponentialDelay(1_000)
    assert policy_text.parse("exponential 1s jitter 0.5 max 1h") == tarry.ExponentialDelay(1_000, 2.0, 3_600_000, 0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no kind ''"),
        ("sometimes 1s", "there is no kind 'sometimes'"),
        ("constant", "that is not how constant is written"),
        ("constant soon", "'soon' is not a duration"),
        ("constant 1s max 5s", "constant has no 'max' there"),
        ("linear 1s 5s", "that is not how linear is written"),
        ("linear 1s +5s jitter 1", "linear has no 'jitter' there"),
        ("exponential 1s x", "'' is not a number"),
        ("exponential 1s max", "max has one value"),
        ("exponential 1s max 1s max 2s", "max has one value"),
        ("list", "that is not how list is written"),
        ("ladder 3", "that is not how ladder is written"),
    ],
)
def test_what_is_no_redelivery_policy_is_told_with_how_it_is_written(text: str, says: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        policy_text.Redelivery()(text)
    assert says in refused.value.message
    assert "write for example 'constant 10s'" in refused.value.message
