"""The compaction: small neighbouring buckets of a root are merged, while daemons serve from it.

Owns: which buckets are merged, in which order, the commit of each merge, and what is said of it.
Does not own: the merge of buckets (`storage_backends.bucket_merging`), which the daemon has as well, the engines
(`batch.engine`), and the command (`batch.cli`).
"""
