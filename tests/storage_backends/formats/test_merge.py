"""What a merge keeps and drops, and what progress that names its sources says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage_backends.formats import bucket_format, format_errors, merge, position_bitmap
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import (
    BucketProgress,
    Progress,
    SubscriptionProgress,
)
from storage_backends.formats.merge import Merged, NotConserved, Source
from storage_backends.formats.position_bitmap import PositionBitmap, PositionSet
from storage_backends.formats.row_columns import Rows, id_hash, row_hash
from storage_backends.formats.segment import SegmentLimits
from tests._support import parts, state_machines
from tests.storage_backends.formats._support import examples

Position = tuple[int, int]
LIMITS = SegmentLimits(time_step_ms=1_000, rows_max=4, rows_min=2)
PAGE = 1 << 32


def source_of(
    name: str, rows: Rows, *, subscription_id: int = 0, kept: Sequence[KeptRows] = (), level: int = 0
) -> Source:
    encoded = bucket_format.encode_bucket(
        rows.sorted_by_due(), topic="t", subscription_id=subscription_id, limits=LIMITS, compatible=False, kept=kept
    )
    return read_back(name, encoded, subscription_id=subscription_id, level=level)


def read_back(name: str, encoded: bucket_format.EncodedBucket, *, subscription_id: int = 0, level: int = 0) -> Source:
    live = encoded.live_bucket(name, base=1, subscription_id=subscription_id, level=level)
    return Source(live, *bucket_format.decode_bucket(encoded.body))


def merged(
    sources: Sequence[Source], progress: Progress, *, subscription_id: int = 0, compatible: bool = False
) -> Merged:
    return merge.merged(
        sources, progress, topic="t", subscription_id=subscription_id, limits=LIMITS, compatible=compatible
    )


def positions_in(ledger_entries: Sequence[Position]) -> tuple[PositionBitmap, ...]:
    return position_bitmap.position_bitmaps(
        examples.column([ledger for ledger, _ in ledger_entries]),
        examples.column([entry for _, entry in ledger_entries]),
    )


def plain(positions: PositionSet | Sequence[PositionBitmap]) -> set[Position]:
    bitmaps = positions.bitmaps() if isinstance(positions, PositionSet) else positions
    ledger_id, entry_id = position_bitmap.positions_of(bitmaps)
    return set(zip(ledger_id.tolist(), entry_id.tolist(), strict=True))


def rows_at(*positions: Position, due_ms: int = 100) -> Rows:
    return Rows(
        examples.column([due_ms + number for number in range(len(positions))]),
        examples.column([ledger for ledger, _ in positions]),
        examples.column([entry for _, entry in positions]),
    )


def gone(**positions: Sequence[Position]) -> Progress:
    return Progress(
        buckets=tuple(BucketProgress(bucket=name, gone=positions_in(some)) for name, some in positions.items())
    )


def distinct(rows: Rows) -> Rows:
    """The first row of each position."""
    _, first = np.unique(np.stack([rows.ledger_id, rows.entry_id]), axis=1, return_index=True)
    return rows.take(np.sort(first))


def with_ids(rows: Rows, *ids: bytes) -> Rows:
    return dataclasses.replace(rows, schedule_ids=examples.ids_of(list(ids)))


def test_a_merge_keeps_each_id_with_its_row_and_drops_the_ids_of_rows_that_are_gone() -> None:
    first = with_ids(rows_at((1, 1), (1, 2), (1, 3)), b"one", b"", b"three")
    sources = [source_of("a", first), source_of("b", rows_at((2, 1), (2, 2), due_ms=100))]
    made = merged(sources, gone(a=[(1, 3)]), compatible=True)
    assert {row[1:3]: row[-1] for row in examples.tuples(made.rows)} == {
        (1, 1): b"one",
        (1, 2): b"",
        (2, 1): b"",
        (2, 2): b"",
    }
    assert made.dropped_id_hash == id_hash(first.take(slice(2, 3)))
    assert made.encoded is not None
    assert (made.encoded.id_rows, made.encoded.body[4]) == (1, 2)
    _, read = bucket_format.decode_bucket(made.encoded.body)
    assert examples.tuples(read) == examples.tuples(made.rows)


def test_a_merge_that_would_lose_or_exchange_ids_is_refused() -> None:
    rows = rows_at((1, 1), (1, 2))
    right = source_of("a", with_ids(rows, b"one", b"two"))
    for others in ((b"two", b"one"), (b"one", b""), (b"", b"")):
        wrong = dataclasses.replace(right, rows=with_ids(rows, *others))
        with pytest.raises(NotConserved, match="the schedule ids of the sources have hash"):
            merged([wrong, source_of("b", rows_at((2, 1)))], Progress())


@settings(max_examples=parts.examples(150))
@given(examples.rows(min_size=1), st.data())
def test_what_goes_into_a_merge_is_what_comes_out_and_what_is_dropped_together(rows: Rows, data: st.DataObject) -> None:
    rows = distinct(rows)
    owner = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))
    leaves = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    parts = {f"b{number}": rows.take(owner == number) for number in range(4)}
    left = {f"b{number}": rows.take((owner == number) & leaves) for number in range(4)}
    sources = [source_of(name, part) for name, part in parts.items() if len(part)]
    made = merged(
        sources,
        gone(**{name: [row[1:3] for row in examples.tuples(part)] for name, part in left.items()}),
        compatible=data.draw(st.booleans()),
    )
    expected = Rows.concat([source.rows for source in sources]).sorted_by_due()
    leaving = PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id[leaves], rows.entry_id[leaves]))
    keyed = expected.take(~leaving.mask_of(expected.ledger_id, expected.entry_id))
    assert examples.tuples(made.rows) == examples.tuples(keyed)
    assert {name: plain(positions) for name, positions in made.dropped.items()} == {
        source.name: {row[1:3] for row in examples.tuples(left[source.name])} for source in sources
    }
    assert made.dropped_hash == row_hash(rows.take(leaves))
    assert made.dropped_id_hash == id_hash(rows.take(leaves))
    assert {each.source: plain(each.positions) for each in made.kept} == {
        name: remaining
        for name in parts
        if (remaining := plain(source_positions(parts[name])) - plain(source_positions(left[name])))
    }
    assert (made.encoded is None) == (not len(made.rows))
    if made.encoded is not None:
        metadata, read = bucket_format.decode_bucket(made.encoded.body)
        assert examples.tuples(read) == examples.tuples(made.rows)
        assert metadata.positions == position_bitmap.position_bitmaps(read.ledger_id, read.entry_id)
        assert metadata.kept == made.kept


def source_positions(rows: Rows) -> PositionSet:
    return PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id))


class NestedMerges(RuleBasedStateMachine):
    """Buckets are sealed, rows leave and are acknowledged, adjacent buckets are merged, and progress names whatever
    bucket held the row at some time; a position that is gone may be sealed again in a later bucket.

    A row is known by the number it was sealed with, so that a merged bucket is a plain dict from positions to numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, Source] = {}
        self.held: dict[str, dict[Position, int]] = {}
        self.names_of: dict[int, list[str]] = {}
        self.position_of: dict[int, Position] = {}
        self.gone: set[int] = set()
        self.acknowledged: dict[int, set[int]] = {1: set(), 2: set()}
        # (bucket, subscription or 0 for gone, position), and how many there were at the last seal.
        self.told: list[tuple[str, int, Position]] = []
        self.told_at_seal = 0
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"b{self.names}"

    def progress(self, told: int | None = None) -> Progress:
        by_bucket: dict[str, dict[int, list[Position]]] = {}
        for name, subscription_id, position in self.told[:told]:
            by_bucket.setdefault(name, {}).setdefault(subscription_id, []).append(position)
        return Progress(
            buckets=tuple(
                BucketProgress(
                    bucket=name,
                    gone=positions_in(sets.get(0, [])),
                    acknowledged=tuple(
                        SubscriptionProgress(subscription_id=number, positions=positions_in(sets[number]))
                        for number in (1, 2)
                        if number in sets
                    ),
                )
                for name, sets in by_bucket.items()
            )
        )

    def waiting(self) -> list[int]:
        return sorted(number for held in self.held.values() for number in held.values() if number not in self.gone)

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        for _ in range(3):
            self.seal(data)

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        taken = {self.position_of[number] for number in self.waiting()}
        entries = st.one_of(st.integers(0, 11), st.integers(PAGE, PAGE + 3))
        drawn = data.draw(st.sets(st.tuples(st.integers(1, 3), entries), min_size=1, max_size=8))
        positions = sorted(drawn - taken)
        if not positions:
            return
        name = self.name()
        self.sources[name] = source_of(name, rows_at(*positions, due_ms=data.draw(st.integers(1, 50))))
        self.held[name] = {}
        for position in positions:
            number = len(self.names_of)
            self.held[name][position] = number
            self.names_of[number] = [name]
            self.position_of[number] = position
        self.told_at_seal = len(self.told)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), subscription_id=st.sampled_from([0, 0, 1, 2]))
    def leave(self, data: st.DataObject, subscription_id: int) -> None:
        number = data.draw(st.sampled_from(self.waiting()))
        name = data.draw(st.sampled_from(self.names_of[number]))
        self.told.append((name, subscription_id, self.position_of[number]))
        (self.acknowledged[subscription_id] if subscription_id else self.gone).add(number)

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        order = list(self.held)
        first = data.draw(st.integers(0, len(order) - 2))
        chosen = order[first : first + data.draw(st.integers(2, 3))]
        told = data.draw(st.integers(self.told_at_seal, len(self.told)))
        planned = self.progress(told)
        made = merged([self.sources[name] for name in chosen], planned)
        told_of = {(name, position) for name, number, position in self.told[:told] if number == 0}
        held = {
            position: number
            for name in chosen
            for position, number in self.held[name].items()
            if not any((former, position) in told_of for former in self.names_of[number])
        }
        assert {row[1:3] for row in examples.tuples(made.rows)} == set(held)
        assert made.level == 1 + max(self.sources[name].live.level for name in chosen)
        for name in chosen:
            del self.held[name], self.sources[name]
        if made.encoded is None:
            return
        merged_name = self.name()
        self.sources[merged_name] = read_back(merged_name, made.encoded, level=made.level)
        self.held = {merged_name: held, **self.held}
        for number in held.values():
            self.names_of[number].append(merged_name)

    @invariant()
    def progress_says_of_every_bucket_what_was_told_of_its_rows(self) -> None:
        progress = self.progress()
        for name, held in self.held.items():
            bits = merge.bits_of(name, self.sources[name].metadata.kept, progress)
            assert plain(bits.gone) == {position for position, number in held.items() if number in self.gone}
            assert {number: plain(positions) for number, positions in bits.acknowledged.items()} == {
                subscription_id: found
                for subscription_id, numbers in self.acknowledged.items()
                if (found := {position for position, number in held.items() if number in numbers})
            }


