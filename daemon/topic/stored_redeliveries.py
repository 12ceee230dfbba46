"""Negative acknowledgements, dead letters and delay levels, between their form in memory and their stored form.

Owns: that translation, both ways.
Does not own: where it is written (`sealing`, `checkpoint_parts`), what it means
(`daemon.core.decisions.nack_decisions`), and the bytes of the columns (`storage_backends.formats.redelivery_columns`).

What is stored of an index that is no more, or of positions that have no row any more, is left out when it is read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import numpy as np
import zstandard
from pyroaring import BitMap64

from daemon.core.backlog.dead_letter_rows import DeadLetterRows, FrozenDeadLetters
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.decisions.redelivery_cut import RedeliveryCut, SubscriptionCut
from daemon.core.decisions.topic import Topic
from daemon.core.index.positions import UNKNOWN_KEY, KeyedRows, PageTable, bitmap_of, keys_of, ordinals_of, pages_of
from daemon.errors import Corruption
from storage_backends.formats import format_errors, index_ids, manifest, redelivery_columns, segment
from storage_backends.formats.row_columns import U64

# ---- writing


def to_stored(
    pages: PageTable, cut: RedeliveryCut
) -> tuple[tuple[manifest.Redeliveries, ...], tuple[manifest.LevelRows, ...]]:
    """What progress says of the cut. `pages`: of any of the topic's indexes. O(n): runs in an executor."""
    zstd = segment.compressor()
    by_id = sorted(cut.subscriptions, key=operator.attrgetter("subscription_id"))
    redeliveries = (_redeliveries(pages, each, zstd) for each in by_id)
    return tuple(each for each in redeliveries if each is not None), _levels(pages, cut.levels)


def _redeliveries(
    pages: PageTable, cut: SubscriptionCut, zstd: zstandard.ZstdCompressor
) -> manifest.Redeliveries | None:
    """None when there is nothing to say."""
    stored = manifest.Redeliveries(
        subscription_id=cut.subscription_id,
        nacked=_nacked(pages, cut.nacked, zstd),
        counts=tuple(
            manifest.CountPlane(index_id=index_id, bit=bit, positions=pages.to_stored(keys))
            for bit, plane in enumerate(cut.planes)
            for index_id, keys in _by_index(pages, plane)
        ),
        dead_letters=_dead_letters(cut.dead_letters, zstd),
        last_dead_letter_id=cut.last_dead_letter_id,
    )
    return None if stored == manifest.Redeliveries(subscription_id=cut.subscription_id) else stored


def _nacked(pages: PageTable, frozen: FrozenNacks, zstd: zstandard.ZstdCompressor) -> tuple[manifest.NackedRows, ...]:
    rows, times = frozen.rows()
    owners = pages.places.owners(rows.keys)
    stored = []
    for owner in np.unique(owners).tolist():
        here = owners == np.uint64(owner)
        stored.append(redelivery_columns.encode_nacked(owner, rows.rows.take(here), times[here], zstd))
    return tuple(stored)


def _dead_letters(frozen: FrozenDeadLetters, zstd: zstandard.ZstdCompressor) -> manifest.DeadLetters | None:
    rows = frozen.rows()
    if not len(rows):
        return None
    columns = redelivery_columns.DeadLetterColumns(
        rows.dead_letter_id,
        rows.ledger_id,
        rows.entry_id,
        rows.batch_index,
        rows.deliver_at_ms,
        rows.key_hash,
        rows.redelivery_count,
        rows.dead_at_ms,
        rows.reason,
        rows.text_index,
        rows.texts,
    )
    return redelivery_columns.encode_dead_letters(columns, zstd)


def _levels(pages: PageTable, levels: Iterable[tuple[int, int, BitMap64]]) -> tuple[manifest.LevelRows, ...]:
    """A level of an index may come several times, with other positions."""
    joined: dict[tuple[int, int], list[BitMap64]] = {}
    for index_id, level, keys in levels:
        if keys:
            joined.setdefault((index_id, level), []).append(keys)
    return tuple(
        manifest.LevelRows(index_id=index_id, delay_level=level, positions=pages.to_stored(BitMap64.union(*sets)))
        for (index_id, level), sets in sorted(joined.items(), key=lambda item: item[0])
    )


def _by_index(pages: PageTable, keys: BitMap64) -> Iterator[tuple[int, BitMap64]]:
    """The keys of each index that the set has any of, by index id."""
    owners = np.unique(pages.places.owners_of(ordinals_of(pages_of(keys))))
    if len(owners) < 2:
        yield from ((owner, keys) for owner in owners.tolist())
        return
    listed = keys_of(keys)
    owner_of = pages.places.owners(listed)
    for owner in owners.tolist():
        yield owner, bitmap_of(listed[owner_of == np.uint64(owner)])


# ---- reading


def restore(topic: Topic, progress: manifest.Progress) -> None:
    """Puts what progress says into a topic that has its rows. Raises Corruption."""
    for stored in progress.redeliveries:
        if stored.subscription_id not in topic.subscriptions:
            continue
        try:
            nacked, times = _nacked_of(topic, stored)
            dead_letters = _dead_letters_of(stored)
        except format_errors.FormatError as error:
            raise Corruption(f"progress of subscription {stored.subscription_id}: {error}") from error
        planes = _planes_of(topic, stored)
        topic.redelivery.restore(
            stored.subscription_id, nacked, times, planes, dead_letters, stored.last_dead_letter_id
        )
    for level in progress.levels:
        index = topic.indexes.get(level.index_id)
        if index is not None:
            index.levels.restore(level.delay_level, index.pages.find_stored(level.positions))


def _nacked_of(topic: Topic, stored: manifest.Redeliveries) -> tuple[KeyedRows, U64]:
    """Those of pages that are known, and when they come back."""
    parts, times = [], [np.empty(0, np.uint64)]
    for each in stored.nacked:
        rows, redeliver_at_ms = redelivery_columns.decode_nacked(each)
        pages = _pages(topic, stored.subscription_id, each.index_id)
        if pages is None:
            continue
        found = pages.keyed(rows)
        known = found.keys != UNKNOWN_KEY
        parts.append(found.take(known))
        times.append(redeliver_at_ms[known])
    return KeyedRows.concat(parts), np.concatenate(times)


def _planes_of(topic: Topic, stored: manifest.Redeliveries) -> list[BitMap64]:
    planes = [BitMap64() for _ in range(1 + max((each.bit for each in stored.counts), default=-1))]
    for each in stored.counts:
        pages = _pages(topic, stored.subscription_id, each.index_id)
        if pages is not None:
            planes[each.bit] |= pages.find_stored(each.positions)
    return planes


def _dead_letters_of(stored: manifest.Redeliveries) -> DeadLetterRows:
    if stored.dead_letters is None:
        return DeadLetterRows.empty()
    return DeadLetterRows(*redelivery_columns.decode_dead_letters(stored.dead_letters))


def _pages(topic: Topic, subscription_id: int, index_id: int) -> PageTable | None:
    """The pages of an index that serves the subscription, if there is one."""
    index = topic.indexes.get(index_id) if index_ids.serves(index_id, subscription_id) else None
    return None if index is None else index.pages
