"""Brokers of tests and benchmarks: real servers on free ports of loopback, killed and started again on their data."""
