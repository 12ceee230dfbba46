"""Delay levels of the engine in memory: tables of topics, and what a request's levels mean."""

from __future__ import annotations

import abc

from daemon import call_values, config
from daemon.core import limits
from daemon.core.decisions import add_decisions
from daemon.core.decisions.add_decisions import AddBatch, Refused
from daemon.core.index import delay_levels
from daemon.core.index.delay_levels import DelayLevels
from storage_backends.formats.manifest import TopicDelayLevels
from storage_backends.formats.row_columns import U64
from tests._support.fake_topic import Topic


class FakeLevels(abc.ABC):
    """The calls on delay levels. `tables`: of topics that have one; of no row it is kept by which level it came."""

    settings: config.Config
    topics: dict[str, Topic]
    tables: dict[str, TopicDelayLevels]

    @abc.abstractmethod
    def _topic(self, topic: str) -> Topic: ...

    @abc.abstractmethod
    def _topic_to_write(self, topic: str) -> Topic: ...

    @abc.abstractmethod
    def _check_names(self, topic: str, subscription: str | None = None) -> None: ...

    @abc.abstractmethod
    async def _begin(self) -> int: ...

    def levels_of(self, topic: str) -> DelayLevels:
        return self._read(self.tables.get(topic))

    def _read(self, table: TopicDelayLevels | None) -> DelayLevels:
        if table is None:
            return self.settings.read_delay_levels()
        return delay_levels.parse(table.table, clamp=table.clamp, delay_max_ms=self.settings.limits.delay_max_ms)

    def delays_of(self, topic: str, batch: AddBatch) -> U64 | None:
        """The delays of a request to add, None where it has none."""
        if batch.delay_level is None:
            return batch.delay_ms
        delay_ms = self.levels_of(topic).delays_of(batch.delay_level)
        limits.check_delay("the delay of delay_level", delay_ms, self.settings.limits.delay_max_ms)
        return delay_ms

    def refused_of(self, topic: str, batch: AddBatch, now_ms: int) -> Refused:
        """The rows of a request to add that it has returned since they are invalid."""
        if not batch.return_invalid:
            return Refused.nothing()
        return add_decisions.refused_rows(
            batch.deliver_at_ms,
            batch.delay_ms,
            batch.delay_level,
            now_ms=now_ms,
            delay_max_ms=self.settings.limits.delay_max_ms,
            levels=self.levels_of(topic),
        )

    async def set_delay_levels(self, topic: str, table: TopicDelayLevels | None) -> DelayLevels:
        await self._begin()
        self._check_names(topic)
        levels = self._read(table)
        self._topic_to_write(topic)
        self.tables.pop(topic, None)
        if table is not None:
            self.tables[topic] = table
        return levels

    async def delay_levels(self, topic: str) -> call_values.TopicLevels:
        await self._begin()
        if topic:
            self._topic(topic)
        return call_values.TopicLevels(self.levels_of(topic), of_topic=topic in self.tables, pending=())
