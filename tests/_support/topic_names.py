"""Names of topics that belong to a given shard."""

from __future__ import annotations

import itertools

from storage_backends.formats import names


def topic_of(shard: int, shards: int, prefix: str = "t") -> str:
    """Return the first name of the prefix and a number that belongs to that of so many shards."""
    numbered = (f"{prefix}{number}" for number in itertools.count())
    return next(name for name in numbered if names.shard_of(name, shards) == shard)


def topic_of_each(shards: int) -> list[str]:
    """Return a name for each of so many shards, in the order of the shards."""
    return [topic_of(shard, shards) for shard in range(shards)]
