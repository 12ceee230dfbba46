"""What every command shares: being asked, and failures."""

from __future__ import annotations

import json
import threading

import click.testing
import grpc
import pytest

from tarry.cli import commands, connection, output
from tarry.v1 import admin_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests._support.patience import within_some_time
from tests.client._support import fake_daemon
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.cli.conftest import Run

ASKED = [
    (("delete", "t"), "DeleteTopic", "Delete topic t with its rows, subscriptions and policy?"),
    (
        ("subscription", "delete", "t", "s"),
        "DeleteSubscription",
        "Delete subscription s of t with a backlog of 2,000 rows and 1 dead letter?",
    ),
    (("clear", "t"), "ClearMessages", "Drop every row of t?"),
    (("clear", "t", "--subscription", "s"), "ClearMessages", "Drop every row of t for subscription s?"),
    (
        ("trim", "t", "--ledger", "7", "--entry", "19"),
        "TrimMessages",
        "Drop the rows of t up to entry 19 of ledger 7?",
    ),
    (
        ("trim", "t", "--ledger", "7", "--entry", "19", "--subscription", "s", "--all-lower-ledgers"),
        "TrimMessages",
        "Drop the rows of t for subscription s up to entry 19 of ledger 7 and of every lower ledger?",
    ),
    (("dead-letters", "purge", "t", "s"), "PurgeDeadLetters", "Forget 1 dead letter of t for subscription s?"),
    (
        ("dead-letters", "purge", "t", "s", "--id", "3"),
        "PurgeDeadLetters",
        "Forget those that these options name, of 1 dead letter of t for subscription s?",
    ),
]


@pytest.fixture
def taking_away(daemon: FakeDaemon) -> FakeDaemon:
    daemon.script("DeleteTopic", answer(admin_pb2.DeleteTopicResponse()))
    stats = inspect_pb2.SubscriptionStats(subscription="s", backlog=2_000, dead_letters=1)
    daemon.script("ListSubscriptions", answer(inspect_pb2.ListSubscriptionsResponse(subscriptions=[stats])))
    page = inspect_pb2.ListDeadLettersResponse(
        dead_letter_id=[3], ledger_id=[7], entry_id=[1], deliver_at_ms=[0], dead_at_ms=[9], as_of_ms=9
    )
    daemon.script("ListDeadLetters", answer(page))
    daemon.script("PurgeDeadLetters", answer(admin_pb2.PurgeDeadLettersResponse(purged=1)))
    daemon.script("DeleteSubscription", answer(dispatch_pb2.DeleteSubscriptionResponse()))
    daemon.script("ClearMessages", answer(delayed_delivery_pb2.ClearMessagesResponse()))
    daemon.script("TrimMessages", answer(delayed_delivery_pb2.TrimMessagesResponse()))
    return daemon


@pytest.mark.parametrize(("arguments", "method", "question"), ASKED)
def test_what_takes_away_is_asked_for_first(
    taking_away: FakeDaemon, run: Run, arguments: tuple[str, ...], method: str, question: str
) -> None:
    no = run(*arguments, "--json", stdin="n\n")
    assert no.exit_code == output.EXIT_REFUSED
    assert question in no.stderr
    assert "nothing is done" in no.stderr
    assert no.stdout == ""
    assert taking_away.count(method) == 0
    assert run(*arguments, stdin="y\n").exit_code == 0
    assert run(*arguments, "--yes").exit_code == 0
    assert taking_away.count(method) == 2


def test_without_anybody_to_ask_it_says_how_to_do_without(taking_away: FakeDaemon, run: Run) -> None:
    result = run("delete", "t", stdin="")
    assert result.exit_code == output.EXIT_INPUT
    assert "nobody answers; --yes says that it is wanted" in result.stderr
    assert taking_away.calls == []


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        (grpc.StatusCode.NOT_FOUND, 1, "`tarry topics` and `tarry subscriptions TOPIC` list what exists"),
        (grpc.StatusCode.ALREADY_EXISTS, 1, "`tarry subscription update` changes it"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1, "topic is wrong."),
        (grpc.StatusCode.DATA_LOSS, 1, "has to be restored from a copy"),
        (grpc.StatusCode.INVALID_ARGUMENT, 2, "topic is wrong."),
        (grpc.StatusCode.UNAVAILABLE, 3, "start it with `tarryd`, or name another with --address"),
        (grpc.StatusCode.UNKNOWN, 3, "repeating the command is safe"),
        (grpc.StatusCode.FAILED_PRECONDITION, 3, "The owner is another daemon"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 3, "repeat it, with a longer --timeout"),
        (grpc.StatusCode.INTERNAL, 1, "the daemon's log has more"),
        (grpc.StatusCode.PERMISSION_DENIED, 1, "topic is wrong. (PERMISSION_DENIED)"),
    ],
)
def test_each_failure_is_one_line_that_says_what_to_do(
    daemon: FakeDaemon, run: Run, code: grpc.StatusCode, exit_code: int, says: str
) -> None:
    daemon.script("GetTopicStats", refuse(code, "topic is wrong"))

    def story(seconds: float) -> None:
        result = run("stats", "t", "--timeout", str(seconds))
        assert result.exit_code == exit_code
        assert says in result.stderr
        assert result.stderr.startswith("tarry: ")
        assert result.stderr.count("\n") == 1

    within_some_time(story)


