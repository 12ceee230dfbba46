"""What goes wrong in one run, by its seed.

Fault model. Every call of a daemon to the store may fail before or after it takes effect, arrive late, or be answered
with 409; a daemon may be killed, suspended, or cut off from the store at any step, before its call or after, or at a
crash point; its wall clock may step; it may be stopped in order. Then it comes back, after a while. The object of a
bucket may be damaged, or lost, for ever.

Owns: when what happens. Does not own: how (`tests._support.fault_store`, `cluster`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from tests._support.engine_fixture import Daemon, Killed
from tests._support.fault_places import JOURNAL, JOURNAL_POINTS
from tests._support.fault_store import Call, Fault, Pause, applies
from tests.simulation import fired as counted
from tests.simulation.fired import Fired, Place
from tests.simulation.history import History

# How often each call fails: from a store that works to one that hardly does.
WEIGHTS: tuple[dict[Fault, float], ...] = (
    {},
    {Fault.FAIL_BEFORE: 0.01, Fault.FAIL_AFTER: 0.01},
    {Fault.FAIL_BEFORE: 0.02, Fault.FAIL_AFTER: 0.03, Fault.DELIVER_LATE: 0.02, Fault.ANSWER_EXISTS: 0.02},
    {Fault.FAIL_AFTER: 0.15, Fault.DELIVER_LATE: 0.05},
    {Fault.DELIVER_LATE: 0.12, Fault.FAIL_BEFORE: 0.05},
)
LATE_MAX_S = 40.0
SUSPENDED_LOOK_S = 0.01

# Where troubles are worth having: (operation, part of the key), and how many such calls there are in a run.
PLACES: tuple[tuple[str, str, int], ...] = (
    ("put_if_absent", JOURNAL, 15),
    ("put_if_absent", JOURNAL, 60),
    ("put_if_absent", JOURNAL, 150),
    ("put_if_absent", "/topics/", 12),
    ("put_if_absent", "00/manifest/", 6),
    ("put", "/buckets/", 6),
    ("put", "/checkpoint/", 6),
    ("delete", JOURNAL, 30),
    ("delete", "/topics/", 20),
    ("head", JOURNAL, 40),
    ("list", JOURNAL, 6),
    ("get_with_metadata", JOURNAL, 20),
    ("get_with_metadata", "/topics/", 10),
    ("get_with_metadata", "00/manifest/", 30),
    ("", "", 600),
    ("crash_point", "takeover", 3),
    ("crash_point", "takeover", 6),
    ("crash_point", "seal", 6),
    ("crash_point", "checkpoint", 6),
    ("crash_point", JOURNAL_POINTS, 60),
    ("crash_point", "merge", 6),
)
# What every run meets, however short.
EVERYWHERE: tuple[Place, ...] = (
    ("put_if_absent", JOURNAL),
    ("list", JOURNAL),
    ("get_with_metadata", JOURNAL),
    ("put_if_absent", "00/manifest/"),
    ("get_with_metadata", "00/manifest/"),
    ("crash_point", "takeover"),
)
# The same of a store of ledgers.
WEIGHTS_OF_LEDGERS: tuple[dict[Fault, float], ...] = (
    {},
    {Fault.FAIL_BEFORE: 0.02, Fault.FAIL_AFTER: 0.03, Fault.DELIVER_LATE: 0.02},
    {Fault.FAIL_BEFORE: 0.2, Fault.FAIL_AFTER: 0.2, Fault.DELIVER_LATE: 0.2},
)
# Beside those, where there are owners of ledgers.
PLACES_OF_OWNERS: tuple[tuple[str, str, int], ...] = (
    ("head", "-ledger-", 30),
    ("delete", "-ledger-", 8),
    ("delete", "-ledger-", 20),
    ("crash_point", "deletion", 20),
    ("crash_point", "deletion", 80),
)
ALL_PLACES: tuple[Place, ...] = tuple(dict.fromkeys(place[:2] for place in PLACES + PLACES_OF_OWNERS))
# In some runs objects of buckets are damaged or lost; how often.
DAMAGES = (0, 0, 0, 1, 3)
TROUBLES = ("kill", "kill", "kill", "suspend", "suspend", "suspend", "cut off", "down", "stop", "step")


def is_at(place: Place, operation: str, key: str) -> bool:
    """Whether such a call, or crash point, is at the place."""
    return place[0] in operation and place[1] in key


@dataclasses.dataclass(slots=True)
class Trouble:
    """Befalls the daemon that makes the `nth` such call, before it or after."""

    kind: str
    operation: str
    key_part: str
    left: int
    before: bool
    back_after_s: float

    @property
    def place(self) -> Place:
        return self.operation, self.key_part

    def meets(self, operation: str, key: str, *, before: bool) -> bool:
        if before is not self.before or not is_at(self.place, operation, key):
            return False
        self.left -= 1
        return self.left < 0


class Faults:
    """`befall(daemon, trouble)` does it; it is called in the step that the trouble meets. `fired` counts what comes.

    `owners`: whether there are owners of ledgers. `troubles`, `weights`, `weights_of_ledgers`: some troubles, and the
    share of calls that fail, to the root and to the store of ledgers, whatever the seed says.
    """

    def __init__(
        self,
        seed: int,
        history: History,
        fired: Fired,
        *,
        befall: Callable[[Daemon, Trouble], None],
        later: Callable[[float, Callable[[], object]], None],
        owners: bool,
        troubles: Sequence[Trouble] = (),
        weights: Mapping[Fault, float] | None = None,
        weights_of_ledgers: Mapping[Fault, float] | None = None,
    ) -> None:
        self._random = random.Random(f"faults {seed}")
        self._history = history
        self._fired = fired
        self._befall = befall
        self._later = later
        drawn = self._random.choice(WEIGHTS)
        self._weights = drawn if weights is None else weights
        drawn = random.Random(f"faults of ledgers {seed}").choice(WEIGHTS_OF_LEDGERS)
        self._weights_of_ledgers = drawn if weights_of_ledgers is None else weights_of_ledgers
        self._troubles = [dataclasses.replace(trouble) for trouble in troubles]
        self._watched = tuple(dict.fromkeys((*ALL_PLACES, *(trouble.place for trouble in troubles))))
        self._places = PLACES + PLACES_OF_OWNERS * owners
        self._troubles += [self._trouble() for _ in range(self._random.choice((0, 1, 2, 3, 4, 6, 9)))]
        self._troubles += [
            Trouble("damage", "", "", self._random.randrange(600), True, 0.0)
            for _ in range(self._random.choice(DAMAGES))
        ]
        self.over = False

    def _trouble(self) -> Trouble:
        draw = self._random
        operation, key_part, calls = draw.choice(self._places)
        return Trouble(
            kind=draw.choice(TROUBLES),
            operation=operation,
            key_part=key_part,
            left=draw.randrange(calls),
            before=operation == "crash_point" or draw.random() < 0.5,
            back_after_s=draw.choice((0.01, 0.3, 2.0, 8.0, 13.0, 20.0, 40.0)) * (0.5 + draw.random()),
        )

    def end(self) -> None:
        """Nothing goes wrong from now on."""
        self.over = True
        self._troubles.clear()

    # ---- the steps of daemons

    def before(self, daemon: Daemon, operation: str, key: str) -> None:
        for place in self._watched:
            if is_at(place, operation, key):
                self._fired[counted.at(place)] += 1
        self._step(daemon, operation, key, before=True)

    def after(self, daemon: Daemon, operation: str, key: str) -> None:
        self._step(daemon, operation, key, before=False)

    def _step(self, daemon: Daemon, operation: str, key: str, *, before: bool) -> None:
        for trouble in self._troubles:
            if trouble.meets(operation, key, before=before):
                self._troubles.remove(trouble)
                self._history.note(f"{daemon.name} {trouble.kind} {'before' if before else 'after'} {operation} {key}")
                self._fired[counted.trouble(trouble.kind, trouble.place)] += 1
                self._befall(daemon, trouble)
                break
        if daemon.suspended:
            daemon.loop.block(0.0)
        # What was begun by a caller's code runs on beside a process that is suspended.
        while daemon.suspended:
            daemon.loop.block(SUSPENDED_LOOK_S)
        if daemon.dead:
            raise Killed

    # ---- single calls

    def decide(self, daemon: Daemon) -> Callable[[Call], Fault | Pause]:
        """Of a daemon's calls to the root."""
        return self._decide(daemon, self._weights, daemon.store.deliver_late)

    def decide_of_ledgers(self, daemon: Daemon, deliver_late: Callable[[], object]) -> Callable[[Call], Fault | Pause]:
        """Of a daemon's calls to the store of ledgers."""
        return self._decide(daemon, self._weights_of_ledgers, deliver_late)

    def _decide(
        self, daemon: Daemon, weights: Mapping[Fault, float], deliver_late: Callable[[], object]
    ) -> Callable[[Call], Fault | Pause]:
        def decide(call: Call) -> Fault:
            if self.over:
                return Fault.NONE
            drawn = self._random.random()
            for fault, probability in weights.items():
                if drawn < probability:
                    if not applies(fault, call.operation):
                        return Fault.NONE
                    if fault is Fault.DELIVER_LATE:
                        self._later(self._random.random() ** 3 * LATE_MAX_S, deliver_late)
                    self._fired[counted.fault(fault.value)] += 1
                    self._history.note(f"{daemon.name} fault {fault.value}")
                    return fault
                drawn -= probability
            return Fault.NONE

        return decide
