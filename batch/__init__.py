"""Runs next to the daemons of a root: batch jobs, their command, and the tables that analysts see.

The jobs merge buckets, forecast and audit. Each does its work in tasks, on Spark or in processes of one machine.
"""
