"""The relay between a broker and Tarry: the broker keeps the messages, Tarry knows when each is due.

Owns: everything that a user of `tarry-relay` sees. Does not own: when what is due (the daemon), which is asked by the
public client alone.
"""