def test_merges_of_what_was_merged_keep_what_is_there_and_nothing_else() -> None:
    state_machines.run(NestedMerges, runs=60, steps=25)


A, B, C = (1, 1), (1, 2), (2, PAGE + 7)


def test_a_source_whose_rows_are_all_gone_is_dropped_and_not_kept() -> None:
    made = merged([source_of("a", rows_at(A, B)), source_of("b", rows_at(C))], gone(a=[A, B]))
    assert [(each.source, plain(each.positions)) for each in made.kept] == [("b", {C})]
    assert {name: plain(positions) for name, positions in made.dropped.items()} == {"a": {A, B}, "b": set()}


def test_when_no_row_is_left_there_is_no_bucket() -> None:
    sources = [source_of("a", rows_at(A, B)), source_of("b", rows_at(C))]
    made = merged(sources, gone(a=[A, B], b=[C]))
    assert (made.encoded, made.kept, len(made.rows)) == (None, (), 0)
    assert made.dropped_hash == row_hash(Rows.concat([source.rows for source in sources]))


def test_a_position_that_left_one_source_and_was_added_again_is_kept_from_the_other() -> None:
    made = merged([source_of("a", rows_at(A, B)), source_of("b", rows_at(A, due_ms=900))], gone(a=[A]))
    assert examples.tuples(made.rows) == [(101, *B, None), (900, *A, None)]
    bits = merge.bits_of("d", made.kept, gone(a=[A]))
    assert not bits.gone
    assert plain(merge.bits_of("d", made.kept, gone(a=[A], b=[A])).gone) == {A}


