"""A topic of a shard that is owned: all that the shard has of it.

Owns: that its parts belong together, and end together. Does not own: any of them, and which topics there are (`shard`).
"""

from __future__ import annotations

import dataclasses

from daemon.topic import checkpoint_parts
from daemon.topic.bucket_life import BucketLife
from daemon.topic.served_topic import ServedTopic
from daemon.topic.topic_manifests import TopicCommits


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OwnedTopic:
    """`served`: its rows and subscriptions, as requests see it. `life`: its buckets. `commits`: its manifests."""

    served: ServedTopic
    life: BucketLife
    commits: TopicCommits

    @property
    def name(self) -> str:
        return self.served.core.name

    @property
    def topic_id(self) -> str:
        return self.served.core.topic_id

    @property
    def is_in_manifest(self) -> bool:
        """Whether its newest manifest says all of it."""
        return self.served.last_changed_slot <= self.commits.manifest.applied

    def cut(self) -> checkpoint_parts.TopicCut:
        """The topic as it is now, for a checkpoint."""
        return self.life.cut()

    def close(self, error: Exception) -> None:
        """The topic is served here no longer."""
        self.life.close()
        self.served.close(error)
        self.commits.close()
