"""Measurements, run on demand, side by side with Redis: rates, lateness, memory, stored bytes, restart, pauses.

They print figures and assert none; a row that is not accounted for is a failure.
"""
