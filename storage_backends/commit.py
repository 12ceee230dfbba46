"""The commit primitive: numbered, immutable manifests, each created only if absent. A number that exists is history.

Owns: reading the tip of a sequence of manifests and adding one behind it, exactly once, whatever answers are lost.
Does not own: what a manifest says, and which operation may follow which (`topic_manifest`, the shard's operations).

    tip = read_tip()
    the operation has landed (its commit id is in the lineage, or its object is in the tip)   -> committed
    its precondition fails on the tip                                                         -> Refused
    PUT number + 1 if absent, the bytes frozen before the first try
      created                                       -> verify
      exists, time-out, error -> HEAD: our commit id -> verify; another -> begin again; absent -> the same PUT again
      HEAD fails too          -> until the deadline, then CommitOutcomeUnknown, never "failed"
    verify, after a retry or a long pause: a later number with our commit id in its lineage, or none -> committed

R1: conditional PUTs only, frozen bytes. R2: commit id and HEAD decide; absence proves nothing. R3: verify, since a slot
that garbage collection has emptied can be created again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from storage_backends.formats import errors, names
from storage_backends.formats.manifest import LINEAGE_MAX, ManifestHead
from storage_backends.object_store import Damaged, NotFound, ObjectStore, StoreError

COMMIT_ID = "commitid"
# Numbers that are probed behind a known tip before the sequence is listed instead.
PROBES_MAX = 4
# A tip that was read longer ago may be of a slot that has been emptied since: the commit is verified.
VERIFY_AFTER_S = 600.0
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 2.0

_Read = TypeVar("_Read", covariant=True)


class Headed(Protocol):
    """A manifest: a frozen dataclass that begins with a head."""

    @property
    def head(self) -> ManifestHead: ...


M = TypeVar("M", bound=Headed)


@dataclasses.dataclass(frozen=True, slots=True)
class Codec(Generic[M]):
    """The bytes of a manifest. `with_head` returns it with another head. `decode` raises FormatError on damage."""

    encode: Callable[[M], bytes]
    decode: Callable[[bytes], M]
    with_head: Callable[[M, ManifestHead], M]


@dataclasses.dataclass(frozen=True, slots=True)
class Tip(Generic[M]):
    """The newest manifest that was seen. `read_at`: monotonic seconds, when its read was sent."""

    number: int
    manifest: M
    sha256: bytes
    read_at: float


class Operation(Protocol[M]):
    """A change of a manifest. It may be applied to many tips before one of them is the one that it is committed on."""

    def precondition(self, tip: M | None) -> str | None:
        """Why it may not follow this tip; None when it may."""
        ...

    def apply(self, tip: M | None) -> M:
        """The manifest that follows; its head is filled in by the commit."""
        ...

    def landed(self, tip: M) -> bool:
        """Whether the tip shows that it was committed before, by an object that only it could have brought in."""
        ...


class Refused(Exception):
    """The precondition failed on the tip. The committer deletes nothing: its output is an orphan."""

    def __init__(self, reason: str, tip: Tip[M] | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tip = tip


class CommitOutcomeUnknown(Exception):
    """The manifest may or may not have landed. The same operation may be committed again: it is applied once."""


class Observer(Protocol):
    """Hears how commits went; called in the committer's thread."""

    def committed(self, operation: str, *, conflicts: int) -> None: ...

    def refused(self, operation: str, *, conflicts: int) -> None: ...

    def unknown(self, operation: str, *, conflicts: int) -> None: ...


class ManifestLog(Generic[M]):
    """One sequence of manifests under a key prefix. Thread-safe: it holds no state."""

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
        """The manifest with the highest number; None when there is none.

        `warm`: a tip that was read before: the numbers behind it are probed first. Raises Damaged when the tip cannot
        be decoded, never falling back to an older one, and the store's errors.
        """
        read_at = self.monotonic()
        if warm is None:
            return self._read_cold(read_at)
        tip = dataclasses.replace(warm, read_at=read_at)
        for _ in range(PROBES_MAX):
            following = self.read(tip.number + 1, read_at)
            if following is None:
                return tip
            tip = following
        return self._read_cold(read_at)

    def _read_cold(self, read_at: float) -> Tip[M] | None:
        while True:
            number = max((names.number_of(entry.key) for entry in self.store.list(self.prefix)), default=None)
            if number is None:
                return None
            tip = self.read(number, read_at)
            if tip is not None:
                return tip
            # It was collected between the listing and the read: there is a newer one.

    def read(self, number: int, read_at: float) -> Tip[M] | None:
        """One manifest; None when it is absent."""
        key = self.key(number)
        try:
            body = self.store.get(key)
        except NotFound:
            return None
        try:
            manifest = self.codec.decode(body)
        except errors.FormatError as error:
            raise Damaged(key, str(error)) from error
        if manifest.head.number != number:
            raise Damaged(key, f"it says that its number is {manifest.head.number}")
        return Tip(number, manifest, hashlib.sha256(body).digest(), read_at)

    def later_than(self, number: int) -> bool:
        """Whether a manifest with a higher number exists, by listing: numbers in between may have been collected."""
        listed = self.store.list(self.prefix, start_after=self.key(number))
        return any(names.number_of(entry.key) > number for entry in listed)

    def in_lineage(self, commit_id: str, tip: Tip[M], *, down_to: int) -> bool:
        """Whether a commit id is among the tip's ancestors: by its ring, and beyond that by walking back.

        `down_to`: the lowest number that the commit can have.
        """
        current: Tip[M] | None = tip
        while current is not None and current.number >= down_to:
            head = current.manifest.head
            if commit_id in head.lineage:
                return True
            oldest = current.number - len(head.lineage)
            if oldest < down_to or len(head.lineage) < LINEAGE_MAX:
                return False
            current = self.read(oldest, tip.read_at)
        return False


