"""Knows the daemons of one client: their addresses, which of them answer, who serves a topic, and their features.

Decides whom to ask next, and when a quiet daemon is asked for its version and left, without network or waiting.
`tarry.attempts` and `tarry.streams` report failures, `tarry.aio.connections` reports what it waits for and what comes.

Whom to ask: the owner of the topic that a daemon has named, otherwise one address for all calls. That address changes
when it fails, to the next of those given and those learned from redirects. No call goes to a silent daemon while
another one is known, even if a standby names it as the owner.
Silence: a daemon that has been quiet for a while (`patience_s`) although a caller waits is asked for its version. If
nothing comes for as long again, it is silent: its channel is closed, and what waited there fails as unavailable. A
silent daemon is asked for its version, beside the calls, until it answers or refuses the connection.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from tarry import errors

SILENCE_S = 3.0
"""Silence after which a daemon is asked for its version, and again as long until it is left (seconds)"""
# Twice this is less than half of the timeout.
_OF_TIMEOUT = 0.2
_SILENCE_MIN_S = 0.5
JUDGED_S = _SILENCE_MIN_S / _OF_TIMEOUT
"""The shortest timeout in less than half of which a silent daemon is left (seconds)"""
# A silent daemon that is not asked any more is tried like any other (seconds).
_FORGOTTEN_S = 600.0


def patience_s(timeout_s: float | None) -> float:
    """Return how long a caller with this timeout lets a daemon be quiet (seconds); None means no timeout."""
    return SILENCE_S if timeout_s is None else min(SILENCE_S, max(_SILENCE_MIN_S, _OF_TIMEOUT * timeout_s))


@dataclasses.dataclass(slots=True)
class _Line:
    """The connection to one address, until the daemon there is left."""

    waiting: dict[float, int] = dataclasses.field(default_factory=dict)
    """Patience (seconds) -> number of callers that wait with it"""
    quiet_since_s: float | None = None
    """The beginning of the first wait since the daemon was heard last; None if no caller has waited since"""

    @property
    def patience_s(self) -> float:
        return min(self.waiting, default=SILENCE_S)


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A caller that waits for a daemon, and lets it be quiet for `patience_s` (seconds)."""

    line: _Line
    patience_s: float


