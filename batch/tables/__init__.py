"""Shows a root as tables for analysts: `spark.read.format("tarry")`.

The tables are `rows`, `buckets` and `backlog`. It only reads, and passes over parts that a query does not need.
"""
