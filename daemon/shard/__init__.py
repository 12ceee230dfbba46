"""One owned shard: what survives, and in which order.

Owns: applying what is durable, checkpoints, loading topics and recovery, the epoch and its fence.
Does not own: who owns it (`daemon.owner`), slots (`daemon.group_commit`), and a topic that is served (`daemon.topic`).
"""
