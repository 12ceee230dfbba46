"""The commands of `tarry-spark`, one module each.

Owns: options, what is shown, and the exit status. Does not own: what a job does.
"""
