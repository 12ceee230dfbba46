"""One position of a topic, and every request that may name a hand-out of it: what each came to, in one word."""

from __future__ import annotations

from daemon.core.decisions.claims import Ignored, IgnoredReason
from daemon.core.decisions.nack_decisions import NackBatch
from tests.daemon.core._support import nacking
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, batch_of, claims_of, listed
from tests.daemon.core._support.oracle import Claim

P = (7, 1)
START_MS = 1_000_000
DELAY_MS = 100
DONE = "done"


class OnePosition:
    """`time_ms`: what the position was handed out with. A method that names a hand-out by its `count` answers with
    `DONE`, or with the reason for which it was ignored. `staged`: requests are not durable before `commit`.
    """

    def __init__(self, *, max_count: int | None = None) -> None:
        self.topic = JournaledTopic(now_ms=START_MS)
        self.state = self.topic.create_subscription()
        self.max_count = max_count
        self.time_ms = START_MS
        self._dispatchers = 0
        self.open()

    def open(self) -> None:
        self._dispatchers += 1
        self.topic.core.open(self.state, self._dispatchers)

    def add(self, *, time_ms: int | None = None, at: Position = P) -> None:
        self.topic.stage_add(batch_of([at], deliver_at_ms=[self.time_ms if time_ms is None else time_ms]))
        self.topic.commit()

    def handed_out(self) -> list[tuple[Position, int, int]]:
        """(position, time, count) of what comes."""
        found = []
        for rows in self.topic.drain(self.state, self._dispatchers):
            for (time_ms, ledger, entry), count in zip(listed(rows), rows.counts().tolist(), strict=True):
                found.append(((ledger, entry), time_ms, count))
        return found

    def comes(self, count: int) -> None:
        """H: it comes by that name, and nothing else does."""
        assert self.handed_out() == [(P, self.time_ms, count)]

    def nothing_comes(self) -> None:
        self.topic.now_ms += 10**9
        assert self.handed_out() == []

    def later(self) -> None:
        self.topic.now_ms += DELAY_MS

    # ---- requests

    def ack(
        self, count: int | None, *, time_ms: int | None = None, part: int | None = None, commit: bool = True
    ) -> str:
        claims = claims_of([Claim(P, self.time_ms if time_ms is None else time_ms, part, count)])
        core, state = self.topic.core, self.state
        assert not core.redelivery.is_staged(state, claims)
        records, rest = core.acknowledging.stage(state, claims)
        self.topic.pass_all()
        found = self.topic.find_in_backlog(state, rest)
        more, rest = core.acknowledging.stage_found(state, rest, found)
        for record in (*records, *more):
            self.topic.staged.append(record)
        return self._said(core.why_ignored(state, rest, found, now_ms=self.topic.now_ms), commit)

    def waits_for_what_is_staged(self) -> bool:
        """Whether a forwarded negative acknowledgement is decided later."""
        return self.topic.core.redelivery.is_staged(self.state, claims_of([Claim(P, self.time_ms)]), is_forwarded=True)

    def nack(
        self,
        count: int | None,
        *,
        time_ms: int | None = None,
        part: int | None = None,
        forwarded: bool = True,
        reject: bool = False,
        commit: bool = True,
    ) -> str:
        claims = claims_of([Claim(P, self.time_ms if time_ms is None else time_ms, part, count)])
        redelivery, state = self.topic.core.redelivery, self.state
        terms = nacking.terms(self.topic.now_ms, delay_ms=DELAY_MS, max_count=self.max_count)
        nack = NackBatch(claims, reject=reject, forwarded=forwarded)
        assert not redelivery.is_staged(state, claims, is_forwarded=bool(nack.may_get_rows.any()))
        records, left = redelivery.stage(state, nack, terms)
        ignored = Ignored.nothing()
        if len(left):
            self.topic.pass_all()
            found = self.topic.find_in_backlog(state, redelivery.positions_to_find(state, left), any_time=True)
            more, ignored = redelivery.stage_found(state, left, found, terms)
            records = (*records, *more)
        for record in records:
            self.topic.staged.append(record)
        return self._said(ignored, commit)

    def times_out(self) -> None:
        """X: the ack time-out of what is in flight is over."""
        terms = nacking.terms(self.topic.now_ms, delay_ms=DELAY_MS, max_count=self.max_count)
        for record in self.topic.core.redelivery.stage_overdue(self.state, self.topic.elapsed_ms, terms, limit=9):
            self.topic.staged.append(record)
        self.topic.commit()

    def _said(self, ignored: Ignored, commit: bool) -> str:
        if commit:
            self.topic.commit()
        return IgnoredReason(int(ignored.reason[0])).name if len(ignored) else DONE

    def commit(self) -> None:
        self.topic.commit()

    # ---- what happens besides

    def stream_ends(self) -> None:
        """S: what it holds is READY, for another one that listens."""
        ended = self._dispatchers
        self.open()
        self.state.close(ended)

    def takeover(self) -> None:
        """K: another daemon has what is durable; what was staged is lost."""
        self.topic.crash_and_recover()
        self.state = self.topic.core.subscriptions[1]
        self.open()

    def is_held_again(self, count: int) -> bool:
        """Whether a dispatcher that declares a hand-out goes on with it."""
        self.topic.pass_all()
        claimed = self.topic.claimed(self.state, claims_of([Claim(P, self.time_ms, None, count)]))
        return bool(self.topic.core.hold(self.state, self._dispatchers, claimed.rows).any())

    @property
    def waits_with(self) -> int | None:
        """The count of the position while it is NACKED."""
        rows, _ = self.state.nacks.freeze().rows()
        counts = self.state.counts.of(rows.keys)
        return None if counts is None else int(counts[0])
