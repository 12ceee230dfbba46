"""The task that reads a run of manifests, and which manifests should be there.

Owns: reading each manifest of a sequence with the one before it, finding the tip, and telling a manifest that was
collected from one that was lost.
Does not own: what may follow what (`chain`), and the objects that manifests name (`object_task`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from batch.audit import chain as audit_chain
from batch.audit import content as audit_content
from batch.audit import reading as audit_reading
from batch.audit.findings import Finding, Flaw, Kind, Severity, Tally
from batch.audit.reading import Place, Read
from batch.engine.root import Root
from storage_backends import object_store, progress_objects
from storage_backends.commit import COMMIT_ID
from storage_backends.formats import format_errors, manifest, names
from storage_backends.formats.manifest import ShardManifest, TopicManifest

Manifest: TypeAlias = TopicManifest | ShardManifest


@dataclasses.dataclass(slots=True)
class ManifestsSeen:
    """What became of a run. `absent`: listed numbers that were not there any more. `deleted`: the highest manifest
    that says that the topic is deleted, 0 without any; those below it may go at once. `tip`: of the run that ends with
    it, None when it cannot be told.
    """

    tally: Tally = dataclasses.field(default_factory=Tally)
    absent: list[int] = dataclasses.field(default_factory=list)
    deleted: int = 0
    tip: Manifest | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Good:
    """A manifest that was read and is whole."""

    number: int
    manifest: Manifest
    sha256: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRun:
    """Manifests of one sequence, by ascending number. `before`: the listed number below them, None if there is none.
    `is_last`: behind them is nothing that was listed; what came since is read too.
    """

    place: Place
    numbers: tuple[int, ...]
    before: int | None
    is_last: bool

    def run(self, root: Root) -> ManifestsSeen:
        return _Run(self, root).seen()


class _Run:
    def __init__(self, run: ManifestRun, root: Root) -> None:
        self._run = run
        self._root = root
        self._place = run.place
        self._seen = ManifestsSeen()
        # None behind what could not be read.
        self._last: _Good | None = None
        self._tip_is_damaged = False
        self._decoder = manifest.TopicManifestDecoder()

    def seen(self) -> ManifestsSeen:
        run, seen = self._run, self._seen
        if run.before is not None:
            found = audit_reading.read(self._root.store, self._key(run.before))
            self._last = self._good(run.before, found, report=False)
        listed = audit_reading.read_all(self._root.store, map(self._key, run.numbers))
        for number, found in zip(run.numbers, listed, strict=True):
            self._take(number, found)
        if run.is_last:
            for number, found in self._behind(run.numbers[-1]):
                self._take(number, found)
            seen.tip = self._tip()
        return seen

    def _key(self, number: int) -> str:
        return names.numbered_key(self._place.manifest_prefix, number)

    def _behind(self, number: int) -> Iterator[tuple[int, Read]]:
        """What was committed since the listing."""
        while True:
            number += 1
            found = audit_reading.read(self._root.store, self._key(number))
            if found.absent:
                return
            yield number, found

    def _take(self, number: int, found: Read) -> None:
        before, self._last = self._last, self._good(number, found, report=True)
        self._tip_is_damaged = self._last is None and not found.absent
        if found.absent:
            self._seen.absent.append(number)
            return
        after = self._last
        if after is None or before is None or before.number != number - 1:
            return
        following = audit_chain.flaws_of_following_head(before.manifest.head, before.sha256, after.manifest.head)
        changed = [*_flaws_of_change(before.manifest, after.manifest), *self._flaws_of_merge(before, after)]
        self._report(number, after.manifest, [*following, *changed])

    def _flaws_of_merge(self, before: _Good, after: _Good) -> Iterator[Flaw]:
        """Whether a merge dropped rows that were not gone, as far as that can be told still."""
        was, made = before.manifest, after.manifest
        if not isinstance(was, TopicManifest) or not isinstance(made, TopicManifest):
            return
        if audit_chain.merge_dropped(was, made) <= 0:
            return
        try:
            progress = progress_objects.progress_of(self._root.store, was)
            yield from audit_chain.flaws_of_dropped(was, made, progress)
        except (object_store.StoreError, format_errors.FormatError):
            # A progress object that has been replaced since may be gone; a damaged one has a finding of its own.
            return

    def _good(self, number: int, found: Read, *, report: bool) -> _Good | None:
        """The manifest, if it is whole and has its number. `report`: what is wrong with it by itself."""
        if found.body is None:
            if report and found.damage:
                self._report(number, None, [Flaw(Kind.DAMAGED, found.damage)])
            elif report and found.failure:
                self._report(number, None, [Flaw(Kind.UNREADABLE, found.failure)])
            return None
        try:
            body, decoded = audit_reading.decoded(self._root.store, found, found.body, self._decoded)
        except format_errors.FormatError as error:
            if report:
                self._report(number, None, [audit_content.damaged(error)])
            return None
        if report:
            what = "topic manifest" if self._place.topic_id else "shard manifest"
            self._seen.tally.saw(what, len(body))
            flaws = [*self._own_flaws(number, decoded, found.metadata.get(COMMIT_ID, ""))]
            self._report(number, decoded, flaws)
            if isinstance(decoded, TopicManifest) and decoded.deleted:
                self._seen.deleted = number
        if decoded.head.number != number:
            return None
        return _Good(number, decoded, hashlib.sha256(body).digest())

    def _decoded(self, body: bytes) -> Manifest:
        """Raises FormatError, also when it is of another topic or shard."""
        if self._place.topic_id:
            topic = self._decoder.decode(body)
            if topic.topic_id != self._place.topic_id:
                raise format_errors.FormatError("topic manifest", 0, f"it belongs to topic {topic.topic!r}")
            return topic
        shard = manifest.decode_shard_manifest(body)
        if shard.shard != self._place.shard:
            raise format_errors.FormatError("shard manifest", 0, f"it belongs to shard {shard.shard}")
        return shard

    def _own_flaws(self, number: int, decoded: Manifest, commit_id: str) -> Iterator[Flaw]:
        if decoded.head.number != number:
            yield Flaw(Kind.CHAIN_BROKEN, f"it says that its number is {decoded.head.number}")
        elif isinstance(decoded, ShardManifest):
            yield from audit_chain.flaws_of_shard(decoded, number=number, commit_id=commit_id)
        else:
            yield from audit_chain.flaws_of_topic(
                decoded, number=number, shards=self._root.shards, shard=self._place.shard, commit_id=commit_id
            )
            if decoded.progress is not None:
                yield from audit_content.progress_flaws(decoded.progress)

    def _tip(self) -> Manifest | None:
        """The last one that was read; None when it is damaged: no older one stands in for it."""
        if self._last is not None:
            return self._last.manifest
        if self._tip_is_damaged:
            return None
        # The last one that was listed has been collected: there are later ones.
        try:
            if self._place.topic_id:
                topic = self._root.tip(self._place.of_topic)
                return None if topic is None else topic.manifest
            shard = self._root.shard_tip(self._place.shard)
            return None if shard is None else shard.manifest
        except object_store.Damaged as error:
            self._report(0, None, [Flaw(Kind.DAMAGED, str(error))])
        except object_store.StoreError as error:
            self._report(0, None, [Flaw(Kind.UNREADABLE, str(error))])
        return None

    def _report(self, number: int, decoded: Manifest | None, flaws: Iterable[Flaw]) -> None:
        topic = decoded.topic if isinstance(decoded, TopicManifest) else self._place.topic_id
        for flaw in flaws:
            self._seen.tally.find(
                Finding(
                    kind=flaw.kind,
                    severity=Severity.ERROR,
                    object=self._key(number) if number else self._place.manifest_prefix,
                    detail=flaw.detail,
                    shard=self._place.shard,
                    topic=topic,
                    offset=flaw.offset,
                )
            )


def _flaws_of_change(before: Manifest, after: Manifest) -> Iterator[Flaw]:
    if isinstance(before, TopicManifest) and isinstance(after, TopicManifest):
        yield from audit_chain.flaws_of_following_topic(before, after)
    elif isinstance(before, ShardManifest) and isinstance(after, ShardManifest):
        yield from audit_chain.flaws_of_following_shard(before, after)


# ---- which should be there


def not_there(listed: Sequence[int], seen: Sequence[ManifestsSeen], tip: int, kept: int) -> list[int]:
    """Numbers below the tip that were neither found nor may have been collected, ascending. `kept`: how many the newest
    ones are that are never collected; but for those below a manifest that says that the topic is deleted.
    """
    found = set(listed) - {number for part in seen for number in part.absent}
    deleted = max((part.deleted for part in seen), default=0)
    highest = max(found, default=0)
    return [number for number in range(max(tip - kept + 1, deleted, 1), min(tip, highest)) if number not in found]


def lost(root: Root, place: Place, candidates: Sequence[int], kept: int) -> list[int]:
    """Candidates that are not there and that no newer tip explains. Raises the store's errors."""
    log_of = root.log(place.of_topic) if place.topic_id else None
    gone = [number for number in candidates if not _is_there(root, names.numbered_key(place.manifest_prefix, number))]
    if not gone:
        return []
    tip = root.shard_tip(place.shard) if log_of is None else log_of.read_tip()
    newest = 0 if tip is None else tip.number
    return [number for number in gone if number > newest - kept]


def _is_there(root: Root, key: str) -> bool:
    try:
        root.store.head(key)
    except object_store.NotFound:
        return False
    except object_store.Damaged:
        return True
    return True
