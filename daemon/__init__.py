"""Implements tarryd, the scheduling daemon for delayed positions.

`main` starts it, `grpc_services` is its edge, `owner` runs its shards, and `core` decides. `settings`, `errors`, `logs`
and `metrics` declare every setting, error kind, log form and metric once. Stored forms are in `storage_backends`;
clients use the distribution `tarry`.
"""
