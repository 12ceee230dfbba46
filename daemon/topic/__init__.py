"""Serves one topic: its requests, wake-ups, buckets, and subscriptions with their streams, leases and dead letters.

It determines when something is decided, passed, loaded, sealed and merged, who waits for rows, and who is delivered
which. `daemon.core` makes the decisions, `daemon.group_commit` makes them durable.
"""
