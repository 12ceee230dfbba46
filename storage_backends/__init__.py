"""Storage: the port to an object store, its implementations, and the commit primitive over it.

Owns: reading, conditional writing and listing of objects in memory, in a local directory or on S3, and the forms of
what is stored (`storage_backends.formats`).

Does not own: what daemons and jobs do with it. It knows neither, nor gRPC, and is a distribution of its own,
`tarry-storage`, so that others may depend on it.
"""
