"""Daemons of these tests run in virtual time; those of the wire are processes."""

from tests._support.virtual_time import machines, pytest_asyncio_loop_factories
from tests.wire.conftest import daemons

__all__ = ["daemons", "machines", "pytest_asyncio_loop_factories"]
