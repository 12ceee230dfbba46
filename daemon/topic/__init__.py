"""One topic that is served: what holds for it, requests on its rows, its wake-ups, the life of its buckets, and its
subscriptions with their streams, leases and dead letters.

Owns: when something is decided, passed, loaded, sealed and merged, who waits for rows, and who is handed which.
Does not own: the decisions (`daemon.core`), and what makes them durable (`daemon.group_commit`).
"""
