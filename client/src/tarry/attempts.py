"""Asking a daemon until it answers: the rules, without the network and without the waiting.

A *plan* is a generator. It yields steps, `Send` and `Wait`, is resumed with the response of a `Send` (or its failure, a
TarryError, is thrown into it), and returns what the caller asked for. Whoever runs a plan
(`tarry.aio.connections`) performs the steps and decides nothing.

Owns: how often, when and whom a call asks; the owner of each topic as far as it is known.
Does not own: which failures are worth another attempt (`tarry.errors`), the back-off (`tarry.attempts`), requests and
results (`tarry.calls`).

How long to wait before a request is sent again.

Owns: the delay, from the kind of the failure and the number of attempts; the time by which the caller wants an answer.
Does not own: which failures are worth it (`tarry.errors`) and the waiting itself.

What the plans of all calls share.

Owns: the settings of one client that a plan needs, its deadline and attempts, and arguments that several calls check.
Does not own: the plans (`tarry.calls`, `tarry.calls`, `tarry.deletion_calls`).
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from tarry import columns, credentials, errors, reasons, wire
from tarry.v1 import cluster_pb2, inspect_pb2


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with full jitter: the n-th is uniform from 0 to `initial_s * 2^(n-1)`, at most `max_s`.

    A daemon that says when to come back (`retry-after-ms`) is obeyed, and the owner it names is asked at once.
    """

    initial_s: float = 0.05
    max_s: float = 1.0
    uniform: Callable[[float, float], float] = random.uniform

    def delay_s(self, error: errors.TarryError, attempt: int) -> float:
        """Seconds to wait after the `attempt`-th failure in a row (1 = the first)."""
        if isinstance(error, (errors.ResourceExhausted, errors.Unavailable)) and error.retry_after_ms is not None:
            return error.retry_after_ms / 1000
        if isinstance(error, errors.NotOwner) and error.owner_address and attempt == 1:
            return 0.0
        ceiling_s = min(self.max_s, self.initial_s * 2.0 ** min(attempt - 1, 30))
        return self.uniform(0.0, ceiling_s)


@dataclasses.dataclass
class Deadline:
    """The time by which the caller wants an answer, on the monotonic clock. Requests may share one."""

    timeout_s: float
    at_s: float

    @staticmethod
    def after(timeout_s: float) -> Deadline:
        return Deadline(timeout_s, time.monotonic() + timeout_s)

    def extend(self, seconds: float) -> None:
        """The caller waits for so long for something that is not counted."""
        self.at_s += seconds

    def remaining_s(self) -> float:
        """Not below 0."""
        return max(0.0, self.at_s - time.monotonic())

    def exceeded(self, last: errors.TarryError | None, *, attempts: int) -> errors.DeadlineExceeded:
        """The failure to raise when the time is over, after `last`."""
        error = errors.DeadlineExceeded(f"no answer within {self.timeout_s:g} s", last=last)
        error.attempts = attempts
        return error


T = TypeVar("T")
Response = TypeVar("Response")


@dataclasses.dataclass(frozen=True, slots=True)
class Method(Generic[Response]):
    """A method of the wire: its path, and how its answer is read. Requests are bytes."""

    path: str
    read: Callable[[bytes], Response]


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """A call to `address` that may take `timeout_s`."""

    method: Method[Any]
    request: bytes
    address: str
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is sent for so long, unless the client is closed. `why`: what is waited for, where it is worth saying."""

    delay_s: float
    why: str = ""


Step: TypeAlias = Send | Wait
Plan: TypeAlias = Generator[Step, Any, T]
"""Steps to perform, and in the end the result."""


VERSION = Method("/tarry.v1.Cluster/GetVersion", cluster_pb2.GetVersionResponse.FromString)
HANDOUT_NAMES = "handout_names"
"""A feature of daemons: they know hand-outs by their redelivery counts, and `forwarded`."""
ON_INVALID = "on_invalid"
"""A feature of daemons: they store the other rows of an add of which some are invalid."""
RETENTION = "retention"
"""A feature of daemons: they say what a topic needs of its log, and trim to dead letters."""
SUBSCRIBE_MANY = "subscribe_many"
"""A feature of daemons: they carry many subscriptions on one stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """What a request asks for, in the caller's words, and the feature of a daemon that it needs."""

    what: str
    feature: str

    def unmet(self, features: frozenset[str] | None, where: str) -> errors.Unsupported | None:
        """What to raise where a daemon cannot do it; None where it can. `features`: of the daemon, None: not known."""
        if features is None or self.feature in features:
            return None
        return errors.Unsupported(f"{self.what}: {where} does not know it (feature {self.feature}); update the daemon")


FORWARDED = Need("forwarded", HANDOUT_NAMES)
"""A daemon of before would take a negative acknowledgement that is `forwarded` for one that is not."""
INVALID_RETURNED = Need("on_invalid", ON_INVALID)
"""A daemon of before would refuse the whole request for one row."""
DEAD_LETTER = Need("dead_letter", RETENTION)
"""A daemon of before would drop what is to become dead letters."""
RETAINED = Need("retention", RETENTION)
"""A daemon of before does not know the call."""


