"""Composes the process of a serving daemon, and starts and ends it.

`command` alone uses it; it is imported late so that other commands start fast. It chooses clock, randomness and
threads, orders start and stop, and handles signals.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import ulid

from daemon import config, errors, metrics, metrics_endpoint, process_memory
from daemon.audit_log import AuditLog
from daemon.auth import Door
from daemon.grpc_services.admission import Admission
from daemon.grpc_services.receiving import Receiving
from daemon.grpc_services.server import Server
from daemon.ledger_stores import ledger_stores
from daemon.owner.engine import Engine
from daemon.runtime import clocks, pools
from daemon.runtime.clocks import SystemClock
from daemon.runtime.environment import TAIL_REQUESTS_MAX, TAIL_WORK_MAX, Environment
from daemon.store_probe import StoreProbe
from storage_backends import local_directory, object_store, store_opening

log = logging.getLogger(__name__)

# Niceness of the threads of merges and deletions above the others. They hold the interpreter's lock at times and
# others wait for it, so they must not starve on a machine that is busy with other processes.
GIVING_WAY_NICENESS = 5
NICENESS_MOST = 19


class NotDrained(Exception):
    """A clean end that took too long, or was cut short by a second signal; nothing is waited for any longer.

    `left` describes what was not finished. What is durable stays so.
    """

    def __init__(self, left: list[str]) -> None:
        super().__init__("; ".join(left))
        self.left = left


async def serve(
    settings: config.Config,
    store: object_store.ObjectStore,
    ready_file: Path | None,
    *,
    door: Door,
    audit_log: AuditLog,
    store_probe: StoreProbe,
) -> None:
    """Serve until SIGTERM or SIGINT, and then end cleanly.

    Nothing is served before `store_probe` allows it, nor after it has seen the store break a promise. Raises
    NotDrained, the errors of the start, and the error that ended a task of the engine or the probe.
    """
    signals = _Signals()
    daemon_metrics = metrics.Metrics(per_topic=settings.metrics.per_topic, per_topic_max=settings.metrics.per_topic_max)
    metrics.export_process(daemon_metrics.registry)
    daemon_metrics.collect_store_probe_from(store_probe.has_passed)
    daemon_metrics.collect_store_requests_from(lambda: store.requests_sent)
    daemon_metrics.collect_expiry_from(door.expiry)
    admission = Admission(door, audit_log, daemon_metrics.caller_refused, Receiving(settings, process_memory.give_back))
    server = Server(settings, admission)
    settings = _with_own_names(settings, server.bind())
    with (
        _own_lock(settings),
        contextlib.closing(ledger_stores.LedgerStores.from_settings(settings)) as stores_of_ledgers,
        pools.opened(
            settings.store,
            deletions=settings.deletion.parallelism,
            threads=_threads,
            patient=functools.partial(_threads, initializer=_give_way),
        ) as threads,
        _metrics_endpoint(settings, door, daemon_metrics) as metrics_address,
    ):
        environment = _environment(settings, store, daemon_metrics, threads)
        engine = Engine(dataclasses.replace(environment, ledger_stores=stores_of_ledgers))
        threads.deletions.threads.submit(stores_of_ledgers.open_ahead)
        daemon_metrics.collect_topics_from(engine.requests.metrics_snapshot)
        await server.start(engine)
        process_memory.keep_for_good()
        _announce(settings, metrics_address, ready_file)
        watching = (
            asyncio.create_task(clocks.watch_pauses(daemon_metrics.event_loop_paused)),
            asyncio.create_task(
                door.watch(changed=admission.identities_changed, refused=daemon_metrics.set_files_refused)
            ),
        )
        await _run(engine, server, signals, store_probe)
        for task in watching:
            task.cancel()
    log.info("stopped")


class _Signals:
    """SIGTERM and SIGINT: the first sets `asked`, the second `insisted`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        if self.asked.is_set():
            self.insisted.set()
        self.asked.set()


