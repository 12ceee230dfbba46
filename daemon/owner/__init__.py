"""Owning shards, and what is asked of all that is owned.

Owns: standing by, claiming and taking shards over, losing them and giving them up; the heartbeat; which shard a call is
about; collecting garbage.
Does not own: a shard that is owned (`daemon.shard`), and wire types (`daemon.grpc_services`).
"""
