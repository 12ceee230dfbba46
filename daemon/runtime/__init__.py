"""What a daemon finds around it: clock, threads, randomness, the wake-ups of its loop, and what a failure costs."""