async def _run(engine: Engine, server: Server, signals: _Signals, store_probe: StoreProbe) -> None:
    """Start the engine, which may wait for its shards, and stop it when asked or when the store breaks a promise."""
    starting = asyncio.create_task(_start(engine, store_probe))
    asked = asyncio.create_task(signals.asked.wait())
    broken = asyncio.wrap_future(store_probe.broken)
    try:
        await asyncio.wait((starting, asked, broken), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await asyncio.wait((asked, broken, engine.failed), return_when=asyncio.FIRST_COMPLETED)
        for failed in (broken, engine.failed):
            if failed.done():
                failed.result()
    finally:
        broken.cancel()
        asked.cancel()
        starting.cancel()
        await asyncio.gather(asked, starting, return_exceptions=True)
        await _end(engine, server, signals)


async def _start(engine: Engine, store_probe: StoreProbe) -> None:
    await asyncio.wrap_future(store_probe.may_serve)
    await engine.start()


async def _end(engine: Engine, server: Server, signals: _Signals) -> None:
    """End cleanly. Raise NotDrained if something is left."""
    log.info("stopping")
    ending = asyncio.create_task(_end_in_order(engine, server))
    insisting = asyncio.create_task(signals.insisted.wait())
    await asyncio.wait((ending, insisting), return_when=asyncio.FIRST_COMPLETED)
    insisting.cancel()
    if ending.done():
        left = ending.result()
    else:
        left = [*engine.left(), *server.left()]
        ending.cancel()
    if left:
        raise NotDrained(left)


async def _end_in_order(engine: Engine, server: Server) -> list[str]:
    left = await engine.stop()
    if left:
        return [*left, *server.left()]
    await server.drain()
    return []


def _with_own_names(settings: config.Config, port: int) -> config.Config:
    """Return the settings with the id and the address of this daemon."""
    host, _ = config.split_address(settings.grpc.listen)
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    address = settings.daemon.address or _joined(host, port)
    named = msgspec.structs.replace(settings.daemon, id=settings.daemon_id, address=address)
    return msgspec.structs.replace(settings, daemon=named)


@contextlib.contextmanager
def _own_lock(settings: config.Config) -> Iterator[None]:
    """Hold the lock of this daemon's id while it runs, which shows others on this machine that the process lives.

    Raises Unavailable if another process holds it.
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
    threads: pools.Pools,
) -> Environment:
    local = settings.store.kind == "local"
    store = pools.CountedStore(store, daemon_metrics.store_error)
    return Environment(
        config=settings,
        store=store,
        locks=local_directory.LocalLocks(settings.store.path) if local else None,
        metrics=daemon_metrics,
        clock=SystemClock(),
        pools=threads,
        sleep=asyncio.sleep,
        blocking_sleep=time.sleep,
        jitter=random.random,
        new_id=lambda: str(ulid.ULID()),
        give_back_memory=process_memory.give_back,
        open_logs=lambda form: store_opening.open_logs(form, store, threads.journal.parts),
        version=importlib.metadata.version("tarryd"),
        tail_work_max=TAIL_REQUESTS_MAX if store.reads_are_requests else TAIL_WORK_MAX,
        busy_s=time.thread_time,
    )


def _give_way() -> None:
    """Lower the priority of the calling thread, where the system distinguishes threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + GIVING_WAY_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, NICENESS_MOST))


@contextlib.contextmanager
def _threads(
    name: str, count: int, initializer: Callable[[], None] | None = None
) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    threads = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix=name, initializer=initializer)
    try:
        yield threads
    except NotDrained:
        # A thread may wait for a store that never answers.
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        threads.shutdown()
        raise
    threads.shutdown()


@contextlib.contextmanager
def _metrics_endpoint(settings: config.Config, door: Door, daemon_metrics: metrics.Metrics) -> Iterator[str]:
    """Serve the metrics and provide the address."""
    host, port = config.split_address(settings.metrics.listen)
    try:
        endpoint = metrics_endpoint.Endpoint(
            daemon_metrics.registry,
            host=host,
            port=port,
            certificates=lambda: door.certificates if settings.metrics.tls else None,
            identities=lambda: door.identities if settings.metrics.tokens else None,
        )
    except OSError as error:
        raise config.cannot_be_bound("metrics.listen", settings.metrics.listen, error) from error
    try:
        yield _joined(host, endpoint.port)
    finally:
        endpoint.close()


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _write_in_one_step(path: Path, text: str) -> None:
    """Write a file for this user alone; a link in its place is replaced, not followed."""
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(file, "w", encoding="utf-8") as unfinished:
            unfinished.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@dataclasses.dataclass(frozen=True)
class ReadyFile:
    """The contents of `--ready-file`: the ports are bound. Health shows when the daemon serves."""

    grpc: str
    metrics: str
    pid: int
    daemon_id: str


def _announce(settings: config.Config, metrics_address: str, ready_file: Path | None) -> None:
    ready = ReadyFile(
        grpc=str(settings.daemon.address), metrics=metrics_address, pid=os.getpid(), daemon_id=settings.daemon_id
    )
    if ready_file is not None:
        _write_in_one_step(ready_file, json.dumps(dataclasses.asdict(ready)) + "\n")
    log.info("listening", extra=dataclasses.asdict(ready))
