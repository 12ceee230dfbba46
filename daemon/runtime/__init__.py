"""Provides what a daemon runs on: clock, threads, randomness, wake-ups of its loop, and scopes of failure."""
