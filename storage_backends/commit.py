"""Commits numbered, immutable manifests, each created only if absent: a number that exists is history.

A commit reads the tip of a sequence and adds one manifest behind it, exactly once, whatever answers are lost:

    read the tip
    its object is in the tip, or its commit id in the lineage   -> committed
    its precondition fails on the tip                           -> Refused; its output stays for garbage collection
    PUT number + 1 if absent, the bytes frozen before the first try
      created at the first try, soon after the tip was read     -> committed
      created otherwise                                         -> begin again with a listed tip: that verifies it
      exists, no answer, an error   -> HEAD: our commit id      -> begin again with a listed tip
                                             another            -> begin again
                                             absent             -> the same PUT again, after a pause
                                             it fails           -> HEAD again; at the deadline CommitOutcomeUnknown

R1: conditional PUTs only, with frozen bytes. R2: commit id and HEAD decide; absence proves nothing. R3: after a retry
or a long pause garbage collection may have emptied the number, and then the created object is no history. It is
committed only if the tip, found by listing, has the commit id in its lineage.

`topic_manifest`, and the daemon's operations on shards, decide what a manifest says and which operation may follow
which.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from storage_backends.formats import format_errors, names
from storage_backends.formats.manifest import LINEAGE_MAX, ManifestHead
from storage_backends.object_store import (
    Damaged,
    NotFound,
    ObjectStore,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    unreadable,
)

COMMIT_ID: Final = "commitid"
"""The metadata key under which HEAD shows whose manifest it is."""

PROBES_MAX: Final = 4
"""Numbers behind a known tip that are probed before the sequence is listed instead."""

WARM_MAX_S: Final = 12 * 3600.0
"""Half the time for which manifests are kept (seconds): no number behind a tip read since then has been emptied."""

VERIFY_AFTER_S: Final = 600.0
"""Time from the read of the tip to the end of a PUT (seconds) after which the PUT is verified (R3)."""

FIRST_DELAY_S: Final = 0.05
LAST_DELAY_S: Final = 2.0

NO_HEAD: Final = ManifestHead(number=0, previous_sha256=b"", commit_id="", writer="", created_ms=0)
"""The head of a first manifest until the commit gives it its own."""

_Read = TypeVar("_Read")


class Headed(Protocol):
    """A manifest: a frozen value that begins with a head."""

    @property
    def head(self) -> ManifestHead: ...


M = TypeVar("M", bound=Headed)


@dataclasses.dataclass(frozen=True, slots=True)
class Codec(Generic[M]):
    """The conversion of a manifest to and from bytes.

    `with_head` returns it with another head. `decode` raises FormatError on damage.
    """

    encode: Callable[[M], bytes]
    decode: Callable[[bytes], M]
    with_head: Callable[[M, ManifestHead], M]


@dataclasses.dataclass(frozen=True, slots=True)
class Tip(Generic[M]):
    """The newest manifest at some time after `read_at`, when its read or its PUT was sent (monotonic seconds)."""

    number: int
    manifest: M
    sha256: bytes
    read_at: float


class Operation(Protocol[M]):
    """A change of a manifest, which may be applied to many tips before it is committed on one of them.

    An operation may be committed again after CommitOutcomeUnknown if `landed` or `precondition` keeps it from being
    applied to a tip that has it already.
    """

    def precondition(self, tip: M | None) -> str | None:
        """Return why it may not follow this tip, or None if it may. The tip is None before the first manifest."""
        ...

    def apply(self, tip: M | None) -> M:
        """Return the manifest that follows. The commit fills in its head, all but `orphan_floor`."""
        ...

    def landed(self, tip: M) -> bool:
        """Return whether the tip shows that it was committed before, by an object that only it can have added."""
        ...


class Refused(Exception):
    """The error of a commit whose precondition failed on the tip.

    The committer deletes nothing: its output is an orphan.
    """

    def __init__(self, reason: str, tip: Tip[Any] | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tip = tip


class DamagedBefore(Damaged):
    """The error of a commit that found damage before it tried to write a manifest: it never lands."""


class CommitOutcomeUnknown(Exception):
    """The error of a commit that may have landed, or may land later. The same operation may be committed again."""


# The errors of a commit that may be repeated unchanged.
UNCERTAIN: Final = (StoreError, CommitOutcomeUnknown)


class Observer(Protocol):
    """An observer of how commits ended, called in the committer's thread.

    `conflicts` counts how often another commit came first.
    """

    def committed(self, operation: str, *, conflicts: int) -> None: ...

    def refused(self, operation: str, *, conflicts: int) -> None: ...

    def unknown(self, operation: str, *, conflicts: int) -> None: ...


class ManifestLog(Generic[M]):
    """One sequence of manifests under a key prefix.

    Thread-safe, because it holds no state. `monotonic` returns seconds and counts while the machine is suspended.
    `jitter` returns a new number in [0, 1) at each call. `new_id` returns commit ids that are never used again.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        codec: Codec[M],
        *,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
        jitter: Callable[[], float],
        new_id: Callable[[], str],
        observer: Observer | None = None,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.codec = codec
        self.monotonic = monotonic
        self.sleep = sleep
        self.jitter = jitter
        self.new_id = new_id
        self.observer = observer

    def key(self, number: int) -> str:
        return names.numbered_key(self.prefix, number)

    def read_tip(self, warm: Tip[M] | None = None) -> Tip[M] | None:
        """Return the manifest with the highest number, or None if there is none.

        `warm` is a tip that was read before; if it is recent enough, the numbers behind it are probed and nothing is
        listed. Never falls back to an older manifest: raises Damaged if the tip cannot be decoded or does not follow
        its predecessor. Raises the store's errors.
        """
        if warm is not None and self._is_recent(warm):
            tip = self._probe_behind(warm)
            # It may have grown old during the probes, if the process was paused.
            if tip is not None and self._is_recent(warm):
                return tip
        return self._read_listed()

    def read_at(self, number: int, listed_at: float) -> Tip[M] | None:
        """Read the manifest that a listing, sent at `listed_at`, showed as the highest.

        Returns None if it has been collected. Raises Damaged, and the store's errors.
        """
        return self._read(number, listed_at)

    def _is_recent(self, tip: Tip[M]) -> bool:
        return self.monotonic() - tip.read_at < WARM_MAX_S

    def _probe_behind(self, warm: Tip[M]) -> Tip[M] | None:
        """Find the tip by reading the numbers behind `warm` up to the first absent one.

        Returns None if that takes more than PROBES_MAX reads.
        """
        read_at = self.monotonic()
        tip = dataclasses.replace(warm, read_at=read_at)
        for _ in range(PROBES_MAX):
            following = self._read(tip.number + 1, read_at)
            if following is None:
                return tip
            self._check_follows(following, tip)
            tip = following
        return None

    def _read_listed(self) -> Tip[M] | None:
        """Find the tip by listing, which shows it whatever was collected before it."""
        absent = None
        while True:
            read_at = self.monotonic()
            listed = (names.number_in(self.prefix, entry.key) for entry in self.store.list(self.prefix))
            # A foreign object among them is none of the sequence, and the audit names it.
            number = max((each for each in listed if each is not None), default=None)
            if number is None:
                return None
            tip = self._read(number, read_at)
            if tip is not None:
                return tip
            # Only a manifest that has a later one is ever collected: the next listing shows a higher number.
            if number == absent:
                raise StoreUnavailable(self.key(number), "it is the last one listed, but it does not exist")
            absent = number

    def _read(self, number: int, read_at: float) -> Tip[M] | None:
        """Read one manifest. Returns None if it is absent."""
        key = self.key(number)
        try:
            body = self.store.get(key)
        except NotFound:
            return None
        try:
            manifest = self.codec.decode(body)
        except format_errors.FormatError as error:
            raise unreadable(key, error) from error
        if manifest.head.number != number:
            raise Damaged(key, f"it says that its number is {manifest.head.number}")
        return Tip(number, manifest, hashlib.sha256(body).digest(), read_at)

    def _check_follows(self, tip: Tip[M], before: Tip[M]) -> None:
        if tip.manifest.head.previous_sha256 != before.sha256:
            raise Damaged(
                self.key(tip.number),
                f"it follows a manifest with SHA-256 {tip.manifest.head.previous_sha256.hex()}, "
                f"number {before.number} has {before.sha256.hex()}",
            )

    def in_lineage(self, commit_id: str, tip: Tip[M], *, down_to: int) -> bool:
        """Return whether the commit is `tip` or an ancestor, by the tip's ring, then by walking back.

        `down_to` is the lowest number that the commit can have. Raises CommitOutcomeUnknown if a decisive ancestor has
        been collected, Damaged if one does not follow its predecessor, and the store's errors.
        """
        while True:
            lineage = tip.manifest.head.lineage
            if commit_id in lineage:
                return True
            if tip.number - len(lineage) < down_to:
                return False
            before = self._read(tip.number - 1, tip.read_at)
            if before is None:
                raise CommitOutcomeUnknown(
                    f"manifest {self.key(tip.number - 1)} was deleted as garbage, so it is unknown "
                    f"whether commit {commit_id} is among its ancestors"
                )
            self._check_follows(tip, before)
            tip = before


