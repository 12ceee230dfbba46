"""The edge: gRPC requests become columns, and results become answers.

Owns: the wire types, checking of what a caller sent, streams and their flow control, and the one mapping from errors
to gRPC status codes.

Does not own: any state of a topic or subscription; it asks `daemon.owner` and forgets.
"""
