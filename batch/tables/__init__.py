"""A root as tables for analysts: `spark.read.format("tarry")`.

Owns: the format with its options, the tables `rows`, `buckets` and `backlog`, and what a query need not read of them.
Does not own: what topics hold (`batch.engine.topic_reading`), and Spark. It only reads.
"""
