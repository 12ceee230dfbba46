"""Giving a shard up: its manifest says that it is nobody's."""

from __future__ import annotations

from daemon.shard import shard_manifest
from daemon.surroundings.environment import Environment
from storage_backends import commit
from storage_backends.formats.manifest import ShardManifest


async def give_up(
    environment: Environment,
    manifests: commit.ManifestLog[ShardManifest],
    epoch: int,
    *,
    warm: commit.Tip[ShardManifest] | None = None,
) -> None:
    """The next owner need not wait for this one.

    Raises commit.Refused when the shard belongs to another already, CommitOutcomeUnknown and the store's errors.
    """
    await environment.pools.journal.run(
        lambda: shard_manifest.give_up(
            manifests,
            epoch,
            writer=environment.config.daemon_id,
            created_ms=environment.clock.now_ms(),
            warm=warm,
        )
    )
