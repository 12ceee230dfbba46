"""Runs the commands of `tarryd`: serving, and `token`, `health` and `give-up`.

`main` alone uses it; it is imported only after signals are handled. The exit status is 0 after a clean end, 1 if the
daemon cannot serve, 2 for a wrong configuration, and 3 if the clean end was cut short. That of `health` is 0 if the
daemon serves, 4 if it stands by, and 1 otherwise. `daemon.process` composes the daemon. Since a starting daemon is
waited for, it is imported while the store is being probed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from daemon import auth, config, errors, logs, process_memory
from daemon.audit_log import AuditLog
from daemon.auth import Door
from daemon.store_probe import StoreProbe
from storage_backends import commit, object_store, store_opening

# Longest time that a thread which seals or reads segments keeps the interpreter; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.001
HEALTH_TIMEOUT_S = 5.0
EXIT_CANNOT_SERVE = 1
EXIT_WRONG_CONFIGURATION = 2
EXIT_NOT_DRAINED = 3
EXIT_STANDS_BY = 4

log = logging.getLogger(__name__)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default serving until a signal ends it; return the exit status."""
    options = _parse(arguments)
    # Files that this process creates are for its own user.
    os.umask(0o077)
    logs.configure()
    if options.command == "token":
        return _make_token(options.file)
    try:
        settings = config.load(options.config, overrides=options.set + options.set_after)
        if options.command == "health":
            return _ask_health(settings)
        if options.command == "give-up":
            return _give_up(settings, options.log, options.shard, accepted=options.accept_loss)
        door, audit_log = Door(settings.tls, settings.access), AuditLog(settings.access)
    except errors.InvalidArgument as error:
        log.error("%s", error)
        return EXIT_WRONG_CONFIGURATION
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logs.configure(level=settings.log.level, form=settings.log.format)
    process_memory.keep_little()
    door.name_faults()
    try:
        with (
            contextlib.closing(audit_log),
            contextlib.closing(store_opening.open_store(settings.store)) as store,
            StoreProbe(store, at_length=options.check) as store_probe,
        ):
            if options.check:
                store_probe.may_serve.result()
                log.info("configuration and store are in order", extra={"store": settings.store.kind})
                return 0
            _serve(settings, store, options.ready_file, door, audit_log, store_probe)
    except (errors.TarryError, object_store.StoreError, OSError) as error:
        log.error("cannot serve: %s", error, extra={"kind": type(error).__name__})
        return EXIT_CANNOT_SERVE
    return 0


def _make_token(file: Path | None) -> int:
    """Create a token and show it once, or write it to a new file."""
    token = auth.make_token()
    if file is None:
        sys.stdout.write(f"{token}\n")
    else:
        try:
            auth.write_token(file, token)
        except OSError as error:
            log.error("%s cannot be made: %s", file, error.strerror)
            return EXIT_CANNOT_SERVE
    sys.stdout.write(f'tokens = ["{auth.hash_of(token)}"]\n')
    return 0


def _ask_health(settings: config.Config) -> int:
    """Ask the daemon of these settings on this machine, and print the answer.

    Returns 0 if it serves, 4 if it stands by and nothing is wrong with it, else 1. Raises `InvalidArgument`.
    """
    from daemon.call_values import HEALTH_REASON_KEY, HEALTH_STANDS_BY_KEY

    if settings.grpc.unix_socket is not None:
        address = f"unix:{settings.grpc.unix_socket}"
    elif settings.tls.cert_file is None:
        address = settings.grpc.listen
    else:
        raise errors.InvalidArgument(
            "configuration: grpc.listen has TLS, and grpc.unix_socket is not set; set it, because health is asked over "
            "the socket then"
        )
    with grpc.insecure_channel(address) as channel:
        check = cast(Any, health_pb2_grpc.HealthStub(channel)).Check
        try:
            answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError as error:
            failed = cast(grpc.Call, error)
            sys.stdout.write(f"not serving: no daemon answers at {address}: {failed.details()}\n")
            return EXIT_CANNOT_SERVE
    hints = dict(call.trailing_metadata() or ())
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        sys.stdout.write(f"{logs.escaped(hints.get(HEALTH_REASON_KEY, b'serving').decode(errors='ignore'))}\n")
        return 0
    stands_by = HEALTH_STANDS_BY_KEY in hints
    reason = hints.get(HEALTH_REASON_KEY, b"the daemon's log has the reason").decode(errors="ignore")
    sys.stdout.write(f"not serving{', standing by' if stands_by else ''}: {logs.escaped(reason)}\n")
    return EXIT_STANDS_BY if stands_by else EXIT_CANNOT_SERVE