def commit(
    log: ManifestLog[M],
    operation: Operation[M],
    *,
    writer: str,
    created_ms: int,
    warm: Tip[M] | None = None,
    deadline_s: float,
) -> Tip[M]:
    """Commits the operation behind the tip and returns the tip that holds it.

    `writer`, `created_ms`: for people who read the manifest. `warm`: a tip that was read before. Raises Refused,
    CommitOutcomeUnknown after `deadline_s` of silence, Damaged, and the store's error when the tip cannot be read
    before anything was tried.
    """
    return _Commit(log, operation, writer, created_ms, deadline_s).run(warm)


class _Commit(Generic[M]):
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
        self._conflicts = 0

    def run(self, warm: Tip[M] | None) -> Tip[M]:
        tip = self._log.read_tip(warm)
        while True:
            landed = self._landed(tip)
            if landed is not None:
                return self._committed(landed)
            reason = self._operation.precondition(None if tip is None else tip.manifest)
            if reason is not None:
                if self._log.observer is not None:
                    self._log.observer.refused(self._name, conflicts=self._conflicts)
                raise Refused(reason, tip)
            created = self._put_behind(tip)
            if created is not None:
                return self._committed(created)
            self._conflicts += 1
            tip = self._patiently(lambda tip=tip: self._log.read_tip(tip))  # type: ignore[misc]

    def _committed(self, tip: Tip[M]) -> Tip[M]:
        if self._log.observer is not None:
            self._log.observer.committed(self._name, conflicts=self._conflicts)
        return tip

    def _landed(self, tip: Tip[M] | None) -> Tip[M] | None:
        """The tip, when it shows that the operation is committed."""
        if tip is None:
            return None
        if self._first_tried is not None and self._patiently(
            lambda: self._log.in_lineage(self._commit_id, tip, down_to=self._first_tried or 0)
        ):
            return tip
        return tip if self._operation.landed(tip.manifest) else None

    def _put_behind(self, tip: Tip[M] | None) -> Tip[M] | None:
        """Puts the next manifest until its outcome is certain; None when another one has the number."""
        made, body = self._frozen(tip)
        number = made.head.number
        if self._first_tried is None:
            self._first_tried = number
        key, metadata = self._log.key(number), {COMMIT_ID: self._commit_id}
        tries = 0
        delay_s = FIRST_DELAY_S
        while True:
            tries += 1
            try:
                self._log.store.put_if_absent(key, body, metadata=metadata)
            except StoreError:
                holder = self._patiently(lambda: self._holder(key))
                if holder is None:
                    delay_s = self._pause(delay_s, f"manifest {key} is absent after {tries} tries")
                    continue
                if holder != self._commit_id:
                    return None
                tries += 1
            break
        created = Tip(number, made, hashlib.sha256(body).digest(), self._log.monotonic())
        paused_s = created.read_at - (tip.read_at if tip is not None else created.read_at)
        if tries > 1 or paused_s > VERIFY_AFTER_S:
            return self._verified(created)
        return created

    def _frozen(self, tip: Tip[M] | None) -> tuple[M, bytes]:
        before = None if tip is None else tip.manifest.head
        head = ManifestHead(
            number=1 if tip is None else tip.number + 1,
            previous_sha256=b"" if tip is None else tip.sha256,
            commit_id=self._commit_id,
            writer=self._writer,
            created_ms=self._created_ms,
            lineage=(*(() if before is None else before.lineage), self._commit_id)[-LINEAGE_MAX:],
            orphan_floor=0 if before is None else before.orphan_floor,
        )
        made = self._log.codec.with_head(self._operation.apply(None if tip is None else tip.manifest), head)
        return made, self._log.codec.encode(made)

    def _holder(self, key: str) -> str | None:
        """The commit id of the manifest that is there."""
        try:
            return self._log.store.head(key).metadata.get(COMMIT_ID, "")
        except NotFound:
            return None

    def _verified(self, created: Tip[M]) -> Tip[M] | None:
        """R3: what was created may be a number that had been used and emptied: then it is no part of history."""
        if not self._patiently(lambda: self._log.later_than(created.number)):
            return created
        tip = self._patiently(self._log.read_tip)
        if tip is not None and self._patiently(
            lambda: self._log.in_lineage(self._commit_id, tip, down_to=created.number)
        ):
            return tip
        return None

    def _patiently(self, read: Callable[[], _Read]) -> _Read:
        """A read that decides the outcome of something that was tried: until the deadline."""
        delay_s = FIRST_DELAY_S
        while True:
            try:
                return read()
            except Damaged:
                raise
            except StoreError as error:
                delay_s = self._pause(delay_s, str(error))

    def _pause(self, delay_s: float, reason: str) -> float:
        """Waits with jitter; the next delay. Raises CommitOutcomeUnknown at the deadline."""
        if self._log.monotonic() + delay_s > self._deadline_at:
            if self._log.observer is not None:
                self._log.observer.unknown(self._name, conflicts=self._conflicts)
            raise CommitOutcomeUnknown(f"whether {self._name} is committed under {self._log.prefix} is open: {reason}")
        self._log.sleep(delay_s * (0.5 + self._log.jitter() / 2))
        return min(2 * delay_s, LAST_DELAY_S)
