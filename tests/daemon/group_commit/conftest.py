"""The tests of daemons and their logs run in virtual time, on one store in memory."""

from tests._support.virtual_time import machines, pytest_asyncio_loop_factories

__all__ = ["machines", "pytest_asyncio_loop_factories"]
