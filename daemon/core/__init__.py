"""Decides what is pending, what is due, who gets it and what is done, in pure state machines.

Each takes events, with the time as an argument, and returns decisions. Nothing here does I/O, waits, logs, draws random
numbers or reads a clock, so the same events give the same decisions. Import contracts and lint rules enforce that.
"""
