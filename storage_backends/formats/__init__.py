"""Encodes and decodes log slots and their sections, buckets, manifests and checkpoints.

Decoders check magic, version, length and CRC. All functions are pure: no I/O, no time, no randomness, no logging, and
the same columns give the same bytes.
"""
