"""Decisions on their way to the log: what a shard has staged, the slots in which it is written, and the log itself.

Owns: who waits for which slot, when a slot leaves, what became of it, the log from OPEN to its end, and how recently it
was certainly ours.
Does not own: the decisions (`daemon.core`), and applying them (`daemon.shard`).
"""
