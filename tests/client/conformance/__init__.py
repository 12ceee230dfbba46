"""What both clients do alike: every test here is written once, for the event loop, and runs on both.

Owns: the behaviour of `tarry.Client` and `tarry.aio.Client` against a scripted daemon and a real one.
Does not own: the pure parts, each with tests of its own in `tests.client`.
"""
