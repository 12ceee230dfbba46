"""Shards and topics: the order between deciding and keeping.

Owns: stage, journal, apply. A shard lets the core decide, the journal make durable, and only then applies and
answers; it runs the timers and schedules seals and segment loads.

Does not own: the decisions (`daemon.core`), the bytes (`daemon.durability`), or any wire type
(`daemon.grpc_services`).
"""
