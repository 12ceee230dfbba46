"""Asking a daemon until it answers: the rules, without the network and without the waiting.

A *plan* is a generator. It yields steps, `Send` and `Wait`, is resumed with the response of a `Send` (or its failure, a
TarryError, is thrown into it), and returns what the caller asked for. Whoever runs a plan
(`tarry.aio.connections`) performs the steps and decides nothing.

Owns: how often, when and whom a call asks; the owner of each topic as far as it is known.
Does not own: which failures are worth another attempt (`tarry.errors`), the back-off (`tarry.retry`), requests and
results (`tarry.calls`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from tarry import errors, retry
from tarry.v1 import cluster_pb2

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
    policy: retry.RetryPolicy
    deadline: retry.Deadline

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
