"""What survives: journal, shard manifest, checkpoint, sealed buckets, recovery and ownership.

Owns: the order in which bytes reach the store, the epoch and its fence, and rebuilding state after a crash.

Does not own: what the rows mean (`daemon.core`), when a bucket is sealed or a segment loaded (`daemon.engine`), or
how an object is put and read (`storage_backends`).
"""