def test_a_position_that_two_sources_hold_is_refused() -> None:
    with pytest.raises(
        NotConserved, match=r"1 rows of bucket b are held by another source as well, .* ledger 2 page 1"
    ):
        merged([source_of("a", rows_at(A, C)), source_of("b", rows_at(B, C))], Progress())


def test_a_merged_bucket_has_the_key_hashes_of_its_sources() -> None:
    keyed = dataclasses.replace(rows_at(A), key_hash=np.array([7], np.uint32))
    made = merged([source_of("a", keyed), source_of("b", rows_at(B, due_ms=900))], Progress())
    assert examples.tuples(made.rows) == [(100, *A, 7), (900, *B, 0)]


def test_a_source_of_another_index_is_refused() -> None:
    sources = [source_of("a", rows_at(A), subscription_id=3), source_of("b", rows_at(B))]
    with pytest.raises(ValueError, match="bucket b is of index 0, not of 3"):
        merged(sources, Progress(), subscription_id=3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda source: dataclasses.replace(source, rows=source.rows.take(slice(1, 3))),
        lambda source: dataclasses.replace(source, rows=rows_at(A, B, (9, 9))),
        lambda source: dataclasses.replace(
            source, metadata=dataclasses.replace(source.metadata, positions=positions_in([A, B]))
        ),
        lambda source: dataclasses.replace(source, live=dataclasses.replace(source.live, rows=4)),
    ],
    ids=["a row is missing", "a row of another position", "a position is missing", "the manifest says more rows"],
)
def test_a_source_that_is_not_what_it_says_is_damaged(damage: Callable[[Source], Source]) -> None:
    source = source_of("a", rows_at(A, B, C))
    with pytest.raises(format_errors.FormatError, match=r"bucket a is damaged at byte 0: it has \d rows"):
        merged([damage(source), source_of("b", rows_at((5, 5)))], Progress())


