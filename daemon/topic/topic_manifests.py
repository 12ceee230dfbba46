"""Commits and reads the manifests of topics, retrying until the outcome is certain.

It keeps the newest manifest of a topic that this owner knows, and orders the owner's commits. `storage_backends.commit`
is the primitive, `storage_backends.topic_manifest` has the operations. `shard_log` and `commit_once` are used for shard
manifests, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from daemon.errors import Corruption
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from storage_backends import commit, shard_manifests, topic_manifest
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.object_store import Damaged

log = logging.getLogger(__name__)

# Time of one attempt to commit (seconds); an uncertain one is tried again with the same operation.
DEADLINE_S = 30.0
# Longest description of damage in a manifest (characters)
DAMAGE_CHARACTERS_MAX = 500

Operation = commit.Operation[TopicManifest]

M = TypeVar("M", bound=commit.Headed)


def shard_log(environment: Environment, shard: int) -> commit.ManifestLog[ShardManifest]:
    """Return the manifests of a shard."""
    return shard_manifests.shard_log(
        environment.store,
        shard,
        monotonic=environment.clock.elapsed_s,
        sleep=environment.blocking_sleep,
        jitter=environment.jitter,
        new_id=environment.new_id,
        observer=environment.commit_observer,
    )


def topic_log(environment: Environment, shard: int, topic_id: str) -> commit.ManifestLog[TopicManifest]:
    """Return the manifests of a topic."""
    return topic_manifest.topic_log(
        environment.store,
        shard,
        topic_id,
        monotonic=environment.clock.elapsed_s,
        sleep=environment.blocking_sleep,
        jitter=environment.jitter,
        new_id=environment.new_id,
        observer=environment.commit_observer,
    )


def commit_once(
    environment: Environment,
    manifests: commit.ManifestLog[M],
    operation: commit.Operation[M],
    *,
    warm: commit.Tip[M] | None,
    just_read: bool = False,
    deadline_s: float = DEADLINE_S,
) -> commit.Tip[M]:
    """Attempt once to commit in the name of this daemon, in a thread. See `commit.commit`."""
    return commit.commit(
        manifests,
        operation,
        writer=environment.config.daemon_id,
        created_ms=environment.clock.now_ms(),
        warm=warm,
        just_read=just_read,
        deadline_s=deadline_s,
    )


class Overtaken(commit.Refused):
    """A refusal because a bucket of the operation was merged by another process. This daemon still owns the topic."""


def overtaken(refused: commit.Refused, *, epoch: int) -> Overtaken | None:
    """Return an `Overtaken` if the refusal means that for the owner of `epoch`.

    Returns None if the topic has another owner or was deleted.
    """
    tip: commit.Tip[TopicManifest] | None = refused.tip
    if tip is None or tip.manifest.owner_epoch != epoch or tip.manifest.deleted:
        return None
    return Overtaken(refused.reason, tip)


class TopicManifests:
    """The manifests of one topic of a shard that is owned under `epoch`.

    Other processes may merge its buckets: every manifest that is read here may name some that this owner does not serve
    yet.
    """

    def __init__(
        self,
        manifests: commit.ManifestLog[TopicManifest],
        tip: commit.Tip[TopicManifest],
        environment: Environment,
        *,
        shard: int,
        epoch: int,
    ) -> None:
        self.shard = shard
        self.epoch = epoch
        # The newest known manifest: a warm start for another commit
        self.tip = tip
        self.manifest = tip.manifest
        self.number = tip.number
        self._manifests = manifests
        self._environment = environment
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[TopicManifest]] = set()

    def saw(self, tip: commit.Tip[TopicManifest]) -> None:
        """Record a tip that other code in this process has read or committed. Later work is based on it."""
        if tip.number >= self.number:
            self.tip, self.manifest, self.number = tip, tip.manifest, tip.number

    @property
    def read_at_s(self) -> float:
        """The last time at which the newest known manifest certainly was the tip (monotonic seconds)."""
        return self.tip.read_at

    async def commit(
        self, operation: Callable[[TopicManifest], Operation], *, run: backoff.Run | None = None
    ) -> TopicManifest:
        """Commit the operation made for the tip; return the manifest that has it, or a later one.

        It retries until that is certain, however long the store is unreachable. `run` uses a pool, that of calls by
        default. It goes on if its caller is cancelled: until it is certain, it may land at any time.

        Raises Overtaken if a bucket of it was merged, and Corruption if the tip is damaged. Raises commit.Refused if
        its precondition fails otherwise, which means for an owner that the epoch is over.
        """
        async with self._turn:
            made = operation(self.tip.manifest)
            committing = asyncio.ensure_future(self._commit(made, run))
            self._under_way.add(committing)
            committing.add_done_callback(self._over)
            return await asyncio.shield(committing)

    async def _commit(self, made: Operation, run: backoff.Run | None) -> TopicManifest:
        try:
            tip = await commit_until_certain(self._environment, self._manifests, made, warm=self.tip, run=run)
        except commit.Refused as refused:
            found = overtaken(refused, epoch=self.epoch)
            if found is None or found.tip is None:
                raise
            self.saw(found.tip)
            raise found from refused
        self.saw(tip)
        return tip.manifest

    def _over(self, committing: asyncio.Task[TopicManifest]) -> None:
        self._under_way.discard(committing)
        if not committing.cancelled():
            # No caller may be waiting when it fails.
            committing.exception()

    async def settled(self) -> None:
        """Wait until every commit is certain, including those of callers that have gone."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    def close(self) -> None:
        """Stop retrying uncertain commits, since the shard is no longer served here."""
        for committing in self._under_way:
            committing.cancel()

    async def newest(self) -> TopicManifest:
        """Return the newest manifest, however long the store is unreachable.

        Raises commit.Refused if the epoch is over, Corruption if it is damaged.
        """
        return await backoff.until_answered(
            self.read,
            failed=lambda error: self._environment.waits_for_store(
                "manifests cannot be read", self._manifests.key(0).rpartition("/")[0], error
            ),
            waiting=self._environment,
        )

    async def read(self) -> TopicManifest:
        """Read the newest manifest.

        Raises commit.Refused if the epoch is over, Corruption if it is damaged, and the store's errors.
        """
        async with self._turn:
            try:
                tip = await self._environment.run(lambda: self._manifests.read_tip(self.tip))
            except Damaged as error:
                raise Corruption(f"manifest {error}") from error
            if tip is None:
                raise Corruption(f"manifest {self._manifests.key(self.tip.number)}: the object is missing")
            if tip.manifest.owner_epoch != self.epoch:
                raise commit.Refused(f"owner epoch is {tip.manifest.owner_epoch}, not {self.epoch}", tip)
            self.saw(tip)
            return tip.manifest


async def commit_until_certain(
    environment: Environment,
    manifests: commit.ManifestLog[TopicManifest],
    operation: Operation,
    *,
    warm: commit.Tip[TopicManifest] | None,
    run: backoff.Run | None = None,
) -> commit.Tip[TopicManifest]:
    """Repeat the operation until it is committed or refused. It is never applied twice.

    Raises commit.Refused, and Corruption if the tip is damaged.
    """
    uncertain = False

    def once() -> commit.Tip[TopicManifest]:
        nonlocal uncertain
        try:
            return commit_once(environment, manifests, operation, warm=warm)
        except commit.CommitOutcomeUnknown:
            uncertain = True
            raise
        except Damaged as error:
            raise Corruption(
                f"manifest {error}", wrote_nothing=isinstance(error, commit.DamagedBefore) and not uncertain
            ) from error

    return await backoff.until_answered(
        lambda: (run or environment.run)(once),
        failed=lambda error: environment.waits_for_store(
            "manifest commits are not certain", manifests.key(0).rpartition("/")[0], error
        ),
        waiting=environment,
        again_after=commit.UNCERTAIN,
    )
