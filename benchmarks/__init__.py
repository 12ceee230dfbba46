"""Measures on demand, next to Redis: rates, lateness, memory, stored bytes, restart, pauses.

Measurements print figures and assert none; a row that is not accounted for is a failure.
"""
