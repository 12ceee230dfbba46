"""Measurements, run on demand: rates, memory, lateness and restart. They print figures and assert none."""
