"""Adds of one row each that are decided together: what one numpy call costs, it costs for all of them.

Owns: the rows that wait for their decision, and telling each call when its row is durable.
Does not own: the decision (`daemon.core.adding`), other adds (`served_topic`), slots (`shard_staging`).

A call costs neither a task nor a wait for the slot here: one callback of the slot ends the futures of all its rows. A
row for which anything but "new" or "duplicate" may have to be said goes by itself.

| rows of this topic that are not durable yet | a row is decided |
|---|---|
| none | in this turn of the loop, with those of the same turn |
| some | with those that come after it, when for 1 ms none has come, or when it has waited for a tick, 15 ms at most |

So a slot is wanted less often, which is most of what a row costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from daemon.core.adding import ACCEPTED, DUPLICATE, AddBatch, AddOutcome, AddRow
from daemon.core.quotas import Caller
from daemon.errors import InvariantViolated, TarryError
from daemon.surroundings.environment import Environment
from daemon.topic_terms.topic_port import TopicPort
from daemon.topic_terms.topic_quotas import TopicQuotas
from storage_backends.formats.row_columns import Rows

log = logging.getLogger(__name__)

# Whether more rows come is looked at this often.
LOOK_S = 0.001
WAIT_MAX_S = 0.010


class TopicOfAdds(TopicPort, Protocol):
    """What adds that are decided together ask of their topic beside."""

    @property
    def quotas(self) -> TopicQuotas: ...

    async def add(
        self, batch: AddBatch, subscription: str | None = None, caller: Caller | None = None
    ) -> AddOutcome: ...

    def failing(self, kind: type[Exception]) -> contextlib.AbstractContextManager[None]:
        """Makes errors of one kind inside the topic's failure, and raises TopicFailed in their place."""
        ...


class _Waiting(NamedTuple):
    """A row that is to be decided, due at `deliver_at_ms`, and whoever waits for it."""

    row: AddRow
    deliver_at_ms: int
    caller: Caller
    answer: asyncio.Future[AddOutcome]


class JointAdds:
    """The adds of one topic that are decided together."""

    def __init__(self, topic: TopicOfAdds, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiting] = []
        # Of those, how many there were at the last look, when the next one is, and how long the first row may wait.
        self._seen = 0
        self._look_s = self._until_s = 0.0
        # Rows that are decided and not durable yet.
        self._on_their_way = 0

    def join(self, row: AddRow, caller: Caller) -> asyncio.Future[AddOutcome] | None:
        """Adds a row; the future ends as `ServedTopic.add` does. It may be cancelled: the row is added all the same.

        None: the row goes by itself, since its time has come or may not be.
        """
        now_ms = self._environment.clock.now_ms()
        deliver_at_ms = now_ms + (row.delay_ms or 0) if row.deliver_at_ms is None else row.deliver_at_ms
        if not now_ms < deliver_at_ms <= now_ms + self._topic.settings.request_limits.delay_max_ms:
            return None
        answer: asyncio.Future[AddOutcome] = self._loop.create_future()
        if not self._waiting:
            self._begin()
        self._waiting.append(_Waiting(row, deliver_at_ms, caller, answer))
        return answer

    def _begin(self) -> None:
        if not self._on_their_way:
            self._loop.call_soon(self._decide)
            return
        now_s = self._loop.time()
        self._until_s = now_s + WAIT_MAX_S
        self._look_later(now_s, 1)

    def _look_later(self, now_s: float, seen: int) -> None:
        self._seen, self._look_s = seen, now_s + LOOK_S
        self._loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        now_s, rows = self._loop.time(), len(self._waiting)
        # A loop that comes late to its look has more to do, and may not have come to the rows that are there.
        if now_s < self._until_s and (self._on_their_way or rows > self._seen or now_s > self._look_s + LOOK_S):
            self._look_later(now_s, rows)
        else:
            self._decide()

    def _decide(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            if not self._may_together(waiting):
                self._one_by_one(waiting)
                return
            with self._topic.failing(InvariantViolated):
                self._stage(waiting)
        except Exception as error:  # noqa: BLE001 - every caller is told
            _fail(waiting, error)

    def _may_together(self, waiting: Sequence[_Waiting]) -> bool:
        """Whether each of the rows is new or a duplicate, and nothing has to be waited for."""
        topic, core = self._topic, self._topic.core
        return (
            topic.gate.is_open
            and not topic.quotas.apply
            and not core.indexes.leaving
            and (topic.settings.shared_index or not core.subscriptions)
            and min(each.deliver_at_ms for each in waiting) > core.floor_ms
        )

    def _stage(self, waiting: Sequence[_Waiting]) -> None:
        topic = self._topic
        commits = topic.shard.commits
        commits.check_accepting()
        topic.check_room()
        record, accepted = topic.core.stage_rows(_rows_of(waiting))
        durable: asyncio.Future[int] | asyncio.Task[None]
        durable = asyncio.ensure_future(commits.confirmed()) if record is None else commits.stage(record)
        self._on_their_way += len(waiting)
        durable.add_done_callback(functools.partial(self._answer, waiting, accepted))

    def _answer(
        self, waiting: Sequence[_Waiting], accepted: npt.NDArray[np.bool_], durable: asyncio.Future[int | None]
    ) -> None:
        self._on_their_way -= len(waiting)
        # Who is answered now may come again.
        self._seen = 0
        if durable.cancelled():
            for each in waiting:
                each.answer.cancel()
            return
        error = durable.exception()
        if error is not None:
            _fail(waiting, error)
            return
        rows = int(np.count_nonzero(accepted))
        self._environment.metrics.added(
            self._topic.core.name, accepted=rows, duplicates=len(waiting) - rows, returned=0, late_on_arrival=0
        )
        for each, is_new in zip(waiting, accepted.tolist(), strict=True):
            if not each.answer.done():
                each.answer.set_result(ACCEPTED if is_new else DUPLICATE)

    def _one_by_one(self, waiting: Sequence[_Waiting]) -> None:
        for each in waiting:
            asyncio.ensure_future(self._by_itself(each)).add_done_callback(functools.partial(_tell, each))

    async def _by_itself(self, waiting: _Waiting) -> AddOutcome:
        with self._topic.failing(InvariantViolated):
            return await self._topic.add(waiting.row.batch(), None, waiting.caller)


def _rows_of(waiting: Sequence[_Waiting]) -> Rows:
    key_hash = [each.row.key_hash or 0 for each in waiting]
    return Rows(
        np.array([each.deliver_at_ms for each in waiting], np.uint64),
        np.array([each.row.ledger_id for each in waiting], np.uint64),
        np.array([each.row.entry_id for each in waiting], np.uint64),
        np.array(key_hash, np.uint32) if any(each.row.key_hash is not None for each in waiting) else None,
    )


def _tell(waiting: _Waiting, adding: asyncio.Future[AddOutcome]) -> None:
    if adding.cancelled():
        waiting.answer.cancel()
    elif (error := adding.exception()) is not None:
        _fail([waiting], error)
    elif not waiting.answer.done():
        waiting.answer.set_result(adding.result())


def _fail(waiting: Sequence[_Waiting], error: BaseException) -> None:
    for each in waiting:
        if not each.answer.done():
            each.answer.set_exception(error)
        else:
            level = logging.INFO if isinstance(error, TarryError) else logging.ERROR
            log.log(level, "an add that nobody waits for any longer failed: %r", error)
