"""Decisions on their way to the log: what a shard has staged, and the slots in which it is written.

Owns: who waits for which slot, when a slot leaves, what became of it, and how recently the log was certainly ours.
Does not own: the decisions (`daemon.core`), applying them (`daemon.shard`), and the log from OPEN to its end
(`daemon.owner.living_log`).
"""
