"""Writes the decisions of shards to the daemon's commit log, and answers callers once they are durable.

It stages the sections of each shard, decides when a slot leaves, finds out what became of it, and knows how recently
the log was certainly this daemon's. `daemon.core` makes the decisions, `daemon.shard` applies them.
"""
