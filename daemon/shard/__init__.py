"""One owned shard: loading, recovery and checkpoints, and the order in which durable decisions become state.

`daemon.owner` decides who owns a shard, `daemon.group_commit` writes its slots, `daemon.topic` serves its topics.
"""
