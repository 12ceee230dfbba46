"""What runs on a root beside its daemons: batch jobs, their command, and the tables that analysts see.

The jobs merge buckets, forecast and audit; each part does its work in tasks, on Spark or in processes of one machine.
"""
