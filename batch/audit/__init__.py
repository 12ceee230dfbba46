"""Audits a root: reads and checks everything that is stored, and writes nothing."""
