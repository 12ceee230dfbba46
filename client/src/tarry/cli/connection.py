"""What every command shares: the daemon's address, the time to wait, JSON, a client, and being asked.

Owns: these options, which stand before the command or behind it; telling early that nothing listens at the address.
Does not own: what a command does, and how results are shown (`tarry.cli.output`).
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from tarry import channels, errors, inspection
from tarry.cli import output
from tarry.threads import client

DEFAULT_TIMEOUT_S = 10.0
UNTIL_DONE_S = 365 * 86_400.0
"""The time-out of what goes on until somebody ends the command."""


SILENCE_S = 1.0
"""A command that has no answer for so long looks whether anything listens."""
_CONNECTING_S = 2.0

T = TypeVar("T")


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, or `tarry` itself, the options of every command."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="JSON, for programs."),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0, min_open=True),
            default=DEFAULT_TIMEOUT_S,
            show_default=True,
            help="Seconds to wait for an answer, retries included.",
        ),
        click.option(
            "--address",
            envvar="TARRY_ADDRESS",
            default=channels.DEFAULT_TARGET,
            show_default=True,
            show_envvar=True,
            help="host:port of a daemon.",
        ),
    ):
        command = option(command)
    return command


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of every command, and a client."""

    @common_options
    @functools.wraps(command)
    def run(*, address: str, timeout_s: float, as_json: bool, **arguments: Any) -> None:
        address = _wherever_given("address", address)
        timeout_s = _wherever_given("timeout_s", timeout_s)
        as_json = _wherever_given("as_json", as_json)
        with output.failures(address):
            channels.check_target(address, name="--address")
            with (
                client.Client(address, timeout_s=timeout_s, waiting=_say) as opened,
                _told_when_nothing_listens(address),
            ):
                command(connected=opened, as_json=as_json, **arguments)

    return run


def _wherever_given(name: str, value: T) -> T:
    """The value of an option of every command: what stands behind the command goes before what stands before it, and
    both go before the environment.
    """
    context = click.get_current_context()
    before = context.find_root()
    if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return value
    if before.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        given: T = before.params[name]
        return given
    return value


@contextlib.contextmanager
def _told_when_nothing_listens(address: str) -> Iterator[None]:
    """A note, once, where a command still runs after a second and nothing listens at the address."""
    ended = threading.Event()

    def look() -> None:
        if not ended.wait(SILENCE_S) and not _listens(address) and not ended.is_set():
            output.note(f"nothing listens at {address} yet; {output.START_OR_NAME_ANOTHER}")

    # It may hang in the network when the command has ended.
    threading.Thread(target=look, name="listens", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _listens(address: str) -> bool:
    """Whether something accepts connections; true also where the address is no host:port, and only gRPC could tell."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return True
    try:
        socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), _CONNECTING_S).close()
    except (OSError, OverflowError, UnicodeError):
        return False
    return True


def _say(why: str) -> None:
    output.note(f"waiting: {why}")


def asked_first(question: Callable[..., str | None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command that takes something away the option --yes, and asks without it, before anything is sent.

    `question`: makes the question of the command's arguments; None when nothing would be taken away.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @click.option("--yes", is_flag=True, help="Do not ask.")
        @functools.wraps(command)
        def run(*, yes: bool, **arguments: Any) -> None:
            if not yes and (asked := question(**arguments)) is not None:
                _ask(asked)
            command(**arguments)

        return run

    return decorated


def _ask(question: str) -> None:
    try:
        wanted = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        # The input ended: a program runs it, and nobody is there to ask.
        click.echo("", err=True)
        raise click.UsageError("nobody answers; --yes says that it is wanted") from None
    if not wanted:
        click.echo("tarry: nothing is done", err=True)
        raise click.exceptions.Exit(output.EXIT_REFUSED)


@contextlib.contextmanager
def meant_for_this_daemon() -> Iterator[None]:
    """Around a call that, unlike others, goes to the daemon that it is meant for, and to no other."""
    try:
        yield
    except errors.NotOwner as error:
        owner = f": ask it with --address {error.owner_address}" if error.owner_address else ""
        output.note(f"{error.message}{owner}")
        raise click.exceptions.Exit(output.EXIT_REFUSED) from error


def subscription_stats(connected: client.Client, topic: str, subscription: str) -> inspection.SubscriptionStats:
    """Counts of one subscription. Raises NotFound."""
    for each in connected.subscriptions(topic):
        if each.subscription == subscription:
            return each
    raise errors.NotFound(f"topic {topic!r} has no subscription {subscription!r}")


def of_topic(topic: str, subscription: str | None) -> str:
    """What a question or an answer is about."""
    return topic if subscription is None else f"{topic} for subscription {subscription}"
