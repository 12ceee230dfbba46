"""Two-phase deletion of the ledgers of other systems (PIP-186).

Owns: requests, decisions in the slots of a shard, workers and sweeps. Does not own: the rules
(`daemon.core.deletions`), and where ledgers are (`daemon.ledger_stores`). Of a shard it sees `DeletingShard`.
"""
