"""Deletes ledgers of other systems in two phases (PIP-186): requests, decisions of a shard, workers and sweeps.

Owns: requests, decisions in the slots of a shard, workers and sweeps. Does not own: the rules
(`daemon.core.deletions`), and where ledgers are (`daemon.ledger_stores`). Of a shard it sees `DeletingShard`.
"""
