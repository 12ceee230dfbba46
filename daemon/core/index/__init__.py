"""The rows of a topic: buckets and segments, when each row is due, who is owed it, pages and merges of them."""
