"""Decides how often, when and which daemon a call asks, without network or waiting.

A *plan* is a generator. It yields steps, `Send` and `Wait`. It is resumed with the response of a `Send`, or its
failure, a TarryError, is thrown into it; it returns what the caller asked for. The runner of a plan
(`tarry.aio.connections`) performs the steps and decides nothing.
Contents: back-off and deadlines (`RetryPolicy`, `Deadline`), the attempts of one call (`Search`, `Asking`), and
settings and argument checks that the plans of all calls share (`Planning`). `tarry.errors` decides which failures are
worth another attempt, `tarry.daemons` which daemon is asked.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from tarry import columns, daemons, errors, reasons, wire
from tarry.v1 import cluster_pb2, inspect_pb2


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with full jitter.

    The n-th delay is uniform from 0 to `initial_s * 2^(n-1)`, at most `max_s` (seconds). If a daemon says when to retry
    (`retry-after-ms`), that time is kept, and an owner that it names is asked at once.
    """

    initial_s: float = 0.05
    max_s: float = 0.5
    uniform: Callable[[float, float], float] = random.uniform

    def delay_s(self, error: errors.TarryError, attempt: int) -> float:
        """Return the delay after the `attempt`-th failure in a row (seconds); the first is 1."""
        if isinstance(error, (errors.ResourceExhausted, errors.Unavailable)) and error.retry_after_ms is not None:
            return error.retry_after_ms / 1000
        if isinstance(error, (errors.NotOwner, errors.OutcomeUnknown)) and error.owner_address and attempt == 1:
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
        """Move the deadline, because the caller waits this long for something that does not count (seconds)."""
        self.at_s += seconds

    def remaining_s(self) -> float:
        """Return the time left (seconds), not below 0."""
        return max(0.0, self.at_s - time.monotonic())

    def exceeded(self, last: errors.TarryError | None, *, attempts: int) -> errors.DeadlineExceeded:
        """Return the failure to raise after the deadline, when `last` was the last failure."""
        error = errors.DeadlineExceeded(f"no answer within {self.timeout_s:g} s", last=last)
        error.attempts = attempts
        return error


T = TypeVar("T")
Response = TypeVar("Response")


@dataclasses.dataclass(frozen=True, slots=True)
class Method(Generic[Response]):
    """A method of the wire, with its path and the parser of its answer. Requests are bytes."""

    path: str
    read: Callable[[bytes], Response]


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """A call to `address` that may take `timeout_s` (seconds)."""

    method: Method[Any]
    request: bytes
    address: str
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """A pause of `delay_s` (seconds), cut short when the client is closed.

    `why` is the reason if it is worth reporting.
    """

    delay_s: float
    why: str = ""


Step: TypeAlias = Send | Wait
Plan: TypeAlias = Generator[Step, Any, T]
"""Steps to perform, and finally the result"""


VERSION = Method("/tarry.v1.Cluster/GetVersion", cluster_pb2.GetVersionResponse.FromString)
HANDOUT_NAMES = "handout_names"
"""Daemon feature: deliveries are named by their redelivery counts, and `forwarded` is understood."""
ON_INVALID = "on_invalid"
"""Daemon feature: the valid rows of an add with invalid ones are stored."""
RETENTION = "retention"
"""Daemon feature: the daemon reports what a topic needs of its message log, and trims to dead letters."""
SUBSCRIBE_MANY = "subscribe_many"
"""Daemon feature: one stream carries many subscriptions."""
HELD_MORE = "held_more"
"""Daemon feature: the held positions of a stream may be declared in several messages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """The daemon feature that a request needs; `what` names the request's part in the caller's words."""

    what: str
    feature: str

    def unmet(self, features: frozenset[str] | None, where: str) -> errors.Unsupported | None:
        """Return the error if these features lack it, or None if they have it or are unknown (None)."""
        if features is None or self.feature in features:
            return None
        return errors.Unsupported(f"{self.what}: {where} does not know it (feature {self.feature}); update the daemon")


FORWARDED = Need("forwarded", HANDOUT_NAMES)
"""An older daemon would take a negative acknowledgement that is `forwarded` for one that is not."""
INVALID_RETURNED = Need("on_invalid", ON_INVALID)
"""An older daemon would refuse the whole request for one row."""
DEAD_LETTER = Need("dead_letter", RETENTION)
"""An older daemon would drop the rows that should become dead letters."""
RETAINED = Need("retention", RETENTION)
"""An older daemon does not know the call."""


class Search:
    """The failures of one call or stream on its way to the daemon that serves its topic.

    Each address is asked once between two back-offs, so that a dead one delays no call. The daemon that may be asked
    first decides how long a back-off is.
    """

    def __init__(self, known: daemons.Daemons, policy: RetryPolicy, topic: str | None) -> None:
        self._known = known
        self._policy = policy
        self._topic = topic
        self.restart()

    def restart(self) -> None:
        """Forget all failures, because there was progress."""
        self.failures = 0
        self._rounds = 0
        # Address -> how long to back off after its failure (seconds), since the last back-off
        self._asked: dict[str, float] = {}

    @property
    def address(self) -> str:
        """The address to ask next."""
        return self._known.address(self._topic)

    def failed(self, address: str, error: errors.TarryError) -> float:
        """Learn from a failure at an address; return how long to wait before the next attempt (seconds)."""
        self.failures += 1
        self._asked[address] = self._policy.delay_s(error, self._rounds + 1)
        self._known.learn(self._topic, address, error)
        if self.address not in self._asked:
            return 0.0
        self._rounds += 1
        delay_s = self._asked[self.address]
        self._asked.clear()
        return delay_s


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """The rules for the attempts of one call, or of several that share a deadline."""

    daemons: daemons.Daemons
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
        """Send an idempotent request until it is answered.

        `request` may be a function that makes it for each attempt. The daemon is first asked whether it has the feature
        in `needs`. Raises a failure that a retry does not fix, DeadlineExceeded, Closed, or Unsupported if the feature
        is missing.
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
        """Ask as `ask` does; also return whether an earlier attempt may have been carried out without an answer."""
        last: errors.TarryError | None = None
        may_have_landed = False
        attempt = 0
        search = Search(self.daemons, self.policy, topic)
        while remaining_s := self.deadline.remaining_s():
            attempt += 1
            address = search.address
            encoded = request if isinstance(request, bytes) else request()
            was_sent = False
            try:
                if needs is not None:
                    yield from self._check_can(needs, address, remaining_s)
                was_sent = True
                response: Response = yield Send(method, encoded, address, remaining_s)
                return response, may_have_landed
            except errors.TarryError as failure:
                error = failure
            error.attempts = attempt
            error.may_have_landed = may_have_landed
            if isinstance(error, errors.DeadlineExceeded):
                may_have_landed = may_have_landed or was_sent
                break
            if not errors.is_retryable(error):
                raise error
            last = error
            if isinstance(error, errors.Unavailable) and error.former_owner_ms is not None:
                # The owner answered and has done nothing yet: the caller's time is for what comes after.
                delay_s = self.policy.delay_s(error, attempt)
                self.deadline.extend(delay_s)
                yield Wait(delay_s, error.message)
                continue
            may_have_landed = may_have_landed or (was_sent and errors.may_have_landed(error))
            delay_s = search.failed(address, error)
            if delay_s >= self.deadline.remaining_s():
                break
            yield Wait(delay_s)
        exceeded = self.deadline.exceeded(last, attempts=attempt)
        exceeded.may_have_landed = may_have_landed
        raise exceeded

    def _check_can(self, needs: Need, address: str, remaining_s: float) -> Plan[None]:
        """Raise Unsupported if the daemon lacks the feature, or the failure of asking."""
        features = self.daemons.features(address)
        if features is None:
            try:
                version = yield Send(VERSION, b"", address, remaining_s)
                features, request_bytes = frozenset(version.feature), version.message_bytes_max
            except errors.TarryError as error:
                if not errors.is_unknown_call(error):
                    raise
                features, request_bytes = frozenset(), 0
            self.daemons.learn_features(address, features, request_bytes)
        if (unmet := needs.unmet(features, f"the daemon at {address}")) is not None:
            raise unmet


