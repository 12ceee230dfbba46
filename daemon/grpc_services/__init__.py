"""The edge: turns gRPC requests into columns, and results into answers.

It checks requests, runs streams and their flow control, and maps errors to gRPC status codes. It holds no state of a
topic or subscription: it calls `daemon.owner` and forgets.
"""
