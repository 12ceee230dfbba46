"""Deletes ledgers of other systems in two phases (PIP-186): requests, decisions of a shard, workers and sweeps.

The rules are in `daemon.core.deletions`, the ledgers in `daemon.ledger_stores`. A shard is seen as `ShardOfDeletions`.
"""
