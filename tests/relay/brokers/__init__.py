"""A relay with real brokers."""
