"""What every command shares: being asked, and failures."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import click.testing
import grpc
import pytest

from tarry.cli import commands, connection, output
from tarry.v1 import admin_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests._support.patience import within_some_time
from tests._support.processes import run_child
from tests.client._support import fake_daemon
from tests.client._support.authority import Authority, replaced
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.cli._support.shell import TARRY
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
    assert "nothing was done" in no.stderr
    assert no.stdout == ""
    assert taking_away.count(method) == 0
    assert run(*arguments, stdin="y\n").exit_code == 0
    assert run(*arguments, "--yes").exit_code == 0
    assert taking_away.count(method) == 2


def test_without_anybody_to_ask_it_says_how_to_do_without(taking_away: FakeDaemon, run: Run) -> None:
    result = run("delete", "t", stdin="")
    assert result.exit_code == output.EXIT_INPUT
    assert "cannot ask for confirmation: standard input is closed; pass --yes" in result.stderr
    assert taking_away.calls == []


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        (grpc.StatusCode.NOT_FOUND, 1, "`tarry topics` and `tarry subscriptions TOPIC` list what exists"),
        (grpc.StatusCode.ALREADY_EXISTS, 1, "`tarry subscription update` changes it"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1, "topic is wrong."),
        (grpc.StatusCode.DATA_LOSS, 1, "must be restored from a copy"),
        (grpc.StatusCode.INVALID_ARGUMENT, 2, "topic is wrong."),
        (grpc.StatusCode.UNAVAILABLE, 3, "start it with `tarryd`, or name another with --address"),
        (grpc.StatusCode.UNKNOWN, 3, "repeating the command is safe"),
        (grpc.StatusCode.FAILED_PRECONDITION, 3, "The owner is another daemon"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 3, "repeat it with a longer --timeout"),
        (grpc.StatusCode.INTERNAL, 1, "the daemon's log has more"),
        (
            grpc.StatusCode.UNAUTHENTICATED,
            1,
            "topic is wrong. Identify yourself with --token-file, or with --tls-cert and --tls-key",
        ),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            1,
            "topic is wrong. Use another --token-file or --tls-cert, or ask",
        ),
        (grpc.StatusCode.UNIMPLEMENTED, 1, "topic is wrong. (UNIMPLEMENTED)"),
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
    assert (
        result.stderr == "tarry: --address is '127.0.0.1:65536', and '65536' is no port; it must be from 1 to 65535.\n"
    )


def test_a_url_is_refused_at_once_by_the_name_under_which_it_was_given(run: Run) -> None:
    given = run("topics", "--address", "http://localhost:7461")
    assert given.exit_code == output.EXIT_INPUT
    assert given.stderr.startswith("tarry: --address is 'http://localhost:7461'; it must be host:port without http://")
    variable = click.testing.CliRunner(env={"TARRY_ADDRESS": "http://h"}).invoke(commands.tarry, ["topics"])
    assert (variable.exit_code, variable.stderr.partition(";")[0]) == (2, "tarry: TARRY_ADDRESS is 'http://h'")


def test_the_port_of_the_metrics_is_told_apart_from_a_daemon_that_is_away(run: Run) -> None:
    # As the daemon's metrics: a server of HTTP/1
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"

        def story(seconds: float) -> None:
            result = run("topics", "--address", address, "--timeout", str(seconds))
            assert result.exit_code == output.EXIT_UNREACHABLE
            assert "the port answers, but not in gRPC" in result.stderr
            assert "name the daemon's gRPC port, by default 7461" in result.stderr
            assert "Correct --address or TARRY_ADDRESS." in result.stderr
            assert "start it with" not in result.stderr

        within_some_time(story)
        server.shutdown()


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
        assert first.startswith(
            f"tarry: nothing listens at {daemon.address} yet; if the daemon is not running, start it"
        )
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


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[FakeDaemon]:
    """A daemon with TLS that wants certificates, and in the directory what its clients need: the files named below."""
    authority = Authority()
    issued = authority.issue("gate", common_name="gate-7")
    for name, content in ((CA, authority.certificate), (CERT, issued.chain), (KEY, issued.key), (TOKEN, b"5ecret\n")):
        replaced(tmp_path / name, content)
    serving = FakeDaemon(credentials=authority.of_daemon(clients_of=authority))
    serving.script("ListTopics", answer(TOPICS))
    yield serving
    serving.stop()


CA, CERT, KEY, TOKEN = "ca.pem", "cert.pem", "key.pem", "token"
FILES = {"--tls-ca": CA, "--tls-cert": CERT, "--tls-key": KEY, "--token-file": TOKEN}


def words_of(options: Iterable[str], directory: Path) -> list[str]:
    return [word for option in options for word in (option, str(directory / FILES[option]))]


def ask(*arguments: str, environment: dict[str, str] | None = None) -> click.testing.Result:
    return click.testing.CliRunner(env=environment or {}).invoke(commands.tarry, list(arguments))


@pytest.mark.parametrize("before", [0, 2, 4])
def test_tls_and_the_token_stand_before_the_command_or_behind_it(
    guarded: FakeDaemon, tmp_path: Path, before: int
) -> None:
    given = [*words_of(FILES, tmp_path), "--address", guarded.address]
    result = ask(*given[: before * 2], "topics", *given[before * 2 :])
    assert result.exit_code == 0, result.output
    assert guarded.shown == [("ListTopics", "Bearer 5ecret", "gate-7")]


def test_tls_and_the_token_come_from_the_environment(guarded: FakeDaemon, tmp_path: Path) -> None:
    variables = {
        f"TARRY_{option.removeprefix('--').replace('-', '_').upper()}": str(tmp_path / file)
        for option, file in FILES.items()
    }
    environment = {"TARRY_ADDRESS": guarded.address, "TARRY_TLS": "1", **variables}
    result = ask("topics", environment=environment)
    assert result.exit_code == 0, result.output
    replaced(tmp_path / "another", "an0ther")
    result = ask("--token-file", str(tmp_path / "another"), "topics", environment=environment)
    assert result.exit_code == 0, result.output
    assert guarded.shown == [("ListTopics", f"Bearer {token}", "gate-7") for token in ("5ecret", "an0ther")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "If it runs, it may require TLS (--tls, --tls-ca) or a client certificate"),
        (("--tls",), "Pass the certificate of the daemon's authority with --tls-ca"),
        (("--tls-ca", CA), "If it runs, it may require TLS (--tls, --tls-ca) or a client certificate"),
        (("--tls-ca", CA, "--tls-server-name", "tarry.example"), "use that as --address, or --tls-server-name"),
    ],
)
def test_a_handshake_that_fails_says_which_option_helps(
    guarded: FakeDaemon, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    words = [str(tmp_path / word) if word == CA else word for word in options]

    def story(seconds: float) -> None:
        result = ask("topics", "--address", guarded.address, "--timeout", str(seconds), *words)
        assert result.exit_code == output.EXIT_UNREACHABLE
        assert says in result.stderr

    within_some_time(story)
    assert guarded.calls == []


def test_grpc_prints_no_lines_of_its_own_before_the_message(guarded: FakeDaemon, tmp_path: Path) -> None:
    other = replaced(tmp_path / "other.pem", Authority().certificate)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}

    def story(seconds: float) -> None:
        line = ["topics", "--address", guarded.address, "--timeout", str(seconds), "--tls-ca", str(other)]
        ended = run_child([str(TARRY), *line], env=environment)
        assert ended.returncode == output.EXIT_UNREACHABLE
        assert "CERTIFICATE_VERIFY_FAILED" in ended.stderr
        assert [each for each in ended.stderr.splitlines() if not each.startswith("tarry: ")] == []

    within_some_time(story)


def test_a_daemon_without_tls_that_is_asked_with_it_is_told_apart(
    daemon: FakeDaemon, run: Run, guarded: FakeDaemon, tmp_path: Path
) -> None:
    def story(seconds: float) -> None:
        result = run("topics", "--timeout", str(seconds), "--tls-ca", str(tmp_path / CA))
        assert result.exit_code == output.EXIT_UNREACHABLE
        assert "The port has no TLS: leave out the --tls" in result.stderr

    within_some_time(story)


def test_what_of_tls_and_the_token_is_wrong_is_told_before_anything_is_sent(
    guarded: FakeDaemon, tmp_path: Path
) -> None:
    for arguments, says in (
        (words_of(["--tls-cert"], tmp_path), "cert_file is given without key_file"),
        (["--tls-ca", str(tmp_path / "missing")], "cannot be read: No such file or directory"),
        (["--token-file", str(tmp_path / KEY)], "has no token of 1 to 4096 printable ASCII characters"),
    ):
        result = ask("topics", "--address", guarded.address, *arguments)
        assert (result.exit_code, says in result.stderr) == (output.EXIT_INPUT, True), result.stderr
    elsewhere = ask("topics", "--address", "10.0.0.1:7461", *words_of(["--token-file"], tmp_path))
    assert elsewhere.exit_code == output.EXIT_INPUT
    assert elsewhere.stderr.startswith("tarry: the token is not sent to 10.0.0.1:7461 without TLS")
    assert "5ecret" not in elsewhere.stderr
    assert guarded.calls == []


def test_the_options_of_every_command_stand_below_those_of_the_command(run: Run) -> None:
    own, shared = run("receive", "--help").stdout.partition("\nOptions of every command:\n")[::2]
    assert ("--permits" in own, "--permits" in shared) == (True, False)
    assert ("--token-file" in own, "--token-file" in shared) == (False, True)


def test_of_several_addresses_the_command_takes_one_that_answers(
    daemon: FakeDaemon, other_daemon: FakeDaemon, run: Run
) -> None:
    other_daemon.script("ListTopics", answer(TOPICS))
    daemon.stop()
    several = f"{daemon.address},{other_daemon.address}"
    result = run("topics", "--address", several, "--timeout", str(fake_daemon.WAIT_S))
    assert result.exit_code == 0, result.output
    by_variable = click.testing.CliRunner(env={"TARRY_ADDRESS": several}).invoke(
        commands.tarry, ["topics", "--timeout", str(fake_daemon.WAIT_S)]
    )
    assert by_variable.exit_code == 0, by_variable.output


def test_where_nothing_listens_at_any_address_a_line_names_them_all(
    daemon: FakeDaemon, other_daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.stop()
    other_daemon.stop()
    monkeypatch.setattr(connection, "SILENCE_S", 0.01)

    def story(seconds: float) -> None:
        several = f"{daemon.address},{other_daemon.address}"
        first, last = run("topics", "--address", several, "--timeout", str(seconds)).stderr.splitlines()
        assert first.startswith(f"tarry: nothing listens at {daemon.address}, {other_daemon.address} yet")
        assert f"the daemon at {daemon.address}, {other_daemon.address} is unavailable" in last

    within_some_time(story)


def test_an_address_of_several_that_is_wrong_is_named(run: Run) -> None:
    result = run("topics", "--address", "127.0.0.1:1,")
    assert result.exit_code == output.EXIT_INPUT
    assert result.stderr.startswith("tarry: --address is '127.0.0.1:1,', and an address of it is empty")
