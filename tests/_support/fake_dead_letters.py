"""The calls on dead letters of the engine that is all in memory."""

from __future__ import annotations

import abc
from collections.abc import Callable

import numpy as np

from daemon import call_values, config, errors
from daemon.core import limits
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter, DeadLetterRows
from daemon.topic import topic_dead_letters
from tests._support.fake_topic import DeadLetter, Subscription


class FakeDeadLetters(abc.ABC):
    """Looking at them, delivering them again, forgetting them."""

    settings: config.Config
    now_ms: Callable[[], int]

    @abc.abstractmethod
    def find(self, topic: str, subscription: str) -> Subscription: ...

    @abc.abstractmethod
    async def _begin(self) -> int: ...

    async def list_dead_letters(
        self, topic: str, subscription: str, asked: DeadLetterFilter, page_size: int, after_id: int
    ) -> call_values.DeadLetterPage:
        now_ms = await self._begin()
        known, chosen = self._chosen(topic, subscription, asked)
        size = limits.page_rows(page_size)
        rest = [number for number in chosen if number > after_id]
        page = rest[:size]
        return call_values.DeadLetterPage(
            rows=_columns({number: known.dead_letters[number] for number in page}),
            next_after=page[-1] if len(rest) > size else None,
            as_of_ms=now_ms,
        )

    async def replay_dead_letters(
        self, topic: str, subscription: str, asked: DeadLetterFilter, delay_ms: int
    ) -> call_values.Replayed:
        now_ms = await self._begin()
        known, chosen = self._chosen(topic, subscription, asked)
        delay_max_ms = self.settings.limits.delay_max_ms
        if delay_ms > delay_max_ms:
            raise errors.DelayTooLong(f"delay_ms is {delay_ms}, the limit is {delay_max_ms}")
        replayed = sum(known.replay(number, now_ms + delay_ms) for number in chosen)
        known.wake()
        return call_values.Replayed(replayed, len(chosen) - replayed)

    async def purge_dead_letters(self, topic: str, subscription: str, asked: DeadLetterFilter) -> int:
        await self._begin()
        known, chosen = self._chosen(topic, subscription, asked)
        for number in chosen:
            del known.dead_letters[number]
        return len(chosen)

    def _chosen(self, topic: str, subscription: str, asked: DeadLetterFilter) -> tuple[Subscription, list[int]]:
        topic_dead_letters.check_filter(asked, ids_max=self.settings.limits.rows_per_request_max)
        known = self.find(topic, subscription)
        return known, [number for number, letter in known.dead_letters.items() if _is_asked_for(asked, number, letter)]


def _is_asked_for(asked: DeadLetterFilter, number: int, letter: DeadLetter) -> bool:
    first, last = asked.ledgers or (0, (1 << 64) - 1)
    return (
        (asked.ids is None or number in asked.ids.tolist())
        and first <= letter.row[1] <= last
        and asked.reason in (None, letter.reason)
        and (asked.from_ms or 0) <= letter.dead_at_ms
        and (asked.until_ms is None or letter.dead_at_ms < asked.until_ms)
    )


def _columns(letters: dict[int, DeadLetter]) -> DeadLetterRows:
    texts = sorted({"", *(letter.text for letter in letters.values())})
    return DeadLetterRows(
        dead_letter_id=np.array([*letters], np.uint64),
        ledger_id=np.array([letter.row[1] for letter in letters.values()], np.uint64),
        entry_id=np.array([letter.row[2] for letter in letters.values()], np.uint64),
        batch_index=np.array([letter.batch_index for letter in letters.values()], np.uint32),
        deliver_at_ms=np.array([letter.row[0] for letter in letters.values()], np.uint64),
        key_hash=np.array([letter.key_hash for letter in letters.values()], np.uint32),
        redelivery_count=np.array([letter.redelivery_count for letter in letters.values()], np.uint32),
        dead_at_ms=np.array([letter.dead_at_ms for letter in letters.values()], np.uint64),
        reason=np.array([letter.reason for letter in letters.values()], np.uint8),
        text_index=np.array([texts.index(letter.text) for letter in letters.values()], np.uint32),
        texts=tuple(texts),
    )
