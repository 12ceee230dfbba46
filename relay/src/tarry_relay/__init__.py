"""A relay between a broker and Tarry: the broker keeps the messages, Tarry keeps when each is due.

It reaches the daemon through the public client alone.
"""

import os

# gRPC reads this when it is loaded. Otherwise it prints lines of its own before the command's message or among the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
