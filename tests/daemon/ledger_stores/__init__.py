"""Tests of `daemon.ledger_stores`."""
