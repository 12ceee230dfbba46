"""Holds what subscriptions are owed, in memory: IN_FLIGHT and NACKED positions, backlogs read again, dead letters."""
