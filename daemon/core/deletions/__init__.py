"""Deletions of ledgers and offloaded objects of other systems (PIP-186)."""
