"""Batch jobs on a root that daemons are serving meanwhile: merging small buckets, forecasting the load, auditing.

Owns: what to merge and how to do it outside the daemon, what is due when, whether the stored bytes say what they said,
and the two engines that run such work in parallel (processes of this machine, Spark). Does not own: the formats and the
commit primitive (`storage_backends`), nor any decision of a daemon (`daemon`, which this package never imports): a job
meets the daemons only in the object store.
"""
