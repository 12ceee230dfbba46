"""Probes the store of a starting daemon, in a thread of its own, before it serves and beside it.

    no bucket (a local directory)        a few races at each start
    a bucket that has not passed yet     the long probe, then the pass is stored in the root; the same for `--check`
    a bucket that has passed             one race; the races of the long probe go on while the daemon serves

A promise that is seen to be broken ends the daemon, even while it serves: on such a store a takeover can have two
winners. The pass is forgotten then, and the next start runs the long probe. A store that is not judged refuses the
start too; beside serving, that is logged and the probe is run again later. `storage_backends.probe` has the trials.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
import uuid
from types import TracebackType
from typing import Final, Self

from storage_backends import probe
from storage_backends.formats import names
from storage_backends.object_store import Bucket, ObjectStore, StoreError

LOCAL_RACES: Final = 5
"""Races of each start if the store is on no server: the long probe is for servers."""

BETWEEN_S: Final = 1.0
"""Pause before each race beside serving (seconds)"""

AGAIN_S: Final = 600.0
"""Time before a store that was not judged beside serving is probed again (seconds)"""

# Longest wait for the trial in flight when the probe is stopped (seconds); its thread ends with the process.
_END_S: Final = 5.0

log = logging.getLogger(__name__)


class StoreProbe:
    """The probe of a store, running as soon as the object is made; leaving its context stops it.

    `may_serve` ends when the daemon may serve, or with the reason why not. `broken` ends only if the store is seen to
    break a promise later, with BrokenPromise, or with an error of the probe itself.
    """

    def __init__(self, store: ObjectStore, *, at_length: bool) -> None:
        """Begin. With `at_length` a pass that was remembered counts for nothing."""
        self.may_serve: Final[concurrent.futures.Future[None]] = concurrent.futures.Future()
        self.broken: Final[concurrent.futures.Future[None]] = concurrent.futures.Future()
        for future in (self.may_serve, self.broken):
            # From here on it cannot be cancelled.
            future.set_running_or_notify_cancel()
        self._store = store
        self._at_length = at_length
        self._has_passed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def has_passed(self) -> bool:
        """Return whether the store has passed all that this start asks of it."""
        return self._has_passed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        bucket = self._store.bucket
        try:
            goes_on = self._before_serving(bucket)
        except BaseException as error:  # noqa: BLE001 - it belongs to who asks for the result
            self.may_serve.set_exception(error)
            return
        self._has_passed = not goes_on
        self.may_serve.set_result(None)
        if not goes_on:
            return
        try:
            self._beside_serving()
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - it ends the daemon
            self.broken.set_exception(error)

    def _before_serving(self, bucket: Bucket | None) -> bool:
        """Probe as much as must be probed first; return whether the long probe is left for later."""
        if bucket is None:
            self._probe(LOCAL_RACES)
            return False
        if not self._at_length and probe.has_passed(self._store, bucket):
            self._probe(1)
            return True
        log.info(
            "probing the store at length, as it has not passed before or this is a check",
            extra={"endpoint": bucket.endpoint, "bucket": bucket.name, "races": probe.RACES},
        )
        self._probe(probe.RACES)
        probe.remember(self._store, bucket, now_ms=time.time_ns() // 1_000_000)
        return False

    def _beside_serving(self) -> None:
        while not self._has_passed:
            try:
                self._probe(probe.RACES, between_s=BETWEEN_S)
                self._has_passed = True
            except probe.BrokenPromise as error:
                log.error("this daemon ends, since its store cannot be trusted any longer: %s", error)
                raise
            except StoreError as error:
                log.warning("the probe beside serving ended early, and is run again in %d s: %s", AGAIN_S, error)
                self._wait(AGAIN_S)

    def _probe(self, races: int, *, between_s: float = 0.0) -> None:
        prefix = names.probe_prefix(uuid.uuid4().hex)
        try:
            probe.probe(self._store, prefix, races=races, between_s=between_s, wait=self._wait)
        except probe.BrokenPromise:
            with contextlib.suppress(StoreError):  # what was seen matters more
                probe.forget(self._store)
            raise

    def _wait(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise _Stopped


class _Stopped(Exception):
    """The end of a probe that nobody waits for any longer."""
