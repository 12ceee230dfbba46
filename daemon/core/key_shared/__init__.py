"""Key order: positions of one key go to one consumer at a time.

Owns: hash slots, and which consumer of a KEY_SHARED subscription has each.
Does not own: the hash itself (clients), the backlog of a subscription (`daemon.core.subscription`), policies, storage.
"""