def commit(
    log: ManifestLog[M],
    operation: Operation[M],
    *,
    writer: str,
    created_ms: int,
    warm: Tip[M] | None = None,
    just_read: bool = False,
    deadline_s: float,
) -> Tip[M]:
    """Commit the operation and return a tip that holds it: its own manifest, or a later one.

    `writer` and `created_ms` are for people who read the manifest. `warm` is a tip that was read before; with
    `just_read` it was read for this commit, and nothing is read again before the first try. `deadline_s` limits how
    long a failing store is retried (seconds). Raises Refused, Damaged or CommitOutcomeUnknown if the manifest may have
    been written, and DamagedBefore or the store's error if it certainly was not.
    """
    return _Commit(log, operation, writer, created_ms, deadline_s).run(warm, just_read=just_read)


class _Outcome(enum.Enum):
    """The outcome of one PUT of a manifest.

    `CREATED` means created by the only PUT, in time; `VERIFY`, that the manifest is there; `OTHER`, that another one
    is.
    """

    CREATED = enum.auto()
    VERIFY = enum.auto()
    OTHER = enum.auto()


class _Commit(Generic[M]):
    """One commit id from the first read to its outcome."""

    def __init__(
        self, log: ManifestLog[M], operation: Operation[M], writer: str, created_ms: int, deadline_s: float
    ) -> None:
        self._log = log
        self._operation = operation
        self._writer = writer
        self._created_ms = created_ms
        self._deadline_at = log.monotonic() + deadline_s
        self._commit_id = log.new_id()
        self._name = type(operation).__name__
        # The lowest number that was tried; None before the first try.
        self._first_tried: int | None = None
        # True once a PUT was sent whose manifest may be, or become, part of history
        self._uncertain = False
        self._conflicts = 0

    def run(self, warm: Tip[M] | None, *, just_read: bool) -> Tip[M]:
        try:
            return self._observed(warm, just_read=just_read)
        except Damaged as error:
            if self._first_tried is None:
                raise DamagedBefore(error.key, error.reason) from error
            raise

    def _observed(self, warm: Tip[M] | None, *, just_read: bool) -> Tip[M]:
        observer = self._log.observer
        if observer is None:
            return self._commit(warm, just_read=just_read)
        try:
            tip = self._commit(warm, just_read=just_read)
        except Refused:
            observer.refused(self._name, conflicts=self._conflicts)
            raise
        except CommitOutcomeUnknown:
            observer.unknown(self._name, conflicts=self._conflicts)
            raise
        observer.committed(self._name, conflicts=self._conflicts)
        return tip

    def _commit(self, warm: Tip[M] | None, *, just_read: bool) -> Tip[M]:
        begun_at, tip = self._log.monotonic(), warm
        just_read = just_read and warm is not None and begun_at - warm.read_at <= VERIFY_AFTER_S
        if just_read and warm is not None:
            begun_at = warm.read_at
        else:
            tip = self._log.read_tip(warm)
        while True:
            if tip is not None and self._has_landed(tip):
                return tip
            self._uncertain = False
            reason = self._operation.precondition(None if tip is None else tip.manifest)
            if reason is not None:
                if just_read:
                    # The tip on which it fails may be out of date.
                    begun_at = self._log.monotonic()
                    just_read, tip = False, self._log.read_tip(tip)
                    continue
                raise Refused(reason, tip)
            made = self._following(tip)
            body = self._log.codec.encode(made)
            sent_at = self._log.monotonic()
            outcome = self._put(made.head.number, body, begun_at)
            if outcome is _Outcome.CREATED:
                return Tip(made.head.number, made, hashlib.sha256(body).digest(), sent_at)
            if outcome is _Outcome.OTHER:
                self._conflicts += 1
            just_read = False
            again = tip if outcome is _Outcome.OTHER else None
            begun_at = self._log.monotonic()
            tip = self._tip_from(made.head.number, again)

    def _has_landed(self, tip: Tip[M]) -> bool:
        if self._operation.landed(tip.manifest):
            return True
        down_to = self._first_tried
        if down_to is None:
            return False
        return self._patiently(lambda: self._log.in_lineage(self._commit_id, tip, down_to=down_to))

    def _following(self, tip: Tip[M] | None) -> M:
        """Make the manifest behind `tip`, with its head filled in."""
        made = self._operation.apply(None if tip is None else tip.manifest)
        lineage = () if tip is None else tip.manifest.head.lineage
        head = ManifestHead(
            number=1 if tip is None else tip.number + 1,
            previous_sha256=b"" if tip is None else tip.sha256,
            commit_id=self._commit_id,
            writer=self._writer,
            created_ms=self._created_ms,
            lineage=(*lineage, self._commit_id)[-LINEAGE_MAX:],
            orphan_floor=made.head.orphan_floor,
        )
        return self._log.codec.with_head(made, head)

    def _put(self, number: int, body: bytes, begun_at: float) -> _Outcome:
        """Put one manifest until it is certain whose manifest has the number.

        `begun_at` is when the read of its tip was sent (monotonic seconds).
        """
        if self._first_tried is None:
            self._first_tried = number
        key = self._log.key(number)
        delay_s = FIRST_DELAY_S
        retried = False
        while True:
            try:
                self._log.store.put_if_absent(key, body, metadata={COMMIT_ID: self._commit_id})
            except StoreError as error:
                if isinstance(error, StoreRefused) and not self._uncertain:
                    raise
                self._uncertain = True
                holder = self._patiently(lambda: self._holder(key))
                if holder is not None:
                    return _Outcome.VERIFY if holder == self._commit_id else _Outcome.OTHER
                delay_s = self._pause(delay_s, error)
                retried = True
                continue
            self._uncertain = True
            verify = retried or self._log.monotonic() - begun_at > VERIFY_AFTER_S
            return _Outcome.VERIFY if verify else _Outcome.CREATED

    def _holder(self, key: str) -> str | None:
        """Return the commit id of the manifest that is there, or None if there is none."""
        try:
            return self._log.store.head(key).metadata.get(COMMIT_ID, "")
        except NotFound:
            return None

    def _tip_from(self, number: int, warm: Tip[M] | None) -> Tip[M]:
        """Read the tip, which is `number` or higher, because `number` was seen by HEAD or created."""

        def read() -> Tip[M]:
            tip = self._log.read_tip(warm)
            if tip is None or tip.number < number:
                raise StoreUnavailable(self._log.key(number), "it exists, but reading the tip does not show it")
            return tip

        return self._patiently(read)

    def _patiently(self, read: Callable[[], _Read]) -> _Read:
        """Repeat, until the deadline, a read that decides the outcome of a PUT."""
        delay_s = FIRST_DELAY_S
        while True:
            try:
                return read()
            except Damaged:
                raise
            except StoreError as error:
                delay_s = self._pause(delay_s, error)

    def _pause(self, delay_s: float, error: StoreError) -> float:
        """Wait with jitter and return the next delay (seconds).

        At the deadline raises CommitOutcomeUnknown if the outcome is uncertain, else `error`.
        """
        if self._log.monotonic() + delay_s <= self._deadline_at:
            self._log.sleep(delay_s * (0.5 + self._log.jitter() / 2))
            return min(2 * delay_s, LAST_DELAY_S)
        if not self._uncertain:
            raise error
        raise CommitOutcomeUnknown(
            f"cannot tell whether {self._name} is committed under {self._log.prefix}: {error}"
        ) from error