class Planning:
    """The base of the classes that make plans."""

    def __init__(
        self, known: daemons.Daemons, policy: RetryPolicy, *, timeout_s: float, rows_max: int, bytes_max: int | None
    ) -> None:
        """Make plans for these daemons, with these settings. `bytes_max` None leaves the limit to the daemons."""
        self.daemons = known
        self.policy = policy
        self.timeout_s = timeout_s
        self.rows_max = rows_max
        self._bytes_max = bytes_max

    @property
    def bytes_max(self) -> int:
        """The most bytes of a request: the daemons' limit, or less if so set."""
        known = self.daemons.request_bytes
        if self._bytes_max is None:
            return columns.REQUEST_BYTES_MAX if known is None else known
        return self._bytes_max if known is None else min(self._bytes_max, known)

    @property
    def positions_max(self) -> int:
        """The most delivered positions that a request names."""
        return columns.positions_per_request(self.rows_max, self.bytes_max)

    def deadline(self, timeout_s: float | None, *, longer_by_s: float = 0.0) -> Deadline:
        return Deadline.after((self.timeout_s if timeout_s is None else timeout_s) + longer_by_s)

    def asking(self, timeout_s: float | None, *, longer_by_s: float = 0.0) -> Asking:
        return Asking(self.daemons, self.policy, self.deadline(timeout_s, longer_by_s=longer_by_s))

    def once(self, method: Method[Any], request: bytes, timeout_s: float | None) -> Plan[Send]:
        """Return a call that is made once, to a daemon that answers if there is a choice.

        Raises what `Asking.ask` does.
        """
        asking = self.asking(timeout_s)
        if self.daemons.are_several:
            try:
                yield from asking.ask(VERSION, b"", topic=None)
            except errors.TarryError as error:
                if not errors.is_unknown_call(error):
                    raise
        return Send(method, request, self.daemons.address(None), asking.deadline.remaining_s())


def needs_of(on_invalid: reasons.OnInvalid) -> Need | None:
    """Return what an add needs of a daemon, or None."""
    return INVALID_RETURNED if on_invalid is reasons.OnInvalid.RETURN else None


def check_names(topic: str, subscription: str = "") -> None:
    """Raise InvalidArgument if a name has no UTF-8 form."""
    wire.utf8("topic", topic)
    wire.utf8("subscription", subscription)


def time_range(first_name: str, first: int | None, last_name: str, last: int | None) -> dict[str, int]:
    """Return both ends of a range of times, with 0 for an open end. Raises InvalidArgument."""
    for name, value in ((first_name, first), (last_name, last)):
        columns.check_unsigned(name, value or 0, bits=64)
    return {first_name: first or 0, last_name: last or 0}


def ledger_range(ledgers: tuple[int, int] | None) -> inspect_pb2.LedgerRange | None:
    """Return a range of ledgers, both ends included, or None for all. Raises InvalidArgument."""
    if ledgers is None:
        return None
    first, last = ledgers
    columns.check_unsigned("first_ledger_id", first, bits=64)
    columns.check_unsigned("last_ledger_id", last, bits=64)
    return inspect_pb2.LedgerRange(first_ledger_id=first, last_ledger_id=last)
