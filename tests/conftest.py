"""What holds for every test: loopback only, no credentials of the machine, and the same examples for one tree; which
part of the seeds, bounds and planted bugs a run has, and in which order its tests begin.

And the fixture `spark`, which the tests of several folders share: one session for all tests of a process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import importlib
import ipaddress
import os
import sys
import warnings
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import botocore.loaders
import botocore.session
import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from examples import processes
from tests._support import forked, kinds, long_parts, parts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Of a test whose settings say nothing else, in a run of all parts.
EXAMPLES = 40


def _register_gate(examples: int) -> None:
    """The gate must give the same verdict twice: examples come from the test and the part, not from the clock."""
    hypothesis.settings.register_profile(
        "gate", max_examples=examples, derandomize=True, deadline=None, print_blob=True
    )


_register_gate(EXAMPLES)
# A longer search, with examples that differ from run to run.
hypothesis.settings.register_profile("search", max_examples=2_000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("gate")
# Nor do examples come from what the process has imported: of that Hypothesis takes constants, unless it knows of none.
NO_CONSTANTS = Constants()


# Objects that come and stay before the young ones are looked through for cycles.
YOUNG_OBJECTS_MAX = 10_000

# Where tests begin processes of their own and wait for them: for two of the workers.
LONG = (
    ("benchmarks/", "client/cli/test_real", "client/conformance/test_real", "peers/test_many"),
    ("batch/compaction/test_", "relay/brokers/"),
)


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=[*map(str, parts.ALL), "all"],
        help="the part of the seeds, bounds and planted bugs; by default the content of the tree chooses it for a run "
        "of every test, and one of some of them has all",
    )
    parser.addoption(
        "--long-part", choices=long_parts.NAMES, help="run the tests of one part of `make test-long` alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_refuse_other_machines)
    if config.option.part is None:
        config.option.part = str(_part_of(config))
    parts.choose(parts.ALL if config.option.part == "all" else [int(config.option.part)])
    if parts.chosen() != parts.ALL:
        _register_gate(parts.examples(EXAMPLES))


def _part_of(config: pytest.Config) -> int | str:
    of_every_test = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return parts.of_tree(config.rootpath) if of_every_test else "all"


def pytest_report_header(config: pytest.Config) -> str:
    which = "all" if config.option.part == "all" else f"part {config.option.part} of 0 to {parts.PARTS - 1}"
    return f"seeds, bounds and planted bugs: {which}; --part=all has every one"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and tests, half a million objects, stay. Looking through them for cycles while they come, and again and
    again afterwards, would take longer than many tests.
    """
    if hypothesis.settings.get_current_profile_name() == "gate":
        providers._get_local_constants = lambda: NO_CONSTANTS
    gc.disable()
    if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS and _has_tests(session.config):
        _import_in_own_order(*_worker(session.config))
    collected = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    gc.enable()
    return collected


def _has_tests(config: pytest.Config) -> bool:
    """Whether this process runs tests, and does not only share them out or name them."""
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    return runs_tests and not config.option.collectonly


def _worker(config: pytest.Config) -> tuple[int, int]:
    """The number of this process among those that share the tests, and how many there are."""
    told = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    return int(told["workerid"].removeprefix("gw")), told["workercount"]


def _import_in_own_order(number: int, workers: int) -> None:
    """Each worker begins elsewhere, so that it compiles a share of the modules and finds the others compiled."""
    root = Path(__file__).parent
    files = sorted(root.rglob("test_*.py"))
    begin = len(files) * number // workers
    for file in [*files[begin:], *files[:begin]]:
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        # What fails is imported again, and told, when tests are collected.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("error")
            importlib.import_module(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    _leave_other_parts(config, items)
    _leave_other_long_parts(config, items)
    for item in items:
        item.add_marker(kinds.kind_of(item.nodeid.removeprefix("tests/"), getattr(item, "fixturenames", ())))
        if "spark" in getattr(item, "fixturenames", ()):
            # Java costs more than a hundred other tests: `make test` has one test with it, of a submitted job.
            item.add_marker("long")
        _draw_by_part(item)
    yield
    # Of what the options have left: by its number each worker has its share.
    items[:] = _long_ones_first(items, _worker(config)[1])


def _long_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each worker begins with a share of the tests that take long, which would have the end of a run for themselves.

    One has those that wait for most of their time, beside tests that use the cores; and those that share a Java, which
    each worker would start else.
    """
    first: list[list[pytest.Item]] = [[] for _ in range(workers)]
    rest = collections.deque[pytest.Item]()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        share = next((number for number, names in enumerate(LONG, 1) if name.startswith(names)), None)
        if name.startswith("wire/") or "spark" in getattr(item, "fixturenames", ()):
            first[0].append(item)
        elif share is not None:
            first[share % workers].append(item)
        else:
            rest.append(item)
    first[0].sort(key=lambda item: not item.nodeid.startswith("tests/wire/"))
    ordered: list[pytest.Item] = []
    for number, long_ones in enumerate(first):
        ordered += long_ones
        # A worker has as many tests as another one, at first.
        while rest and len(ordered) < len(items) * (number + 1) // workers:
            ordered.append(rest.popleft())
    return [*ordered, *rest]


def _leave_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    places: collections.Counter[str] = collections.Counter()
    left: list[pytest.Item] = []
    for item in list(items):
        if item.get_closest_marker("rotating") is None:
            continue
        name = item.nodeid.partition("[")[0]
        if not parts.has(name, places[name]):
            left.append(item)
        places[name] += 1
    _deselect(config, items, left)


def _leave_other_long_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.option.long_part
    if part is not None:
        _deselect(
            config, items, [item for item in items if long_parts.part_of(item.nodeid.removeprefix("tests/")) != part]
        )


def _deselect(config: pytest.Config, items: list[pytest.Item], left: list[pytest.Item]) -> None:
    if left:
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left)


def _draw_by_part(item: pytest.Item) -> None:
    """Of Hypothesis, unless it draws anew in each run."""
    if not isinstance(item, pytest.Function) or not hasattr(item.function, "hypothesis"):
        return
    if parts.chosen() != parts.ALL and hypothesis.settings.get_current_profile_name() == "gate":
        hypothesis.seed(zlib.crc32(item.nodeid.partition("[")[0].encode()) + parts.chosen()[0])(item.function)


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
def programs_are_loaded_once() -> Iterator[None]:
    """And not by each daemon that is started, which would take longer than the rest of its test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "open_process", forked.open_process)
        yield
    forked.end()


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
    from tests._support.spark import session

    with session(tmp_path_factory.mktemp("spark"), spark_events) as opened:
        yield opened
