"""Implements the commands of `tarry-spark`, one module each: options, output, exit status."""
