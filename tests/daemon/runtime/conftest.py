"""The tests of what a daemon finds around it run in virtual time, on one store in memory."""

from tests._support.virtual_time import machines, pytest_asyncio_loop_factories

__all__ = ["machines", "pytest_asyncio_loop_factories"]
