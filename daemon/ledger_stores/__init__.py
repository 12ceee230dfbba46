"""Finds and deletes ledgers of other systems (PIP-186, the second phase)."""
