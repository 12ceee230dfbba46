"""Lists of answers that a broker, a daemon or their libraries give a relay, and what it has to do all the same.

Contents: `real` and `noise`, the lists of answers to each call; `mutation`, which draws a run with some of them; `run`;
`faults_of`, the oracle; `table`, which shows what was done.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import errno
import functools
import itertools
import json
import random
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import confluent_kafka
import grpc.aio
import nats.errors
import numpy as np
import redis.exceptions

import tarry
from tarry_relay import daemon_answers, port, publishing, sessions
from tarry_relay.port import Cause, Finding, Grade, Meaning, Meant, Produced
from tests.relay._support.odd_world import (
    AGAIN,
    ASKING,
    BAD,
    DUE,
    ENDING,
    FAR_MS,
    OF_MESSAGES,
    REFUSED,
    SESSION,
    SURPRISE,
    TAKEN,
    Batch,
    Fields,
    Odd,
    Script,
    World,
    is_of,
)

LIMIT_S = 60.0
"""How long a run takes at most to settle (seconds)."""
IDLE_S = 1.0
"""How long a settled run waits for a call that does not come (seconds)."""
SLOW_S = 0.08
ODD = "odd answer"
"""What stands in the text of each odd exception, so that a reason shows where it comes from."""

_OF_DAEMON = frozenset(
    (
        *("add", "add_late", "nack", "cancel", "reschedule", "bury", "receive", "ack", "reject"),
        *("create_subscription", "subscribe", "stats", "retention", "policy", "trim", "topics", "topics_page"),
    )
)
_REPEATED = frozenset(
    (*OF_MESSAGES, "read", "commit", "hold", "must_answer", "stats", "ack", "reject", "source_findings", "topics")
)
"""Calls that are repeated within the session if they fail for now."""


# Real answers.

LIBRARIES: Mapping[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError(ODD),
    "TypeError": lambda: TypeError(ODD),
    "OverflowError": lambda: OverflowError(ODD),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "\ud800", 0, 1, ODD),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, ODD),
    "KeyError": lambda: KeyError(ODD),
    "IndexError": lambda: IndexError(ODD),
    "AttributeError": lambda: AttributeError(ODD),
    "AssertionError": lambda: AssertionError(ODD),
    "BufferError": lambda: BufferError(ODD),
    "RecursionError": lambda: RecursionError(ODD),
    "MemoryError": lambda: MemoryError(ODD),
    "StopAsyncIteration": lambda: StopAsyncIteration(ODD),
    "asyncio.TimeoutError": lambda: TimeoutError(ODD),
    "asyncio.InvalidStateError": lambda: asyncio.InvalidStateError(ODD),
    "EOFError": lambda: EOFError(ODD),
    "asyncio.CancelledError": lambda: asyncio.CancelledError(ODD),
    "concurrent.futures.CancelledError": lambda: concurrent.futures.CancelledError(ODD),
    "OSError": lambda: OSError(errno.EMFILE, ODD),
    "ConnectionResetError": lambda: ConnectionResetError(errno.ECONNRESET, ODD),
    "ssl.SSLError": lambda: ssl.SSLError(ODD),
    "RuntimeError: Event loop is closed": lambda: RuntimeError(f"Event loop is closed ({ODD})"),
    "struct.error": lambda: struct.error(ODD),
    "json.JSONDecodeError": lambda: json.JSONDecodeError(ODD, "", 0),
    "ExceptionGroup": lambda: ExceptionGroup(ODD, [ValueError(ODD)]),
    "confluent_kafka.KafkaException": lambda: confluent_kafka.KafkaException(ODD),
    "nats.errors.TimeoutError": lambda: nats.errors.TimeoutError(ODD),
    "nats.errors.Error": lambda: nats.errors.Error(ODD),
    "redis.ResponseError": lambda: redis.exceptions.ResponseError(ODD),
    "redis.ConnectionError": lambda: redis.exceptions.ConnectionError(ODD),
    "grpc.aio.UsageError": lambda: grpc.aio.UsageError(ODD),
}
"""What client libraries raise although no adapter foresees it."""
_NATS_TIMEOUT = str(nats.errors.TimeoutError())
_OF_TARRY: Sequence[type[tarry.TarryError]] = (
    *daemon_answers.TABLE,
    *(tarry.NotFound, tarry.Unsupported, tarry.Closed, tarry.AlreadyExists),
)


def _failures(step: str) -> list[Odd]:
    """Return what a call may raise, done before and not."""
    raised: dict[str, tuple[str, Callable[[], BaseException]]] = {}
    surprise = SURPRISE if step in OF_MESSAGES else SESSION
    if step in _OF_DAEMON:
        for kind in _OF_TARRY:
            raised[kind.__name__] = (_means(step, kind), functools.partial(kind, ODD))
    else:
        passes = AGAIN if step in _REPEATED else SESSION
        raised["Unreachable"] = (passes, lambda: port.Unreachable(ODD))
        raised["SessionOver"] = (SESSION, lambda: port.SessionOver(ODD))
        raised["NotThere"] = (SESSION, lambda: port.NotThere(ODD))
    raised |= {name: (surprise, error) for name, error in LIBRARIES.items()}
    found = [
        # What is said to be there is not: a look at the topic ends the session.
        Odd(name, SESSION if name == tarry.AlreadyExists.__name__ else means, 0, error)
        for name, (means, error) in raised.items()
    ]
    if step not in ("read", "open", "close", "passed", "fetch", "hold"):
        may_land = [name for name in raised if not _says_nothing_was_done(name)]
        found += [Odd(f"{name}, and done", raised[name][0], 1, raised[name][1]) for name in may_land]
    return found


def _means(step: str, kind: type[tarry.TarryError]) -> str:
    meant = daemon_answers.TABLE.get(kind)
    if step == "create_subscription" and kind is tarry.AlreadyExists:
        return TAKEN
    # The question of `retention` ends a session that has made its subscription: the topic was deleted since.
    if step == "policy" and kind is tarry.NotFound:
        return TAKEN
    if step == "topics" and kind is tarry.NotFound:
        return AGAIN
    if meant is None or step not in _REPEATED:
        return SESSION
    if meant.meaning is Meaning.REFUSED:
        return REFUSED if step in OF_MESSAGES else SESSION
    if kind is tarry.Internal:
        return SURPRISE if step in OF_MESSAGES else SESSION
    return AGAIN


def _says_nothing_was_done(name: str) -> bool:
    kind = getattr(tarry, name, None)
    meant = daemon_answers.TABLE.get(kind) if kind is not None else None
    return meant is not None and meant.meaning in (Meaning.REFUSED, Meaning.NOT_NOW)


def real(step: str) -> list[Odd]:
    """Return the answers that a call may really get."""
    return [*_failures(step), *(_OF_STEP[step]() if step in _OF_STEP else []), *_slow(step)]


def _slow(step: str) -> list[Odd]:
    return [Odd("slow", TAKEN, 1, takes_s=SLOW_S)]


def _changed(name: str, means: str, change: Callable[[Any], Any], lands: int = 1, **more: Any) -> Odd:
    return Odd(name, means, lands, change=change, **more)


def _always(make: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda _: make()


def _of_produce() -> list[Odd]:
    found = []
    for meaning in Meaning:
        for cause in Cause:
            for lands in {Meaning.TAKEN: (1,), Meaning.UNKNOWN: (0, 1)}.get(meaning, (0,)):
                for first_only in (False, True):
                    name = f"{meaning.name} {cause.name}{', the first' * first_only}{', and done' * lands}"
                    text = "" if meaning is Meaning.TAKEN else ODD
                    answer = Produced(Meant(meaning, cause), "ODD", text)
                    found.append(Odd(name, meaning.value, lands, produced=answer, first_only=first_only))
    return found


def _of_read() -> list[Odd]:
    def lost(portion: port.Portion) -> port.Portion:
        return port.Portion([], [each.lane for each in portion.read[:1]])

    def gone(portion: port.Portion) -> port.Portion:
        return port.Portion([dataclasses.replace(each, message=None) for each in portion.read])

    return [
        _changed("nothing", TAKEN, lambda portion: port.Portion()),
        _changed("fewer", TAKEN, lambda portion: port.Portion(portion.read[:-1])),
        _changed("the same once more later", TAKEN, lambda portion: portion, again=True),
        _changed("lane lost", TAKEN, lost, again=True),
        _changed("lost when it was read", REFUSED, gone),
    ]


def _of_receive() -> list[Odd]:
    return [
        _changed("nothing", TAKEN, lambda batch: None, 0),
        _changed("the same once more later", TAKEN, lambda batch: batch, again=True),
    ]


def _of_passed() -> list[Odd]:
    return [_changed("none", TAKEN, lambda told: [False] * len(told))]


def _of_fetch() -> list[Odd]:
    return [_changed("gone", REFUSED, lambda found: [None] * len(found))]


def _of_add() -> list[Odd]:
    def refused(why: tarry.RefusedReason) -> Odd:
        answer = Fields(refused=dict.fromkeys(range(5), why), accepted=0, duplicates=0)
        return _changed(f"refused {why.name}", REFUSED, _always(lambda: answer), 0)

    return [refused(why) for why in tarry.RefusedReason]


def _of_nack() -> list[Odd]:
    def ignored(why: tarry.IgnoredReason) -> Odd:
        return _changed(f"ignored {why.name}", TAKEN, lambda _: Fields(ignored={0: why}))

    return [ignored(why) for why in tarry.IgnoredReason]


def _of_withdrawal() -> list[Odd]:
    def told(name: str) -> Odd:
        def change(_: object) -> Any:
            none, first = np.empty(0, np.int64), np.zeros(1, np.int64)
            names = ("not_found_index", "already_due_index", "in_flight_index", "raised_index", "raised_deliver_at_ms")
            return Fields(**dict.fromkeys(names, none) | {name: first, "may_have_landed": True})

        return _changed(name, TAKEN, change)

    return [told("not_found_index"), told("already_due_index"), told("in_flight_index")]


def _of_findings() -> list[Odd]:
    def found(name: str, grade: Grade) -> Odd:
        return _changed(f"{name} {grade.value}", TAKEN, lambda _: [Finding(name, grade, ODD)])

    return [found(name, grade) for name in ("source", "retry", "target", "retention") for grade in Grade]


_OF_STEP: Mapping[str, Callable[[], list[Odd]]] = {
    "read": _of_read,
    "passed": _of_passed,
    "fetch": _of_fetch,
    "produce": _of_produce,
    "receive": _of_receive,
    "add": _of_add,
    "add_late": _of_add,
    "nack": _of_nack,
    "cancel": _of_withdrawal,
    "reschedule": _of_withdrawal,
    "findings": _of_findings,
    "source_findings": _of_findings,
    "kept_ms": lambda: [
        _changed("no age", TAKEN, lambda _: None),
        _changed("short", TAKEN, lambda _: 1),
    ],
    "first_entries": lambda: [
        _changed("nothing", TAKEN, lambda _: {}),
        _changed("later", TAKEN, lambda _: {1: 10**6}),
    ],
    "generation": lambda: [_changed("another", SESSION, lambda _: "2")],
}


# Noise.

_IGNORED = frozenset(("commit", "hold", "must_answer", "create_subscription", "ack", "reject", "bury", "open", "close"))
"""Calls of which any answer is one: they have failed if they raise."""
_ROWS = frozenset(("fetch", "produce", "passed"))
"""Calls that answer with a row for each message."""


def noise(step: str) -> list[Odd]:
    """Return answers that no broker, daemon or library should give."""
    things: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "an empty text": str,
        "a text": lambda: ODD,
        "-1": lambda: -1,
        "a number": lambda: 2**70,
        "no number": lambda: float("nan"),
        "an object": object,
        "a dict": lambda: {ODD: ODD},
        "an exception": lambda: ValueError(ODD),
        "an empty list": list,
    }
    if step in _IGNORED:
        return [_changed(name, TAKEN, _always(make)) for name, make in things.items()]
    means = SURPRISE if step in OF_MESSAGES else SESSION
    found = [
        _changed(f"{name}{', and done' * lands}", means, _always(make), lands)
        for name, make in things.items()
        for lands in (0, 1)
        # Rows that are handed out and not there: nothing shows that they are missing.
        if not (step == "receive" and lands and name in ("None", "an empty text", "an empty list"))
    ]
    if step in _ROWS:
        found += [
            _changed("too few rows", means, lambda rows: rows[:-1]),
            _changed("too many rows", means, lambda rows: [*rows, *rows]),
            _changed("rows of None", REFUSED if step == "fetch" else means, lambda rows: [None] * len(rows)),
            _changed("rows of texts", means, lambda rows: [ODD] * len(rows)),
            _changed("rows of exceptions", means, lambda rows: [ValueError(ODD)] * len(rows)),
            _changed("no list, but its parts one by one", means, iter),
        ]
    if step in OF_MESSAGES:
        found += [Odd(f"{name}, done twice", SURPRISE, 2, error) for name, error in list(LIBRARIES.items())[:4]]
        found += [
            Odd(f"{name}, done late", SURPRISE, 1, error, takes_s=SLOW_S) for name, error in list(LIBRARIES.items())[:4]
        ]
    return [*found, *(_NOISE[step]() if step in _NOISE else [])]


def _noise_of_read() -> list[Odd]:
    def with_first(**fields: Any) -> Callable[[port.Portion], port.Portion]:
        def change(portion: port.Portion) -> port.Portion:
            return port.Portion([dataclasses.replace(portion.read[0], **fields)])

        return change

    def sent_at(sent_at_ms: Any) -> Callable[[port.Portion], port.Portion]:
        def change(portion: port.Portion) -> port.Portion:
            read = portion.read[0]
            assert read.message is not None
            message = dataclasses.replace(read.message, sent_at_ms=sent_at_ms)
            return port.Portion([dataclasses.replace(read, message=message)])

        return change

    return [
        _changed("rows twice", TAKEN, lambda portion: port.Portion([*portion.read, *portion.read])),
        _changed("rows of texts", SESSION, lambda portion: port.Portion([ODD] * 2)),  # type: ignore[list-item]
        _changed("no list", SESSION, lambda portion: port.Portion(None)),  # type: ignore[arg-type]
        _changed("lane is a list", SESSION, with_first(lane=[])),
        _changed("lost lanes are a number", SESSION, lambda portion: port.Portion(portion.read, 7)),  # type: ignore[arg-type]
        _changed("headers are None", REFUSED, with_first(message=port.Message(None, ("orders", 1)))),  # type: ignore[arg-type]
        _changed("message is a text", REFUSED, with_first(message=ODD)),
        _changed("sent at None", REFUSED, sent_at(None)),
        _changed("sent at 2**70", REFUSED, sent_at(2**70)),
        _changed("sent at a text", REFUSED, sent_at(ODD)),
        _changed("repeated is None", REFUSED, with_first(message=port.Message({}, ("orders", 1), None))),  # type: ignore[arg-type]
    ]


def _noise_of_receive() -> list[Odd]:
    return [
        _changed("rows twice", TAKEN, lambda batch: Batch([*batch, *batch])),
        _changed("names that are none", SESSION, lambda batch: Batch([ODD])),  # type: ignore[list-item]
    ]


def _noise_of_add() -> list[Odd]:
    def told(name: str, means: str, **fields: Any) -> Odd:
        return _changed(name, means, lambda answer: Fields(**vars(answer) | fields))

    def with_row(row: int) -> Callable[[Any], Any]:
        return lambda answer: Fields(**vars(answer) | {"refused": {**answer.refused, row: ODD}})

    return [
        told("less than none accepted", SURPRISE, accepted=-1),
        told("refused is a list", SURPRISE, refused=[0]),
        _changed("refused with a text", REFUSED, with_row(0)),
        _changed("refused is a row that it does not have", TAKEN, with_row(99)),
        _changed("without fields", SURPRISE, lambda _: Fields()),
    ]


def _noise_of_nack() -> list[Odd]:
    return [
        _changed("ignored is a row that it does not have", SURPRISE, lambda _: _not_due(99)),
        _changed("ignored is a text", SURPRISE, lambda _: Fields(ignored=ODD)),
        _changed("without fields", SURPRISE, lambda _: Fields()),
    ]


def _not_due(row: int) -> Fields:
    return Fields(ignored={row: tarry.IgnoredReason.NOT_DUE})


def _noise_of_withdrawal() -> list[Odd]:
    def without(name: str) -> Callable[[Any], Any]:
        return lambda answer: Fields(**{field: value for field, value in vars(answer).items() if field != name})

    def raised(answer: Any) -> Any:
        return Fields(**vars(answer) | {"raised_index": np.arange(3), "raised_deliver_at_ms": np.arange(2)})

    return [
        _changed("without fields", SURPRISE, lambda _: Fields()),
        _changed("without one field", SURPRISE, without("in_flight_index")),
        _changed("raised rows that do not fit", SURPRISE, raised),
    ]


_NOISE: Mapping[str, Callable[[], list[Odd]]] = {
    "read": _noise_of_read,
    "receive": _noise_of_receive,
    "add": _noise_of_add,
    "add_late": _noise_of_add,
    "nack": _noise_of_nack,
    "cancel": _noise_of_withdrawal,
    "reschedule": _noise_of_withdrawal,
}


# Mutations, and the oracle.

_NUMBERS = itertools.count()

_ONCE = frozenset(
    (
        *("add_late", "nack", "cancel", "reschedule", "bury", "reject", "open", "close", "findings"),
        *("create_subscription", "subscribe", "topics_page"),
    )
)
"""Calls of which a session may have one alone: their first one is odd."""
_POISONED: Mapping[str, Sequence[int]] = {
    "add": (1, 4, 7, 8),
    "add_late": (15,),
    "nack": (1,),
    "passed": (0, 7, 8),
    "cancel": (7,),
    "reschedule": (8,),
    "produce": (1, 2, 3, 4, 15),
    "bury": (14,),
    "fetch": (1, 4, 15, 16),
}
"""Messages whose calls may be odd each time: what a withdrawal names, where it is one."""


@dataclasses.dataclass
class Mutation:
    """A run with odd answers."""

    step: str
    seed: int
    script: Script
    in_order: bool
    world: World
    run_faults: list[str] = dataclasses.field(default_factory=list)
    ended_at_start: bool = False

    @property
    def given(self) -> list[Odd]:
        return self.script.given

    @property
    def left_open(self) -> int:
        """How many copies more than one the answers may have made."""
        left_open = sum(odd.leaves_open(self.step, in_order=self.in_order) for odd in self.given)
        ends = [odd for odd in self.given if odd.ends_session]
        if self.step in ENDING and len(ends) > 1:
            # What a session that ends still sends fails, too.
            left_open = max(left_open, len(ends))
        mixed = len({odd.name for odd in self.given}) > 1
        return left_open + sum(bool(odd.takes_s) and mixed for odd in self.given)

    def copies_max(self, target: str = "") -> int:
        """Return how often a message may be published to a target at most."""
        # What is overdue stands in the log and waits in Tarry: a session that ends may give it back twice.
        return 1 + self.left_open * (2 if target == "slow" else 1)

    @property
    def copies(self) -> Counter[tuple[str, str]]:
        """How often each message was published, by target and name."""
        return Counter((each.target, each.once_id.partition(":")[2]) for each in self.world.published)

    @property
    def sessions(self) -> int:
        return int(self.world.metrics.sessions._value.get())

    @property
    def says_wrong(self) -> bool:
        """Whether the last answer says that the ends are not as a relay needs them."""
        last = self.given[-1].name if self.given else ""
        return last.startswith("Unsupported") or (self.step == "findings" and last.endswith(Grade.WRONG.value))

    @property
    def may_refuse(self) -> bool:
        """Whether an answer may have made a dead letter of a good message."""
        surprises = sum(odd.means == SURPRISE for odd in self.given)
        return surprises >= publishing.RAISED_MAX or any(odd.means == REFUSED for odd in self.given)

    def row(self) -> dict[str, object]:
        """Return what was done, and what came of it."""
        dead = len(self.world.rejected) + len(self.world.buried)
        return {
            "step": self.step,
            "seed": self.seed,
            "answers": [odd.name for odd in self.given],
            "of": self.script.entry if self.script.entry is not None else f"call {self.script.first}",
            "means": sorted({odd.means for odd in self.given}),
            "may_have_landed": any(odd.lands for odd in self.given),
            "copies_max": self.copies_max(),
            "copies": max(self.copies.values(), default=0),
            "sessions": self.sessions,
            "ended_at_start": self.ended_at_start,
            "dead_letters": dead + sum(each.target == "dead" for each in self.world.published),
        }


def mutation(step: str, seed: int, *, is_real: bool | None = None) -> Mutation:
    """Draw a run with odd answers to calls of a step; real ones first, if it is not said."""
    draw = random.Random(f"{step} {seed}")
    reals = real(step)
    if is_real is None:
        is_real = seed < len(reals)
    in_order = draw.random() < 0.5
    first = 0 if step in _ONCE else draw.randrange(2 if step == "passed" else 3)
    if is_real:
        odd = reals[seed % len(reals)]
        odds = [odd] * (1 if step == "close" else draw.choice((1, 1, 2, 3, 4)))
    elif step == "close" or draw.random() < 0.5:
        odds = [draw.choice(noise(step))] * (1 if step == "close" else draw.choice((1, 2, 3, 4)))
    else:
        odds = [draw.choice([*reals, *noise(step)]) for _ in range(draw.choice((2, 3, 5)))]
    script = Script(step, odds, first)
    may_be_poison = step in _POISONED and {odd.means for odd in odds} <= {SURPRISE, REFUSED}
    if may_be_poison and draw.random() < 0.5:
        script = Script(step, odds[:1], entry=draw.choice(_POISONED[step]))
    return of_script(step, seed, script, in_order=in_order)


def of_script(step: str, seed: int, script: Script, *, in_order: bool) -> Mutation:
    """Return a run of a script."""
    return Mutation(step, seed, script, in_order, World(script, name=f"relay-{next(_NUMBERS)}", in_order=in_order))


async def run(mutation: Mutation) -> None:
    """Run a relay until it has settled and is healthy, and then until it has drained."""
    world, loop = mutation.world, asyncio.get_running_loop()
    ending, began_s = asyncio.Event(), loop.time()
    at_work = asyncio.create_task(sessions.Sessions(world.settings, world.metrics).run(ending))
    settled_s: float | None = None

    def is_done() -> bool:
        nonlocal settled_s
        settled_s = (settled_s or loop.time()) if world.is_settled else None
        if settled_s is None or not world.metrics.health.body()[0]:
            return False
        is_spent = mutation.script.is_spent or mutation.step == "close"
        return is_spent or loop.time() - settled_s > IDLE_S

    while not at_work.done() and not is_done():
        if loop.time() - began_s > LIMIT_S:
            mutation.run_faults.append(f"hangs: {_left(world)}")
            break
        await asyncio.wait([at_work], timeout=0.01)
    by_itself = at_work.done()
    ending.set()
    await asyncio.wait([at_work], timeout=LIMIT_S)
    if not at_work.done():
        mutation.run_faults.append("does not end")
        while not at_work.done():
            at_work.cancel()
            await asyncio.wait([at_work], timeout=1)
    error = asyncio.CancelledError() if at_work.cancelled() else at_work.exception()
    if isinstance(error, sessions.WrongEnds) and not mutation.sessions and mutation.says_wrong:
        mutation.ended_at_start = True
    elif by_itself or error is not None:
        mutation.run_faults.append(f"ends by itself: {error!r}")


def _left(world: World) -> str:
    left = {
        name: [e.entry_id for e in log if e.entry_id not in world.committed[name]] for name, log in world.logs.items()
    }
    rows = {key: row for key, row in world.rows.items() if row.state != "done" and row.deliver_at_ms < FAR_MS}
    return f"not committed {left}, in Tarry {rows}, health {world.metrics.health.body()[1]}"


def faults_of(mutation: Mutation) -> list[str]:
    """Return what is wrong with a run; empty if nothing is."""
    if mutation.run_faults or mutation.ended_at_start:
        return mutation.run_faults
    world = mutation.world
    faults = [*world.faults]
    if not mutation.given:
        faults.append("no odd answer was given")
    ends = sum(odd.ends_session for odd in mutation.given)
    if mutation.sessions > 1 + ends:
        faults.append(f"{mutation.sessions} sessions, and answers ended {ends}")
    for (target, name), count in mutation.copies.items():
        if count > (most := mutation.copies_max(target)):
            faults.append(f"{name} was published to {target} {count} times, and may be {most} times")
    for entry, target in DUE.items():
        faults += _of_good(mutation, entry, any(_is_at(each, target, entry) for each in world.published))
    faults += _of_withdrawn(mutation)
    unreported = world.metrics.unreported._value.get()
    for entry, text in BAD.items():
        reasons = _reasons(world, "orders", entry)
        if not reasons and not unreported and not any(is_of(each, "orders", entry) for each in world.published):
            faults.append(f"bad message {entry} is no dead letter")
        faults += [
            f"bad message {entry} is a dead letter because of {reason!r}"
            for reason in reasons
            if text not in reason and not _may_be_reason(mutation, reason)
        ]
    for entry in ASKING:
        if not any(is_of(each, "orders", entry) for each in world.published) and not unreported:
            faults.append(f"withdrawal {entry} was not answered")
    if not _reasons(world, "failed", 2) and not unreported:
        faults.append("the bad message of the retry log is no dead letter")
    if unreported and not mutation.may_refuse:
        faults.append(f"{unreported} dead letters or results are lines of the log")
    return faults


def _of_good(mutation: Mutation, entry: int, arrived: bool) -> list[str]:
    reasons = _reasons(mutation.world, "orders", entry)
    if mutation.step == "generation":
        # Tarry may have it in another topic, too.
        return [] if arrived or any("created again" in each for each in reasons) else [f"message {entry} was lost"]
    faults = [] if arrived or reasons else [f"message {entry} was lost"]
    faults += [
        f"message {entry} is a dead letter because of {reason!r}"
        for reason in reasons
        if not _may_be_reason(mutation, reason)
    ]
    # The first one may arrive once more, and then not.
    if arrived and reasons and entry != 1 and not any(odd.lands for odd in mutation.given):
        faults.append(f"message {entry} arrived, and is a dead letter because of {reasons}")
    says_so = mutation.step in ("produce", "add", "add_late") and all(odd.error is not None for odd in mutation.given)
    if arrived and says_so and not all(each.startswith("may have landed: ") for each in reasons):
        faults.append(f"message {entry} arrived, and its dead letter does not say that it may have: {reasons}")
    return faults


def _may_be_reason(mutation: Mutation, reason: str) -> bool:
    if mutation.step == "generation":
        return "created again" in reason
    # An answer that is not an exception is named by what it makes the relay raise.
    says_why = ODD in reason or _NATS_TIMEOUT in reason or any(odd.error is None for odd in mutation.given)
    return bool(reason) and mutation.may_refuse and says_why


def _of_withdrawn(mutation: Mutation) -> list[str]:
    """Return what is wrong with what was withdrawn, and with what a consumer has failed with once."""
    world, faults = mutation.world, []
    if mutation.step == "generation":
        # What was asked for in another topic is not found there.
        return []
    told = {
        entry: [
            each.own_headers[publishing.RESULT_HEADER]
            for each in world.published
            if each.target == "results" and is_of(each, "orders", entry)
        ]
        for entry in ASKING
    }
    waits = {entry for (_, entry), row in world.rows.items() if row.state != "done"}
    reasons = _reasons(world, "orders", 8)
    if "RESCHEDULED" in told[10] or not (reasons or 8 in waits):
        faults += _of_good(mutation, 8, any(_is_at(each, "due", 8) for each in world.published))
    if any(_is_at(each, "due", 7) for each in world.published):
        faults.append("message 7 was delivered before it was due")
    if len(world.logs["failed"]) > 1:
        again = any(each.own_headers.get(tarry.REDELIVERY_COUNT_HEADER) == "1" for each in world.published)
        reasons = [*_reasons(world, "failed", 3), *_reasons(world, "orders", 1)]
        if not again and not reasons:
            faults.append("what a consumer failed with was not delivered again")
        faults += [
            f"a return is a dead letter because of {each!r}" for each in reasons if not _may_be_reason(mutation, each)
        ]
    return faults


def _is_at(each: port.Outgoing, target: str, entry: int) -> bool:
    return each.target == target and is_of(each, "orders", entry)


def _reasons(world: World, name: str, entry: int) -> list[str]:
    """Return the reasons of the dead letters of a message."""
    found = [
        each.own_headers[publishing.REASON_HEADER]
        for each in world.published
        if each.target == "dead" and is_of(each, name, entry)
    ]
    if name == "orders":
        found += [each[entry] for each in (world.rejected, world.buried) if entry in each]
    return found


def table(mutations: Sequence[Mutation]) -> str:
    """Return a line for each step."""
    lines = [
        f"{'step':20} {'runs':>5} {'answers':>8} {'landed':>7} {'copies':>7} {'at most':>8} {'sessions':>9}  means"
    ]
    for step in dict.fromkeys(each.step for each in mutations):
        of_step = [each for each in mutations if each.step == step]
        means = Counter(odd.means for each in of_step for odd in each.given)
        lines.append(
            f"{step:20} {len(of_step):5} {sum(means.values()):8} "
            f"{sum(bool(odd.lands) for each in of_step for odd in each.given):7} "
            f"{max((max(each.copies.values(), default=0) for each in of_step), default=0):7} "
            f"{max(each.copies_max() for each in of_step):8} {sum(each.sessions for each in of_step):9}  "
            + ", ".join(f"{name} {count}" for name, count in sorted(means.items()))
        )
    return "\n".join(lines)
