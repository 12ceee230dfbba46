"""Tries out whether a store keeps the promises that safety rests on, before a daemon trusts it.

Several servers that speak S3 ignore `If-None-Match`, or check first and write later: two owners would both win the
same slot of a log. Passing is no proof; failing is one. A server that checks first and writes later hides it in most
races of eight writers, so `probe` races until the chance that it has hidden in all of them is small.

Only answers accuse. A write whose answer is missing may have landed, may land later, or never does; a write that
something on the way repeated is answered that its object exists, though it has won. Neither says anything about the
store: a trial with such a write is repeated with another key. If too little is answered, the store is not judged. No
put follows a request that could come late and undo it.

The trials need nothing but a store, and leave nothing behind. `remember` stores in the root that its bucket has passed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from storage_backends import object_store
from storage_backends.formats import format_errors, manifest, names
from storage_backends.formats.manifest import ProbePass
from storage_backends.object_store import (
    AlreadyExists,
    Bucket,
    NotFound,
    ObjectStore,
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

VERSION: Final = 1
"""The version of the trials. A pass of another version counts for nothing."""

RACERS: Final = 8
MISSED_BY_A_RACE: Final = 0.89
"""Measured part of the races of `RACERS` in which a server that checks first and writes later has one winner"""

MISSED_MAX: Final = 1e-5
"""Largest probability that such a server passes the long probe"""

RACES: Final = math.ceil(math.log(MISSED_MAX) / math.log(MISSED_BY_A_RACE))
"""Races of the long probe"""

RACES_WITHOUT_WINNER_MAX: Final = 20
"""Most races in sequence of which the winner is not known; then the store is not judged"""

RACING_MAX_S: Final = 300.0
"""Longest time in races (seconds); then the store is not judged"""

TRIES_MAX: Final = 20
"""Most tries of a trial with one writer; then the store is not judged"""

# The first and the longest delay before a race that follows one without answers (seconds)
_FIRST_DELAY_S: Final = 0.1
_LAST_DELAY_S: Final = 2.0
_METADATA_KEY: Final = "racer"
_BARRIER_TIMEOUT_S: Final = 300.0
# More than one packet of a network: servers check by the head of a request, and write when the body is there.
_FILLING: Final = bytes(range(256)) * 64


class BrokenPromise(StoreRefused):
    """The error of a store that was seen to break a promise. `reason` says which, and what to do."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            key,
            f"{reason}. The store breaks a promise without which two daemons can both own a shard: use another store, "
            "or a release of its server that keeps it",
        )


class NotJudged(StoreUnavailable):
    """The error of a probe that had too few answers. It does not accuse the store, and may be repeated."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            key,
            f"the store could not be judged: {reason}. This does not accuse it: try again when it answers, and see "
            "that nothing between daemon and store repeats requests",
        )


def probe(
    store: ObjectStore,
    prefix: str,
    *,
    races: int,
    between_s: float = 0.0,
    wait: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Try the store beneath `prefix`, which must be free.

    A race of which some writes have no answer counts for less than one of `races`, and for nothing if its winner is not
    known. `wait(between_s)` (seconds) is called before each race and may raise to end the probe. `monotonic` (seconds)
    bounds the time in races. Raises BrokenPromise, NotJudged if the store answers too little, and the store's errors.
    """
    trials = _Probe(store, prefix, races=races, between_s=between_s, wait=wait, monotonic=monotonic)
    try:
        trials.run()
    except BaseException as error:
        with suppress(StoreError):  # the trial's own error matters more
            trials.clean()
        if isinstance(error, StoreUnavailable | OutcomeUnknown) and not isinstance(error, NotJudged):
            raise NotJudged(error.key, error.reason) from error
        raise
    try:
        trials.clean()
    except StoreUnavailable as error:
        raise NotJudged(error.key, error.reason) from error


def has_passed(store: ObjectStore, bucket: Bucket) -> bool:
    """Return whether the root says that this bucket has passed this probe. Raises the store's errors."""
    try:
        found = manifest.decode_probe_pass(store.get(names.PROBE_PASS_KEY))
    except (NotFound, format_errors.FormatError):
        return False  # the long probe writes it anew
    return (found.endpoint, found.bucket, found.probe_version) == (bucket.endpoint, bucket.name, VERSION)


def remember(store: ObjectStore, bucket: Bucket, *, now_ms: int) -> None:
    """Store in the root that this bucket has passed the long probe now (Unix milliseconds).

    May be repeated; raises the store's errors.
    """
    passed = ProbePass(endpoint=bucket.endpoint, bucket=bucket.name, probe_version=VERSION, passed_ms=now_ms)
    store.put(names.PROBE_PASS_KEY, manifest.encode_probe_pass(passed))


