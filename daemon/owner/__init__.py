"""Owning shards: standing by, claiming, taking over and losing them, and the calls on all that is owned.

It also writes the heartbeat, brings each call to its shard, and collects garbage. `daemon.shard` is one owned shard.
"""
