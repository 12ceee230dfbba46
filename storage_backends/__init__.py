"""Stores everything durable: the port to an object store, its implementations and the commit primitive.

Objects lie in memory, in a local directory or on S3; `storage_backends.formats` holds the form of what is stored.
Daemons and jobs use this package; it knows neither of them, nor gRPC. It is a distribution of its own, `tarry-storage`,
so that others may depend on it.
"""
