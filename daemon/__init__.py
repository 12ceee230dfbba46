"""tarryd: the scheduling daemon for delayed positions.

Owns: everything that runs in the daemon's process. `main` composes it, `grpc_services` is its edge, `engine` orders
`core` (decisions) and `durability` (what survives), and `settings`, `errors`, `logs` and `metrics` declare every
setting, error kind, log form and metric once.

Does not own: how bytes lie on a store (`storage_backends`), and what a client sees (the distribution `tarry`).
"""
