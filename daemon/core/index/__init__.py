"""Keeps the rows of a topic: buckets and segments, due times, entitlement, pages and merges."""