class Daemons:
    """The daemons of one client.

    Threads may share it. The methods of waits (`begin`, `end`, `failed`, `look_at_s`, `patience_s`, `leave`) are called
    under one lock; each of the others is harmless beside any. The topic None stands for calls without a topic, such as
    the list of topics; its owner is the one that a standby has named.
    """

    def __init__(self, addresses: Sequence[str], now_s: Callable[[], float] = time.monotonic) -> None:
        """Know these addresses, at least one, and measure with a monotonic clock (seconds)."""
        self._given = tuple(addresses)
        self._first = self._given[0]
        # Addresses that were not given, as long as they answer, in the order in which they were learned
        self._learned: dict[str, None] = {}
        self._owners: dict[str | None, str] = {}
        self._features: dict[str, frozenset[str]] = {}
        # Address -> the most bytes of a request, where a daemon said so; kept until another daemon there says so
        self._request_bytes: dict[str, int] = {}
        self._lines: collections.defaultdict[str, _Line] = collections.defaultdict(_Line)
        # Silent address -> when it was left
        self._silent: dict[str, float] = {}
        self.now_s = now_s

    @property
    def are_several(self) -> bool:
        """True if there is a choice whom to ask."""
        return len(self._given) + len(self._learned) > 1

    def features(self, address: str) -> frozenset[str] | None:
        """Return the features that the daemon at an address reported, or None if it must be asked."""
        return self._features.get(address)

    def learn_features(self, address: str, features: frozenset[str], request_bytes: int = 0) -> None:
        """Learn what the daemon at an address can do, and the most bytes of a request; 0 if it does not say."""
        self._features[address] = features
        if request_bytes:
            self._request_bytes[address] = request_bytes

    @property
    def request_bytes(self) -> int | None:
        """The most bytes of a request that every daemon takes which said so; None if none did."""
        return min(self._request_bytes.values(), default=None)

    # Whom to ask

    def address(self, topic: str | None) -> str:
        """Return the topic's owner if it is known and not silent, otherwise the address for all calls."""
        owner = self._owners.get(topic)
        return self._first if owner is None or self._is_silent(owner) else owner

    def learn(self, topic: str | None, address: str, error: errors.TarryError) -> None:
        """Learn from a failure at an address whom to ask next.

        The asked daemon stays the one to ask if the failure shows that it serves. Its features are forgotten, because
        another daemon may be there from now on.
        """
        self._features.pop(address, None)
        owner = error.owner_address if isinstance(error, (errors.NotOwner, errors.OutcomeUnknown)) else ""
        if owner and not self._is_silent(owner):
            self._owners[topic] = owner
            if owner not in self._given:
                self._learned[owner] = None
        elif isinstance(error, (errors.NotOwner, errors.Unavailable)):
            if self._owners.get(topic) == address:
                self._owners.pop(topic, None)
            self._turn_from(address)

    def _turn_from(self, address: str) -> None:
        """Ask another daemon than this one, if there is one that is not silent."""
        known = [*self._given, *self._learned]
        self._learned.pop(address, None)
        if address != self._first:
            return
        # Another thread may have dropped it.
        place = known.index(address) if address in known else 0
        others = [each for each in known[place:] + known[:place] if each != address]
        stays = address if address in self._given else self._given[0]
        self._first = next((each for each in others if not self._is_silent(each)), stays)

    def _is_silent(self, address: str) -> bool:
        return self.now_s() - self._silent.get(address, -math.inf) < _FORGOTTEN_S

    # Silence

    def begin(self, address: str, timeout_s: float | None) -> Waiting:
        """Begin a wait for the daemon at an address, of at most `timeout_s` (seconds)."""
        line = self._lines[address]
        waiting = Waiting(line, patience_s(timeout_s))
        line.waiting[waiting.patience_s] = line.waiting.get(waiting.patience_s, 0) + 1
        if line.quiet_since_s is None:
            line.quiet_since_s = self.now_s()
        return waiting

    def end(self, waiting: Waiting) -> None:
        """End a wait, answered or not."""
        counts = waiting.line.waiting
        counts[waiting.patience_s] -= 1
        if not counts[waiting.patience_s]:
            del counts[waiting.patience_s]

    def heard(self, address: str) -> None:
        """Note that something came from the daemon, or that the connection to it is refused: it is not silent."""
        line = self._lines[address]
        line.quiet_since_s = self.now_s() if line.waiting else None
        was_silent = self._silent.pop(address, None) is not None
        if was_silent and address in self._given and self._is_silent(self._first):
            self._first = address

    def quiet_s(self, address: str) -> float:
        """Return how long callers have waited and nothing has come from the daemon (seconds)."""
        since_s = self._lines[address].quiet_since_s
        return 0.0 if since_s is None else self.now_s() - since_s

    def is_quiet(self, address: str, waited_s: float) -> bool:
        """Return True if the daemon should have reported its version to a caller who has waited as long (seconds)."""
        longest_s = max(patience_s(waited_s), self.patience_s(address))
        return min(waited_s, self.quiet_s(address)) >= 2 * longest_s

    def failed(self, address: str, error: errors.TarryError) -> None:
        """Note the failure of a call or a stream at an address, unless it shows no more than silence does."""
        # A refused connection fails at once. One that nothing comes from is given up by gRPC after some seconds.
        gave_up = isinstance(error, errors.Unavailable) and self.quiet_s(address) >= self.patience_s(address)
        if not gave_up and not isinstance(error, errors.DeadlineExceeded):
            self.heard(address)

    def look_at_s(self, address: str) -> float:
        """Return when the daemon must be asked for its version, on the clock; infinity if it need not be asked."""
        line = self._lines[address]
        if line.waiting:
            if line.quiet_since_s is None:
                # A message came as the first of these callers began to wait.
                line.quiet_since_s = self.now_s()
            return line.quiet_since_s + line.patience_s
        return self.now_s() if self._is_silent(address) else math.inf

    def patience_s(self, address: str) -> float:
        """Return how long the daemon may take to report its version (seconds)."""
        return self._lines[address].patience_s

    def leave(self, address: str) -> None:
        """Note that the daemon is silent, so that no call goes there while another is known; forget who waits."""
        self._lines[address] = _Line()
        self._features.pop(address, None)
        for topic in [each for each, owner in list(self._owners.items()) if owner == address]:
            self._owners.pop(topic, None)
        if not self._is_silent(address):
            self._silent[address] = self.now_s()
        self._turn_from(address)
