"""Compacts a root: merges small neighbouring buckets, while daemons serve from it.

The daemon merges buckets with the same functions (`storage_backends.bucket_merging`).
"""
