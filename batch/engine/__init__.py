"""Provides what batch jobs share: an engine that runs their tasks in parallel, and a root read from the store.

There are two engines: processes of this machine, and Spark. A job meets the daemons only in the object store, and
imports nothing of `daemon`.
"""
