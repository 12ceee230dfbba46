"""`tarry-spark`: its commands, one module each.

Owns: options, what is shown, and the exit status. Does not own: what a job does (`compaction`, `forecast`, `audit`).
"""
