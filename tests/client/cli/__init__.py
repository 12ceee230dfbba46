"""The `tarry` command: what it sends, prints, and exits with."""
