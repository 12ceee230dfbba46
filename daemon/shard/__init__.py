"""One owned shard: what survives, and in which order.

Owns: stage, journal, apply; slots, checkpoints, loading topics and recovery, the epoch and its fence, garbage.
Does not own: who owns it (`daemon.owner`), and a topic that is served (`daemon.topic`).
"""