class Owners:
    """Whom to ask for a topic, and what daemons can do. Threads may share it: every method is one operation of a
    dictionary.

    The topic None stands for what is of no topic, such as the list of topics: its owner is the one that a daemon
    which stands by has named.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._owners: dict[str | None, str] = {}
        self._features: dict[str, frozenset[str]] = {}

    def features(self, address: str) -> frozenset[str] | None:
        """What the daemon at an address has said that it can do; None: it is to be asked."""
        return self._features.get(address)

    def learn_features(self, address: str, features: frozenset[str]) -> None:
        self._features[address] = features

    def address(self, topic: str | None) -> str:
        """The topic's owner if it is known, otherwise the target."""
        return self._owners.get(topic, self.target)

    def learn(self, topic: str | None, error: errors.TarryError) -> None:
        """Takes from a failure whom to ask next: the owner that it names, otherwise the target again. Behind the
        address that was asked there may be another daemon from now on.
        """
        self._features.pop(self.address(topic), None)
        if isinstance(error, errors.NotOwner) and error.owner_address:
            self._owners[topic] = error.owner_address
        else:
            self._owners.pop(topic, None)


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """What the attempts of one call, or of several that share a deadline, go by."""

    owners: Owners
    policy: RetryPolicy
    deadline: Deadline

    def ask(
        self,
        method: Method[Response],
        request: bytes | Callable[[], bytes],
        *,
        topic: str | None,
        needs: Need | None = None,
    ) -> Plan[Response]:
        """Sends an idempotent request until it is answered. `request` may be made anew for each attempt. `needs`: what
        the daemon is asked first whether it can.

        Raises the failure that a retry does not cure, DeadlineExceeded, Closed; Unsupported: the daemon cannot.
        """
        response, _ = yield from self.ask_and_tell(method, request, topic=topic, needs=needs)
        return response

    def ask_and_tell(
        self,
        method: Method[Response],
        request: bytes | Callable[[], bytes],
        *,
        topic: str | None,
        needs: Need | None = None,
    ) -> Plan[tuple[Response, bool]]:
        """Asks as `ask` does; also tells whether an earlier attempt may have been carried out, its answer lost."""
        last: errors.TarryError | None = None
        may_have_landed = False
        attempt = 0
        while remaining_s := self.deadline.remaining_s():
            attempt += 1
            encoded = request if isinstance(request, bytes) else request()
            try:
                if needs is not None:
                    yield from self._check_can(needs, self.owners.address(topic), remaining_s)
                response: Response = yield Send(method, encoded, self.owners.address(topic), remaining_s)
                return response, may_have_landed
            except errors.TarryError as failure:
                error = failure
            error.attempts = attempt
            error.may_have_landed = may_have_landed
            if isinstance(error, errors.DeadlineExceeded):
                break
            if not errors.is_retryable(error):
                raise error
            last = error
            delay_s = self.policy.delay_s(error, attempt)
            if isinstance(error, errors.Unavailable) and error.former_owner_ms is not None:
                # It is the owner's answer, and it has done nothing: the caller's time is for what comes after.
                self.deadline.extend(delay_s)
                yield Wait(delay_s, error.message)
                continue
            may_have_landed = may_have_landed or isinstance(error, (errors.Unavailable, errors.OutcomeUnknown))
            self.owners.learn(topic, error)
            if delay_s >= self.deadline.remaining_s():
                break
            yield Wait(delay_s)
        raise self.deadline.exceeded(last, attempts=attempt)

    def _check_can(self, needs: Need, address: str, remaining_s: float) -> Plan[None]:
        """Raises Unsupported, and what asking ends with."""
        features = self.owners.features(address)
        if features is None:
            try:
                version = yield Send(VERSION, b"", address, remaining_s)
                features = frozenset(version.feature)
            except errors.TarryError as error:
                if not errors.is_unknown_call(error):
                    raise
                features = frozenset()
            self.owners.learn_features(address, features)
        if (unmet := needs.unmet(features, f"the daemon at {address}")) is not None:
            raise unmet


class Planning:
    """The base of what makes plans."""

    def __init__(self, target: str, policy: RetryPolicy, *, timeout_s: float, rows_max: int, bytes_max: int) -> None:
        """Raises InvalidArgument: a port that there is not."""
        credentials.check_target(target)
        self.owners = Owners(target)
        self.policy = policy
        self.timeout_s = timeout_s
        self.rows_max = rows_max
        self.bytes_max = bytes_max

    def deadline(self, timeout_s: float | None, *, longer_by_s: float = 0.0) -> Deadline:
        return Deadline.after((self.timeout_s if timeout_s is None else timeout_s) + longer_by_s)

    def asking(self, timeout_s: float | None, *, longer_by_s: float = 0.0) -> Asking:
        return Asking(self.owners, self.policy, self.deadline(timeout_s, longer_by_s=longer_by_s))


def needs_of(on_invalid: reasons.OnInvalid) -> Need | None:
    """What an add needs of a daemon."""
    return INVALID_RETURNED if on_invalid is reasons.OnInvalid.RETURN else None


def check_names(topic: str, subscription: str = "") -> None:
    """Refuses names that have no UTF-8 form: raises InvalidArgument."""
    wire.utf8("topic", topic)
    wire.utf8("subscription", subscription)


def time_range(first_name: str, first: int | None, last_name: str, last: int | None) -> dict[str, int]:
    """Both ends of a range of times; 0 where one is open. Raises InvalidArgument."""
    for name, value in ((first_name, first), (last_name, last)):
        columns.check_unsigned(name, value or 0, bits=64)
    return {first_name: first or 0, last_name: last or 0}


def ledger_range(ledgers: tuple[int, int] | None) -> inspect_pb2.LedgerRange | None:
    """A range of ledgers, both ends included; None: all. Raises InvalidArgument."""
    if ledgers is None:
        return None
    first, last = ledgers
    columns.check_unsigned("first_ledger_id", first, bits=64)
    columns.check_unsigned("last_ledger_id", last, bits=64)
    return inspect_pb2.LedgerRange(first_ledger_id=first, last_ledger_id=last)
