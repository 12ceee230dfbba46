"""Many small topics on a store that takes 50 ms a request: while all are loaded, sealed together, or given up, nobody
who adds a row waits for them, and the daemon stays healthy.

No limit here is one of time alone, for the machine may be busy. Three things are measured at the same time, each at a
steady rate: adds; calls that need no store, which wait in the same line to be taken in; and requests to the same store,
each in a thread of its own (`daemon_with_control`). An ordinary add is one of the second and one of the third. Of the
slowest one is three of the third: its slot waits for company, and for the slot before it. Either may take three times
as long; where the machine has nothing else to do, that is less than the bounds in seconds, which count there. In a
daemon where everything waits in one line adds wait for seconds, and the others do not. Of the stop the requests are
counted: it may ask for nothing that is a topic's, so that it takes as long for thousands.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks import many_topics, single_adds, slow_store
from examples import processes
from storage_backends.formats import names
from tests._support.processes import Daemons
from tests.wire._support import daemon_with_control

TOPICS = 500
ROWS = 2
SMALL = many_topics.named("small", TOPICS)
SERVED = many_topics.named("served", 16)
DELAY_MS = 50
ADDS_PER_S = 40
# Of the adds: the share that takes at most so many requests to the store, and the seconds that they may take anyway.
ADDS = ((50, 1, 0.25), (99, 3, 0.5))
TIMES = 3
# A shard whose slot takes 2 s is not healthy. Where a control takes half of that, a slot may take that.
HEALTHY_S = 1.0
OK = grpc.StatusCode.OK
LOADED = "the topics are loaded topics="
SETTINGS: dict[str, object] = {
    **slow_store.settings(),
    # Nothing is cut short, however busy the machine is.
    "daemon.drain_s": 3_600,
    "grpc.drain_s": 1,
    # The more at once, the sooner the test is over.
    "store.seal_threads": 32,
}
NO_SETTINGS: Mapping[str, object] = {}
Timed = single_adds.Call | slow_store.Request


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a daemon left that was killed: rows of every topic in its journals."""
    folder = tmp_path_factory.mktemp("many-topics")
    program = slow_store.program(folder / "root", 0)
    with processes.DaemonProcess("tarryd", folder, SETTINGS, program=program) as daemon:
        daemon.start_serving()
        many_topics.make(daemon.address, [*SMALL, *SERVED], rows=ROWS)
    return folder / "root"


@dataclasses.dataclass(frozen=True)
class Watched:
    """A daemon on a copy of the root, with its control."""

    folder: Path
    daemon: processes.DaemonProcess

    @staticmethod
    def on(
        root: Path, folder: Path, daemons: Daemons, *, bug: str = "", settings: Mapping[str, object] = NO_SETTINGS
    ) -> Watched:
        shutil.copytree(root, folder / "root")
        requests, control = folder / "requests", folder / "control"
        program = daemon_with_control.program(folder / "root", DELAY_MS, requests=requests, control=control, bug=bug)
        return Watched(folder, daemons.make("tarryd", {**SETTINGS, **settings}, program=program))

    def load(self) -> None:
        """Returns when every topic is loaded."""
        self.daemon.start()
        self.daemon.wait_for_log(LOADED)

    def adds_that_waited(self, seen: single_adds.Seen, from_s: float, until_s: float) -> list[str]:
        """What is wrong with the time that adds took."""
        adds = seen.served_adds(from_s, until_s)
        lookups, controls = seen.lookups_within(from_s, until_s), self._controls(from_s, until_s)
        found = []
        for percent, requests, add_s in ADDS:
            took_s = quantile(adds, percent)
            alone_s = quantile(lookups, percent) + requests * quantile(controls, percent)
            if took_s > max(add_s, TIMES * alone_s):
                found.append(f"p{percent} of adds is {took_s:.3f} s, and {alone_s:.3f} s where they wait for nobody")
        return found

    def health_lost(self, seen: single_adds.Seen, from_s: float, until_s: float) -> int:
        """How often it was, not for want of a machine or of a disk."""
        beside: list[Timed] = [*seen.lookups_within(from_s, until_s), *self._controls(from_s, until_s)]
        slowest_s = max(map(seconds, beside))
        return seen.health_lost(from_s, until_s) if slowest_s < HEALTHY_S else 0

    def topics_asked_for(self, from_s: float, until_s: float) -> set[str]:
        """Ids of the topics whose objects the store was asked for."""
        requests = slow_store.read_requests(self.folder / "requests", from_s=from_s, until_s=until_s)
        return {names.topic_id_of(each.key) for each in requests if "/topics/" in each.key}

    def _controls(self, from_s: float, until_s: float) -> list[slow_store.Request]:
        return slow_store.read_requests(self.folder / "control", from_s=from_s, until_s=until_s)


def seconds(of: Timed) -> float:
    return of.answered_s - of.sent_s if isinstance(of, single_adds.Call) else of.ended_s - of.began_s


def quantile(of: Sequence[Timed], percent: int) -> float:
    assert of, "nothing was measured"
    return float(np.percentile([seconds(each) for each in of], percent))


@pytest.mark.long
def test_nobody_waits_for_topics_that_are_loaded_or_sealed_together_or_given_up(
    root: Path, tmp_path: Path, daemons: Daemons
) -> None:
    watched = Watched.on(root, tmp_path, daemons)
    daemon = watched.daemon
    with single_adds.SingleAdds(daemon.address, SERVED, per_second=ADDS_PER_S) as adding:
        watched.load()
        loaded_s = slow_store.clock_s()
        many_topics.seal(daemon.address, SMALL)
        sealed_s = slow_store.clock_s()
        many_topics.add(daemon.address, SMALL, ledger_id=1, rows=1)
        stopping_s = slow_store.clock_s()
        status = daemon.terminate()
        stopped_s = slow_store.clock_s()
        seen = adding.end()

    began_s = seen.first_served_s
    for from_s, until_s in ((began_s, loaded_s), (loaded_s, sealed_s), (sealed_s, stopping_s)):
        assert watched.adds_that_waited(seen, from_s, until_s) == []
        assert watched.health_lost(seen, from_s, until_s) == 0
    assert {add.status for add in seen.served_adds(began_s, stopping_s - 1)} == {OK.name}

    # While it stops an add is durable, or refused at once; what is on its way in the end is broken off.
    assert watched.adds_that_waited(seen, stopping_s - 1, stopped_s) == []
    told = {add.status for add in seen.served_adds(stopping_s - 1, stopped_s)}
    assert told <= {code.name for code in (OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)}
    assert not any(serving for at_s, serving in seen.health if at_s > stopping_s)
    assert status == 0
    assert many_topics.owned_shards(tmp_path / "root") == []
    # What is under way for those that are added to may end.
    assert len(watched.topics_asked_for(stopping_s, stopped_s)) <= len(SERVED)


@pytest.mark.long
def test_a_daemon_in_which_adds_wait_in_one_line_with_everything_else_is_found(
    root: Path, tmp_path: Path, daemons: Daemons
) -> None:
    bug = daemon_with_control.one_line.__name__
    watched = Watched.on(root, tmp_path, daemons, bug=bug, settings={"store.io_threads": 8})
    with single_adds.SingleAdds(watched.daemon.address, SERVED, per_second=ADDS_PER_S) as adding:
        watched.load()
        loaded_s = slow_store.clock_s()
        seen = adding.end()
    assert watched.adds_that_waited(seen, seen.first_served_s, loaded_s) != []