def test_a_source_whose_hash_is_not_the_manifests_is_never_merged() -> None:
    source = source_of("a", rows_at(A))
    altered = dataclasses.replace(source, live=dataclasses.replace(source.live, hash_high=1))
    with pytest.raises(NotConserved, match="the rows of the sources have hash"):
        merged([altered, source_of("b", rows_at(B))], Progress())


def test_names_that_the_bucket_does_not_know_say_nothing_of_it() -> None:
    kept = (KeptRows(source="a", positions=positions_in([A])),)
    assert not merge.bits_of("d", kept, gone(x=[A])).gone


def test_what_is_told_of_a_source_counts_only_for_the_rows_that_were_copied() -> None:
    kept = (KeptRows(source="a", positions=positions_in([A])), KeptRows(source="b", positions=positions_in([B])))
    acknowledged = SubscriptionProgress(subscription_id=4, positions=positions_in([A, B]))
    progress = Progress(
        buckets=(
            BucketProgress(bucket="b", gone=positions_in([A, B, C])),
            BucketProgress(bucket="a", acknowledged=(acknowledged,)),
            BucketProgress(bucket="d", gone=positions_in([C])),
        )
    )
    bits = merge.bits_of("d", kept, progress)
    assert plain(bits.gone) == {B, C}
    assert {number: plain(positions) for number, positions in bits.acknowledged.items()} == {4: {A}}


def test_what_concerns_some_buckets_says_of_them_what_all_of_it_says() -> None:
    first = merged([source_of("a", rows_at(A, B)), source_of("b", rows_at(C))], gone(a=[A]))
    told = gone(a=[A, B], b=[C], d=[], x=[A, B, C])
    some = merge.concerning(told, [("d", first.kept), ("y", ())])
    assert [part.bucket for part in some.buckets] == ["a", "b", "d"]
    assert merge.bits_of("d", first.kept, some).gone == merge.bits_of("d", first.kept, told).gone
    assert plain(merge.bits_of("d", first.kept, some).gone) == {B, C}


def kept_of_sources_only(parts: Sequence[merge._Part]) -> tuple[KeptRows, ...]:
    """A name two merges old says nothing any more."""
    return tuple(KeptRows(source=part.source.name, positions=part.kept.bitmaps()) for part in parts)


def kept_as_it_was(parts: Sequence[merge._Part]) -> tuple[KeptRows, ...]:
    """What a source kept is carried on as it was, with what has been dropped since."""
    return (*kept_of_sources_only(parts), *(each for part in parts for each in part.source.metadata.kept))


def kept_whole(parts: Sequence[merge._Part]) -> tuple[KeptRows, ...]:
    """All positions of a source count as copied, those that were dropped included."""
    return tuple(KeptRows(source=part.source.name, positions=part.source.metadata.positions) for part in parts)


def within_everything(part: BucketProgress, within: PositionSet | None) -> merge.Bits:
    """What is told of a source counts for every row of that position."""
    return merge.Bits(PositionSet.of(part.gone), {})


def a_position_comes_back_twice() -> None:
    """A row leaves and is added again, before a merge and after it; progress goes on naming the first bucket."""
    first = merged([source_of("a", rows_at(A, B)), source_of("b", rows_at(A, due_ms=900))], gone(a=[A]))
    assert first.encoded is not None
    assert plain(merge.bits_of("d", first.kept, gone(a=[A])).gone) == set()
    told = gone(a=[A], b=[A])
    again = source_of("c", rows_at(A, C, due_ms=2_000))
    second = merged([read_back("d", first.encoded, level=1), again], told)
    assert len(second.rows) == 3
    assert plain(merge.bits_of("e", second.kept, told).gone) == set()
    later = gone(a=[A, B], b=[A])
    assert plain(merge.bits_of("e", second.kept, later).gone) == {B}


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("_kept", kept_of_sources_only),
        ("_kept", kept_as_it_was),
        ("_kept", kept_whole),
        ("_within", within_everything),
    ],
)
def test_a_planted_bug_of_a_merge_is_found(name: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    a_position_comes_back_twice()
    monkeypatch.setattr(merge, name, bug)
    with pytest.raises((AssertionError, NotConserved)):
        a_position_comes_back_twice()
