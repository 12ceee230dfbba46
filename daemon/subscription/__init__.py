"""The subscriptions of one topic: streams, leases, keys that are shared, acknowledgements, dead letters.

Owns: who waits for rows, and when a request on what was handed out is decided.
Does not own: the rows (`daemon.core`), and the topic, of which each part sees a port (`daemon.topic_terms.topic_port`).
"""