def forget(store: ObjectStore) -> None:
    """Delete what `remember` has stored, so that the next start runs the long probe. Raises the store's errors."""
    store.delete(names.PROBE_PASS_KEY)


class _Probe:
    """The trials of one probe.

    `_written` has the keys that are certain to exist; `_raced` is what the races so far are worth, in races whose
    writers were all answered. The racers' threads call `_create`, `_check_holder` and `_delete`.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        races: int,
        between_s: float,
        wait: Callable[[float], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._races = races
        self._between_s = between_s
        self._wait = wait
        self._monotonic = monotonic
        self._written: set[str] = set()
        self._last_failure = "none"
        self._barrier = threading.Barrier(RACERS, timeout=_BARRIER_TIMEOUT_S)
        self._raced = self._racing_s = 0.0
        self._races_run = self._answered = self._without_winner = 0

    def run(self) -> None:
        if next(self._store.list(f"{self._prefix}/"), None) is not None:
            raise StoreRefused(self._prefix, "the prefix is not free, or the store invents objects")
        self._create_once()
        self._race()
        self._replace_and_read()
        self._list()
        self._delete_twice()

    def clean(self) -> None:
        for listed in tuple(self._store.list(f"{self._prefix}/")):
            self._store.delete(listed.key)

    # ---- trials with one writer

    def _create_once(self) -> None:
        for number in range(TRIES_MAX):
            key = self._created(f"once-{number}", "first")
            self._check_holder(key, "first")
            second = self._create(key, "second")
            if second is True:
                raise BrokenPromise(key, "put_if_absent replaced an object: the store ignores the condition")
            if second is False:
                self._check_holder(key, "first")
                return
        raise NotJudged(self._prefix, f"{TRIES_MAX} writes to an object that exists failed: {self._last_failure}")

    def _replace_and_read(self) -> None:
        # The first body is written by a request that was answered: none is on its way that could undo the put.
        key = self._created("replaced", "old")
        self._store.put(key, _FILLING)
        if self._store.get(key) != _FILLING:
            raise BrokenPromise(key, "a get after a put does not give what that put stored")
        for offset, length in ((0, 1), (257, 300), (len(_FILLING) - 1, 1)):
            if self._store.get_range(key, offset, length) != _FILLING[offset : offset + length]:
                raise BrokenPromise(key, f"get_range gives other bytes than the {length} from {offset}")

    def _list(self) -> None:
        missing = self._written - {listed.key for listed in self._store.list(f"{self._prefix}/")}
        if missing:
            raise BrokenPromise(
                self._prefix, f"list does not show what was written before: {', '.join(sorted(missing))}"
            )

    def _delete_twice(self) -> None:
        key = self._created("deleted", "only")
        self._delete(key)
        if not self._is_absent(key):
            raise BrokenPromise(key, "a deleted object is still there")
        try:
            self._delete(key)
        except NotFound as error:
            raise BrokenPromise(key, f"deleting an object that is gone must succeed: {error.reason}") from error

    # ---- races

    def _race(self) -> None:
        """Race until the races are worth as many as wanted."""
        delays_s = object_store.delays_s(random.random, first_s=_FIRST_DELAY_S, last_s=_LAST_DELAY_S)
        with ThreadPoolExecutor(RACERS, thread_name_prefix="probe") as threads:
            # A racer that had to connect first would be late.
            self._write_at_once(threads, lambda racer: f"{self._prefix}/warm-{racer}")
            while not self._has_raced_enough():
                winners: dict[str, str | None] = {}
                # After as many races as there are threads, each of them checks and deletes the object of one.
                while len(winners) < RACERS and not self._has_raced_enough():
                    self._wait(self._between_s)
                    key = f"{self._prefix}/race-{self._races_run}"
                    winners[key], answered = self._race_once(threads, key)
                    if answered < 2:
                        self._wait(next(delays_s))
                for _ in threads.map(self._check_and_delete, winners.items()):
                    pass

    def _has_raced_enough(self) -> bool:
        return self._raced > self._races - 1e-6  # it is a sum of rounded numbers

    def _race_once(self, threads: ThreadPoolExecutor, key: str) -> tuple[str | None, int]:
        """Run a race; return its winner, or None if it is not known, and how many racers were answered."""
        begun_s = self._monotonic()
        outcomes = self._write_at_once(threads, lambda _: key)
        self._racing_s += self._monotonic() - begun_s
        winners = [racer for racer, outcome in outcomes.items() if outcome is True]
        if len(winners) > 1:
            raise BrokenPromise(
                key, f"{len(winners)} of {RACERS} concurrent put_if_absent won: the store checks, and writes later"
            )
        answered = sum(outcome is not None for outcome in outcomes.values())
        self._races_run += 1
        self._answered += answered
        if winners:
            self._raced += _worth(answered)
            self._without_winner = 0
        else:
            self._without_winner += 1
        late = self._racing_s > RACING_MAX_S and not self._has_raced_enough()
        if late or self._without_winner == RACES_WITHOUT_WINNER_MAX:
            raise NotJudged(
                key,
                f"{self._answered} of {self._races_run * RACERS} writes in {self._races_run} races were answered "
                f"within {self._racing_s:.0f} s, and none of the last {self._without_winner} races had a known winner; "
                f"the last failure: {self._last_failure}",
            )
        return (winners[0] if winners else None), answered

    def _write_at_once(self, threads: ThreadPoolExecutor, key_of: Callable[[str], str]) -> dict[str, bool | None]:
        """Let all racers write at the same moment; return the outcome of each, as `_create` does."""

        def write(racer: str) -> bool | None:
            waited = False

            def wait_for_the_others() -> None:
                nonlocal waited
                waited = True
                self._barrier.wait()

            try:
                return self._create(key_of(racer), racer, wait_for_the_others)
            finally:
                if not waited:
                    self._barrier.wait()

        running = {racer: threads.submit(write, racer) for racer in map(str, range(RACERS))}
        try:
            return {racer: future.result() for racer, future in running.items()}
        except threading.BrokenBarrierError as error:
            raise NotJudged(self._prefix, f"its {RACERS} writers did not begin together") from error

    def _check_and_delete(self, raced: tuple[str, str | None]) -> None:
        key, winner = raced
        if winner is not None:
            self._check_holder(key, winner)
        self._delete(key)

    # ---- objects

    def _created(self, name: str, racer: str) -> str:
        """Create an object by a request that is answered; return its key."""
        absent = 0
        for number in range(TRIES_MAX):
            key = f"{self._prefix}/{name}-{number}"
            created = self._create(key, racer)
            if created is True:
                return key
            if created is False and self._is_absent(key):
                # A store may answer so while no writer has won.
                absent += 1
                self._last_failure = "an absent object is said to exist"
            elif created is False:
                self._last_failure = "an object of its own is said to exist already: its request was repeated"
        if absent == TRIES_MAX:
            raise BrokenPromise(f"{self._prefix}/{name}", "put_if_absent says that an absent object exists")
        raise NotJudged(f"{self._prefix}/{name}", f"none of {TRIES_MAX} writes succeeded: {self._last_failure}")

    def _create(self, key: str, racer: str, at_the_line: Callable[[], None] = lambda: None) -> bool | None:
        """Return whether `put_if_absent` won, or None if that is not known."""
        try:
            self._store.race_put_if_absent(
                key, _body_of(racer), metadata={_METADATA_KEY: racer}, at_the_line=at_the_line
            )
        except AlreadyExists:
            return False
        except (OutcomeUnknown, StoreUnavailable) as error:
            self._last_failure = error.reason
            return None
        self._written.add(key)
        return True

    def _check_holder(self, key: str, racer: str) -> None:
        """Check that `racer`, which was told that it has won, is shown to have written the object.

        By that, writers learn the outcome of a write without an answer.
        """
        try:
            metadata, body = self._store.head(key).metadata, self._store.get(key)
        except NotFound as error:
            raise BrokenPromise(key, f"put_if_absent succeeded for {racer!r}, and the object is not there") from error
        holder = metadata.get(_METADATA_KEY)
        if holder is None:
            raise BrokenPromise(key, f"head does not give back the metadata that was written; it has {dict(metadata)}")
        if holder != racer:
            raise BrokenPromise(key, f"put_if_absent succeeded for {racer!r}, and head shows metadata of {holder!r}")
        if body != _body_of(racer):
            raise BrokenPromise(key, f"the body is not the one that {racer!r} wrote, whose metadata it has")

    def _delete(self, key: str) -> None:
        self._store.delete(key)
        self._written.discard(key)

    def _is_absent(self, key: str) -> bool:
        try:
            self._store.head(key)
        except NotFound:
            return True
        return False


def _worth(answered: int) -> float:
    """Return what a race is worth of which so many writers were answered: 1.0 for all.

    A server that lets two of the racers win shows it to those who were answered only if both were.
    """
    missed = 1 - (1 - MISSED_BY_A_RACE) * math.comb(answered, 2) / math.comb(RACERS, 2)
    return math.log(missed) / math.log(MISSED_BY_A_RACE)


def _body_of(racer: str) -> bytes:
    return racer.encode("ascii") + _FILLING
