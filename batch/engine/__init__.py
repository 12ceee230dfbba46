"""What batch jobs share: an engine that runs their tasks in parallel, and a root read from the store alone.

Owns: the port for parallel work and its two engines (processes of this machine, Spark), the settings of jobs, one open
store for each process, and what topics hold as of now.
Does not own: the formats and the commit primitive (`storage_backends`), what a job does, nor any decision of a daemon
(`daemon`, which no job imports): a job meets the daemons only in the object store.
"""
