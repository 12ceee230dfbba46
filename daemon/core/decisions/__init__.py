"""Decides requests on a topic: decisions are staged, and change its state when they are durable."""
