"""Forecasts how many rows come due when, by topic."""
