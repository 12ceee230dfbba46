"""One topic that is served: requests on its rows, its wake-ups, and the life of its buckets.

Owns: when something is decided, passed, loaded, sealed and merged.
Does not own: the decisions (`daemon.core`), what makes them durable (`daemon.shard`), and what its subscriptions are
handed out (`daemon.subscription`).
"""