def _give_up(settings: config.Config, log_id: str | None, shard: int | None, *, accepted: bool) -> int:
    """Report what of a dead daemon's log, or of a shard, is damaged or lost, and give it up if that is accepted.

    Returns 0 if a standby can take over, else 1.
    """
    from daemon.owner.give_up import StillWritten, begin_anew, resolve_loss

    logs.configure(level=settings.log.level, form=settings.log.format)
    try:
        with contextlib.closing(store_opening.open_store(settings.store)) as store:
            if shard is not None:
                resolved = begin_anew(store, shard, accepted=accepted, say=_say)
            else:
                resolved = resolve_loss(store, log_id or "", accepted=accepted, say=_say)
    except (errors.TarryError, object_store.StoreError, commit.CommitOutcomeUnknown, StillWritten) as error:
        log.error("nothing is given up: %s", error)
        return EXIT_CANNOT_SERVE
    return 0 if resolved else EXIT_CANNOT_SERVE


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tarryd",
        description=(
            "Scheduling daemon for delayed positions. Without arguments it serves: gRPC on 127.0.0.1:7461, metrics on "
            "127.0.0.1:7462, data in ./tarry-data."
        ),
        epilog="A setting can also be given as an environment variable TARRY_SECTION__KEY. --set wins over the "
        "environment, and the environment over the file. docs/CONFIGURATION.md has every setting.",
    )
    _add_settings(parser, config=None, dest="set")
    parser.set_defaults(set_after=[])
    parser.add_argument("--check", action="store_true", help="validate the settings, probe the store, and end")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="write the bound addresses to PATH, as JSON")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="instead of serving")
    token = commands.add_parser(
        "token",
        help="make a token of an identity",
        description="Makes a bearer token of 256 random bits, and shows it and the line for its identity in "
        "access.identities_file, which holds its SHA-256. Nobody can show the token again.",
    )
    token.add_argument(
        "--file", type=Path, metavar="PATH", help="write the token to PATH, a new file, and do not show it"
    )
    health = commands.add_parser(
        "health",
        help="ask the daemon of these settings whether it serves",
        description="Asks the daemon on this machine whether it serves, over grpc.unix_socket, or else over "
        "grpc.listen, which has no TLS then. Exit status 0 if it does, 4 if it stands by for a daemon that owns the "
        "root, else 1.",
    )
    _add_settings(health, dest="set_after")
    give_up = commands.add_parser(
        "give-up",
        help="give up what was in the newest slots of a dead daemon's log, or in a shard, and is damaged or lost",
        description="Tells what is damaged or lost at the end of a log whose daemon has ended, or of a shard that has "
        "lost its manifests, so that no other can take over. Exit status 0 when one can, else 1. What is lost may have "
        "been answered: restore it from a copy if there is one.",
    )
    lost = give_up.add_mutually_exclusive_group(required=True)
    lost.add_argument("log", metavar="LOG", nargs="?", help="the id of the log, as health names it: logs/LOG/")
    lost.add_argument("--shard", type=int, metavar="SHARD", help="the number of a shard without a manifest")
    give_up.add_argument(
        "--accept-loss",
        action="store_true",
        help="give it up: sections without a record are written behind the end; the shard begins anew",
    )
    _add_settings(give_up, dest="set_after")
    return parser.parse_args(arguments)


def _add_settings(parser: argparse.ArgumentParser, *, config: Any = argparse.SUPPRESS, dest: str) -> None:
    """Add the options that name settings. They may stand before a command and after it.

    A command's options are parsed alone, and replace those before it: without a file that one stays, and settings that
    are collected need a `dest` of their own.
    """
    parser.add_argument("--config", type=Path, default=config, metavar="FILE", help="TOML file with settings")
    parser.add_argument(
        "--set", action="append", default=[], dest=dest, metavar="SECTION.KEY=VALUE", help="one setting; repeatable"
    )


class _Version(argparse.Action):
    """An option that reads the version only when it is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        import importlib.metadata

        sys.stdout.write(f"tarryd {importlib.metadata.version('tarryd')}\n")
        parser.exit()


def _serve(
    settings: config.Config,
    store: object_store.ObjectStore,
    ready_file: Path | None,
    door: Door,
    audit_log: AuditLog,
    store_probe: StoreProbe,
) -> None:
    from daemon import process

    try:
        asyncio.run(process.serve(settings, store, ready_file, door=door, audit_log=audit_log, store_probe=store_probe))
    except process.NotDrained as error:
        for left in error.left:
            log.error("not finished: %s", left)
        sys.stderr.write(f"tarryd: not finished: {error}\n")
        sys.stderr.flush()
        logging.shutdown()
        # A thread may wait for a store that never answers; nothing that was answered is lost.
        os._exit(EXIT_NOT_DRAINED)
