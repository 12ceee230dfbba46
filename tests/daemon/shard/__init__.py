"""Tests of `daemon.shard`."""
