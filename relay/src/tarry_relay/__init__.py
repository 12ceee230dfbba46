"""A relay between a broker and Tarry: the broker keeps the messages, Tarry keeps when each is due.

It reaches the daemon through the public client alone.
"""
