"""Bytes and columns: log slots and their sections, buckets, manifests and checkpoints.

Owns: encoding and decoding, with their checks (magic, version, length, CRC). Pure functions: the same columns give
the same bytes.

Does not own: where the bytes are kept, when they are written, or what the rows mean. No I/O, no time, no
randomness, no logging.
"""