@pytest.mark.parametrize(
    ("code", "exit_code"), [(grpc.StatusCode.UNAVAILABLE, 3), (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)]
)
def test_a_daemon_that_names_a_time_is_believed(
    daemon: FakeDaemon, run: Run, code: grpc.StatusCode, exit_code: int
) -> None:
    daemon.script("GetTopicStats", refuse(code, "topic t is being loaded", retry_after_ms="2500"))

    def story(seconds: float) -> None:
        result = run("stats", "t", "--timeout", str(seconds))
        assert result.exit_code == exit_code
        assert "topic t is being loaded. Try again in 2.5 s" in result.stderr
        assert "tarryd" not in result.stderr

    within_some_time(story)


def test_a_daemon_that_is_not_there_is_named(run: Run, daemon: FakeDaemon) -> None:
    daemon.stop()

    def story(seconds: float) -> None:
        result = run("topics", "--timeout", str(seconds))
        assert result.exit_code == output.EXIT_UNREACHABLE
        assert f"the daemon at {daemon.address} is unavailable" in result.stderr

    within_some_time(story)


def test_a_port_that_there_is_not_is_refused_at_once(run: Run) -> None:
    result = run("topics", "--address", "127.0.0.1:65536")
    assert result.exit_code == output.EXIT_INPUT
    assert result.stderr == "tarry: --address is '127.0.0.1:65536', and 65536 is no port; it must be at most 65535.\n"


TOPICS = inspect_pb2.ListTopicsResponse(topics=[inspect_pb2.TopicSummary(topic="t", pending=2)])


def test_the_options_of_every_command_stand_before_it_too(daemon: FakeDaemon) -> None:
    daemon.script("ListTopics", answer(TOPICS))
    nowhere = {"TARRY_ADDRESS": "127.0.0.1:1"}
    before = click.testing.CliRunner(env=nowhere).invoke(
        commands.tarry, ["--json", "--address", daemon.address, "--timeout", "60", "topics"]
    )
    assert before.exit_code == 0, before.output
    assert json.loads(before.stdout)["pending"] == 2


def test_what_stands_behind_the_command_goes_before_what_stands_before_it(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListTopics", answer(TOPICS))
    result = run("--address", "127.0.0.1:1", "topics", "--address", daemon.address)
    assert result.exit_code == 0, result.output


def test_a_group_of_commands_has_them_from_before_it_as_well(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=3)))
    result = run("--json", "subscription", "create", "t", "s")
    assert json.loads(result.stdout)["subscription_id"] == 3


def test_where_nothing_listens_a_line_says_so_before_the_time_is_over(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.stop()
    monkeypatch.setattr(connection, "SILENCE_S", 0.01)

    def story(seconds: float) -> None:
        first, last = run("topics", "--timeout", str(seconds)).stderr.splitlines()
        assert first.startswith(f"tarry: nothing listens at {daemon.address} yet; if the daemon does not run, start it")
        assert "is unavailable" in last

    within_some_time(story)


def test_what_listens_and_takes_its_time_is_waited_for_in_silence(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.0)
    looked = threading.Event()
    listens = connection._listens

    def look(address: str) -> bool:
        try:
            return listens(address)
        finally:
            looked.set()

    monkeypatch.setattr(connection, "_listens", look)

    def slow(request: object, context: grpc.ServicerContext) -> inspect_pb2.ListTopicsResponse:
        looked.wait(fake_daemon.WAIT_S)
        return TOPICS

    daemon.script("ListTopics", slow)
    assert run("topics", "--timeout", "600").stderr == ""
    assert looked.is_set()


@pytest.mark.parametrize("target", ["unix:/run/tarry.sock", "dns:///tarry.example:7461", "tarry.example"])
def test_of_a_target_that_is_no_host_and_port_nothing_is_said(target: str) -> None:
    assert connection._listens(target)


def test_something_that_never_answers_is_named(daemon: FakeDaemon, run: Run) -> None:
    release = fake_daemon.Gate()
    daemon.script("ListTopics", lambda request, context: release.wait())

    def story(seconds: float) -> None:
        result = run("topics", "--timeout", str(seconds))
        assert result.exit_code == output.EXIT_UNREACHABLE
        assert "does not answer" in result.stderr

    within_some_time(story)
    release.open()
