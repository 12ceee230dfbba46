"""Client of Tarry, the scheduling daemon for delayed positions.

Owns: the generated wire types (`tarry.v1`), the client library over them, and the `tarry` command (extra `cli`).

Does not own: anything of the daemon; this package lives in other people's environments.
"""
