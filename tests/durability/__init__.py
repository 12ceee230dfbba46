"""Tests of `daemon.durability`."""
