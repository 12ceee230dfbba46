"""Where ledgers of other systems are, and how one of them is deleted (PIP-186, the second phase)."""
