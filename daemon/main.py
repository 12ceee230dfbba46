"""`tarryd`: the composition root.

Owns: arguments, which store, clock, randomness and threads the daemon runs with, the order of start and stop, signals,
and the exit status: 0 after SIGTERM or SIGINT, 1 when it cannot serve, 2 for a wrong configuration.
Does not own: anything that is decided after the start.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import ulid

from daemon import config, errors, logs, metrics
from daemon.durability import counted_store
from daemon.engine.engine import Engine
from daemon.engine.environment import Environment
from daemon.grpc_services.server import Server
from storage_backends import local_directory, object_store, probe

EXIT_CANNOT_SERVE = 1
EXIT_WRONG_CONFIGURATION = 2

log = logging.getLogger("daemon.main")


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def elapsed_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    logs.configure()
    try:
        settings = config.load(options.config, overrides=options.set)
    except errors.InvalidArgument as error:
        log.error("%s", error)
        return EXIT_WRONG_CONFIGURATION
    logs.configure(level=settings.log.level, form=settings.log.format)
    try:
        with contextlib.closing(_open_store(settings)) as store:
            probe.probe(store, f"probe/{_new_id()}")
            if options.check:
                log.info("configuration and store are in order", extra={"store": settings.store.kind})
                return 0
            asyncio.run(_serve(settings, store, options.ready_file))
    except (errors.TarryError, object_store.StoreError, OSError) as error:
        log.error("cannot serve: %s", error, extra={"kind": type(error).__name__})
        return EXIT_CANNOT_SERVE
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tarryd",
        description="Scheduling daemon for delayed positions. Without arguments: loopback, data in ./tarry-data.",
        epilog="A setting can also be given as an environment variable TARRY_SECTION__KEY; --set goes before it, and "
        "both before the file. docs/CONFIGURATION.md has every setting.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting; repeatable"
    )
    parser.add_argument("--check", action="store_true", help="validate the settings, probe the store, and end")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="write the addresses here, as JSON, once bound")
    parser.add_argument("--version", action="version", version=f"tarryd {importlib.metadata.version('tarryd')}")
    return parser.parse_args(arguments)


def _open_store(settings: config.Config) -> object_store.ObjectStore:
    if settings.store.kind == "local":
        return local_directory.LocalDirectory(settings.store.path)
    # The AWS SDK takes a third of the time in which a daemon starts: only where it is needed.
    from storage_backends import s3

    given = settings.store.s3
    return s3.S3Store(
        s3.S3Settings(
            bucket=given.bucket,
            prefix=given.prefix,
            endpoint_url=given.endpoint_url,
            region=given.region,
            addressing_style=given.addressing,
            checksums=given.checksums,
            connect_timeout_s=given.connect_timeout_s,
            read_timeout_s=given.read_timeout_s,
            attempts=given.attempts,
            connections_max=given.connections_max,
        )
    )


async def _serve(settings: config.Config, store: object_store.ObjectStore, ready_file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT, and then ends in order."""
    stop = _stop_event()
    daemon_metrics = metrics.Metrics(per_topic=settings.metrics.per_topic, per_topic_max=settings.metrics.per_topic_max)
    metrics.export_process(daemon_metrics.registry)
    server = Server(settings)
    settings = _with_identity(settings, server.bind())
    with (
        _own_lock(settings),
        _threads(settings, "store") as threads,
        _threads(settings, "parts") as parts,
        _metrics_endpoint(settings, daemon_metrics) as metrics_address,
    ):
        engine = Engine(_environment(settings, store, daemon_metrics, threads, parts))
        daemon_metrics.collect_topics_from(engine.requests.metrics_snapshot)
        await server.start(engine)
        _announce(settings, metrics_address, ready_file)
        await _run(engine, server, stop)
    log.info("stopped")


async def _run(engine: Engine, server: Server, stop: asyncio.Event) -> None:
    """Starts the engine, which may have to wait for its shards, and stops it when told.

    Raises what start raises, and what ended a task of the engine.
    """
    starting = asyncio.create_task(engine.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await asyncio.wait((stopping, engine.failed), return_when=asyncio.FIRST_COMPLETED)
        if engine.failed.done():
            engine.failed.result()
        log.info("stopping")
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await asyncio.gather(server.drain(), engine.stop())


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _with_identity(settings: config.Config, port: int) -> config.Config:
    """The settings with the id and the address that this daemon has."""
    host, _ = config.split_address(settings.grpc.listen)
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    address = settings.daemon.address or _joined(host, port)
    identity = msgspec.structs.replace(settings.daemon, id=settings.daemon_id, address=address)
    return msgspec.structs.replace(settings, daemon=identity)


@contextlib.contextmanager
def _own_lock(settings: config.Config) -> Iterator[None]:
    """Holds the lock of this daemon's id while it runs: it shows others on this machine that the process lives.

    Raises Unavailable when another process has it.
    """
    if settings.store.kind != "local":
        yield
        return
    held = local_directory.LocalLocks(settings.store.path).try_lock(settings.daemon_id)
    if held is None:
        raise errors.Unavailable(
            f"a process with daemon.id {settings.daemon_id!r} runs on {settings.store.path} already: stop it, or give "
            "this one another daemon.id and grpc.listen"
        )
    with held:
        yield


def _environment(
    settings: config.Config,
    store: object_store.ObjectStore,
    daemon_metrics: metrics.Metrics,
    threads: concurrent.futures.Executor,
    parts: concurrent.futures.Executor,
) -> Environment:
    local = settings.store.kind == "local"
    return Environment(
        config=settings,
        store=counted_store.CountedStore(store, daemon_metrics.store_error),
        locks=local_directory.LocalLocks(settings.store.path) if local else None,
        metrics=daemon_metrics,
        clock=SystemClock(),
        threads=threads,
        parts=parts,
        sleep=asyncio.sleep,
        blocking_sleep=time.sleep,
        jitter=random.random,
        new_id=_new_id,
    )


def _new_id() -> str:
    return str(ulid.ULID())


def _threads(settings: config.Config, name: str) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(settings.store.io_threads, thread_name_prefix=name)


@contextlib.contextmanager
def _metrics_endpoint(settings: config.Config, daemon_metrics: metrics.Metrics) -> Iterator[str]:
    """Serves the metrics; gives the address."""
    host, port = config.split_address(settings.metrics.listen)
    try:
        endpoint = metrics.Endpoint(daemon_metrics, host=host, port=port)
    except OSError as error:
        raise OSError(f"metrics.listen: {settings.metrics.listen} cannot be bound: {error}") from error
    try:
        yield _joined(host, endpoint.port)
    finally:
        endpoint.close()


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclasses.dataclass(frozen=True)
class Ready:
    """What `--ready-file` says: the ports are bound. Health says when the daemon serves."""

    grpc: str
    metrics: str
    pid: int
    daemon_id: str


def _announce(settings: config.Config, metrics_address: str, ready_file: Path | None) -> None:
    ready = Ready(
        grpc=str(settings.daemon.address), metrics=metrics_address, pid=os.getpid(), daemon_id=settings.daemon_id
    )
    if ready_file is not None:
        unfinished = ready_file.with_name(f"{ready_file.name}.{ready.pid}")
        unfinished.write_text(json.dumps(dataclasses.asdict(ready)) + "\n", encoding="utf-8")
        unfinished.replace(ready_file)
    log.info("listening", extra=dataclasses.asdict(ready))


if __name__ == "__main__":
    sys.exit(main())
