"""What subscriptions are owed, in memory: positions in flight and nacked, backlogs read again, dead letters."""
