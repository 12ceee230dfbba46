"""Gives every command the shared options, a client and the confirmation of `--yes`.

The shared options (address, TLS, token, timeout, JSON) may stand before or after the command. If a command gets no
answer, it soon notes that nothing listens at the address.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from tarry import credentials, errors, inspection
from tarry.cli import output
from tarry.printable import printable
from tarry.threads import client

DEFAULT_TIMEOUT_S = 10.0
UNTIL_DONE_S = 365 * 86_400.0
"""Timeout of commands that run until they are interrupted (seconds)"""


SILENCE_S = 1.0
"""Silence after which a command checks that something listens (seconds)"""
_CONNECTING_S = 2.0

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Shared(click.Option):
    """An option of every command."""


def _from_environment(name: str, *, help: str, **named: Any) -> Callable[[F], F]:
    """Return an option of every command that may also be set by a variable: `--tls-ca` is TARRY_TLS_CA."""
    variable = f"TARRY_{name.removeprefix('--').replace('-', '_').upper()}"
    return click.option(name, cls=Shared, envvar=variable, show_envvar=True, help=help, **named)


_SHARED = (
    _from_environment(
        "--address",
        default=credentials.DEFAULT_TARGET,
        show_default=True,
        help="host:port of a daemon (port 7461 if left out), or unix: and the path of its socket; "
        "several with commas between them.",
    ),
    _from_environment(
        "--tls",
        is_flag=True,
        help="Use TLS. The daemon's certificate must name its host, and its authority must be trusted here.",
    ),
    _from_environment(
        "--tls-ca",
        type=click.Path(),
        help="Use TLS, and trust the authorities whose certificates are in this file.",
    ),
    _from_environment("--tls-cert", type=click.Path(), help="Use TLS, and present the certificate in this file."),
    _from_environment("--tls-key", type=click.Path(), help="Private key of --tls-cert."),
    _from_environment(
        "--tls-server-name",
        help="Use TLS with a daemon whose certificate is for this name, as behind a tunnel.",
    ),
    _from_environment(
        "--token-file",
        type=click.Path(),
        help="Send the token in this file; only over TLS, loopback and Unix sockets.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        cls=Shared,
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Seconds to wait for an answer, retries included.",
    ),
    click.option("--json", "as_json", cls=Shared, is_flag=True, help="Print JSON, for programs."),
)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, or `tarry` itself, the options of every command."""
    for option in reversed(_SHARED):
        command = option(command)
    return command


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command, and under a separate heading those of every command."""
    sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Options of every command": []}
    for option in command.get_params(ctx):
        if isinstance(option, click.Option) and (record := option.get_help_record(ctx)) is not None:
            sections["Options of every command" if isinstance(option, Shared) else "Options"].append(record)
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


class Command(click.Command):
    """A command whose own options stand first in its help."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(self, ctx, formatter)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


command = functools.partial(click.command, cls=Command)
"""`click.command` for commands of `tarry`"""


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of every command, and a client."""

    @common_options
    @functools.wraps(command)
    def run(**given: Any) -> None:
        shared = [each.name for each in click.get_current_context().command.params if isinstance(each, Shared)]
        said = {name: _wherever_given(name, given.pop(name)) for name in shared if name is not None}
        address, timeout_s, as_json = (said.pop(name) for name in ("address", "timeout_s", "as_json"))
        with output.failures(address):
            addresses = credentials.addresses_of(address, name=_name_of_address(address))
        with (
            output.failures(", ".join(addresses)),
            client.Client(
                addresses,
                timeout_s=timeout_s,
                waiting=lambda why: output.note(f"waiting: {why}"),
                **_credentials(**said),
            ) as opened,
            _told_when_nothing_listens(addresses),
        ):
            command(connected=opened, as_json=as_json, **given)

    return run


def _name_of_address(address: str) -> str:
    """Return where the address comes from, the option or its variable."""
    return "TARRY_ADDRESS" if address == os.environ.get("TARRY_ADDRESS") else "--address"


def _credentials(
    *,
    tls: bool,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_server_name: str | None,
    token_file: str | None,
) -> dict[str, Any]:
    """Return the client's arguments; any file or name of TLS turns TLS on."""
    files = (tls_ca, tls_cert, tls_key, tls_server_name)
    wanted = tls or any(each is not None for each in files)
    return {"tls": credentials.Tls(*files) if wanted else None, "token_file": token_file}


def shows_who_calls() -> bool:
    """Return True if the command shows a token or a certificate to the daemon."""
    params = click.get_current_context().params
    return any(_wherever_given(name, params[name]) is not None for name in ("token_file", "tls_cert"))


def _wherever_given(name: str, value: T) -> T:
    """Return the value of an option of every command.

    An option after the command overrides one before it, and both override the environment.
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
def _told_when_nothing_listens(addresses: Sequence[str]) -> Iterator[None]:
    """Print a note, once, if the command still runs after `SILENCE_S` and nothing listens at any of the addresses."""
    ended = threading.Event()

    def look() -> None:
        if not ended.wait(SILENCE_S) and not any(map(_listens, addresses)) and not ended.is_set():
            output.note(f"nothing listens at {', '.join(addresses)} yet; {output.START_OR_NAME_ANOTHER}")

    # A daemon thread: it may hang in the network when the command has ended.
    threading.Thread(target=look, name="listens", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _listens(address: str) -> bool:
    """Return True if something accepts connections, or if the address is no host:port and only gRPC could know."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return True
    try:
        socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), _CONNECTING_S).close()
    except (OSError, OverflowError, UnicodeError):
        return False
    return True


def asked_first(question: Callable[..., str | None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a destructive command the option --yes; without it, ask before anything is sent.

    `question` makes the question from the command's arguments, or returns None if nothing would be lost.
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
        wanted = click.confirm(printable(question), err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        # The input has ended: a program runs the command, and no one can answer.
        click.echo("", err=True)
        raise click.UsageError("cannot ask for confirmation: standard input is closed; pass --yes") from None
    if not wanted:
        click.echo("tarry: nothing was done", err=True)
        raise click.exceptions.Exit(output.EXIT_REFUSED)


@contextlib.contextmanager
def meant_for_this_daemon() -> Iterator[None]:
    """Report, instead of following, the owner that the call's daemon names."""
    try:
        yield
    except errors.NotOwner as error:
        owner = f": ask it with --address {error.owner_address}" if error.owner_address else ""
        output.note(f"{error.message}{owner}")
        raise click.exceptions.Exit(output.EXIT_REFUSED) from error


def subscription_stats(connected: client.Client, topic: str, subscription: str) -> inspection.SubscriptionStats:
    """Return the counts of one subscription. Raises NotFound."""
    for each in connected.subscriptions(topic):
        if each.subscription == subscription:
            return each
    raise errors.NotFound(f"topic {topic!r} has no subscription {subscription!r}")


def of_topic(topic: str, subscription: str | None) -> str:
    """Return the subject of a question or an answer."""
    return topic if subscription is None else f"{topic} for subscription {subscription}"
