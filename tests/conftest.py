"""What holds for every test: loopback only, no credentials of the machine, and the same examples every run.

And the fixture `spark`, which the tests of several folders share: one session for all tests of a process.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import botocore.loaders
import botocore.session
import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The gate must give the same verdict twice: examples are derived from the test, not from the clock. A longer search,
# with examples that differ from run to run, is `pytest --hypothesis-profile=search`.
hypothesis.settings.register_profile("gate", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("search", max_examples=2_000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("gate")
# Nor from what the process has imported: of that Hypothesis takes constants into its examples, unless it knows of none.
NO_CONSTANTS = Constants()


class NotLoopback(AssertionError):
    """A test spoke to an address that is not on this machine."""


def _refuse_other_machines(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("socket.connect", "socket.sendto"):
        return
    address = arguments[1]
    if not isinstance(address, tuple):  # a Unix socket
        return
    host = str(address[0])
    if host in ("localhost", ""):
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise NotLoopback(f"a test connects to {host}; tests use 127.0.0.1, ::1 or localhost")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_refuse_other_machines)


def pytest_collection_finish() -> None:
    if hypothesis.settings.get_current_profile_name() == "gate":
        providers._get_local_constants = lambda: NO_CONSTANTS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of processes that are killed and stand by begin first: they wait for most of their time, beside tests that
    use the cores, and would have the end of a run for themselves.
    """
    items.sort(key=lambda item: not item.nodeid.startswith("tests/wire/"))


@pytest.fixture(autouse=True, scope="session")
def credentials_of_no_one() -> Iterator[None]:
    """boto3 finds keys that open nothing, and looks for none on the machine or at a metadata service."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "TARRY_"))]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(autouse=True, scope="session")
def models_of_s3_are_read_once() -> Iterator[None]:
    """And not by each store that is opened, which would take longer than the rest of its test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.loaders.create_loader))
        yield


@pytest.fixture(scope="session")
def spark_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the event log of the session."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, spark_events: Path) -> Iterator[SparkSession]:
    """A session in this process. Java costs seconds of two cores whenever it starts, so a test asks for this one unless
    it needs a process of its own.
    """
    # Most tests go without it, and it takes long to import.
    from tests.support.spark import session

    with session(tmp_path_factory.mktemp("spark"), spark_events) as opened:
        yield opened
