"""What a listing comes to: pairing in any order, what metadata claims, counts, the guard."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.deletions import ledger_metadata as metadata_of_ledgers
from daemon.core.deletions import orphans
from daemon.core.deletions.ledger_metadata import OffloadedName
from daemon.core.deletions.orphans import Finding, Guard, LedgerClaim, ListedLedger, ListedPage, Pairing, Tally
from daemon.core.garbage_rules import ObjectCount
from daemon.errors import QuotaExceeded
from storage_backends.formats.deletion_format import LedgerComponent, LedgerType, OffloadContext, PendingDelete
from storage_backends.object_store import ListedObject

PLACE = OffloadContext(0, 0, "aws-s3", (("bucket", "offloaded"),))


def name(ledger_id: int) -> OffloadedName:
    return OffloadedName(0x1111_2222_3333_4444, 0x5555_6666_7777_8888 + ledger_id, ledger_id)


def data(ledger_id: int, size_bytes: int = 100, modified_ms: int = 1_000) -> ListedObject:
    return ListedObject(name(ledger_id).data, size_bytes, modified_ms)


def index(ledger_id: int, size_bytes: int = 10, modified_ms: int = 1_000) -> ListedObject:
    return ListedObject(name(ledger_id).index, size_bytes, modified_ms)


def topics_metadata(topic: str = "t", **more: str) -> Mapping[str, str]:
    return {"application": "pulsar", "component": "managed-ledger", "pulsar-managed-ledger": topic, **more}


# ---- ledgers of a listing


def test_two_objects_of_a_page_are_one_ledger_with_the_age_of_the_younger() -> None:
    page = ListedPage.of([index(1, 10, 2_000), data(1, 100, 1_000)])

    assert page.ledgers == (ListedLedger(name(1), True, True, 110, 2_000),)


def test_a_page_counts_all_and_what_is_no_offloaded_ledgers() -> None:
    page = ListedPage.of([data(1), ListedObject("archive/" + name(2).data, 7, 0), ListedObject("readme", 3, 0)])

    assert page.listed == ObjectCount(3, 110)
    assert page.foreign == ObjectCount(2, 10)
    assert [each.name for each in page.ledgers] == [name(1)]


@pytest.mark.parametrize("seed", range(20))
def test_ledgers_are_whole_in_whatever_order_and_pages_their_objects_are_listed(seed: int) -> None:
    entries = [entry for ledger_id in range(1, 200) for entry in (data(ledger_id), index(ledger_id))]
    entries += [data(500), index(501)]
    chance = random.Random(seed)
    chance.shuffle(entries)

    whole, halves = listed(entries, chance)

    assert sorted(each.name.ledger_id for each in whole) == list(range(1, 200))
    assert all(each.swept == ObjectCount(2, 110) for each in whole)
    assert sorted((each.name.ledger_id, each.has_data, each.has_index) for each in halves) == [
        (500, True, False),
        (501, False, True),
    ]


def test_an_object_that_is_listed_twice_counts_once() -> None:
    pairing = Pairing()
    once = ListedPage.of([data(1), data(1)])
    assert once.ledgers == (ListedLedger(name(1), True, False, 100, 1_000),)

    assert pairing.add(once.ledgers) == []
    assert pairing.add(ListedPage.of([data(1)]).ledgers) == []

    assert pairing.add(ListedPage.of([index(1)]).ledgers) == [ListedLedger(name(1), True, True, 110, 1_000)]
    assert list(pairing.rest(10)) == []


def test_a_whole_ledger_of_which_half_was_seen_before_counts_once() -> None:
    pairing = Pairing()
    pairing.add(ListedPage.of([data(1)]).ledgers)

    assert pairing.add(ListedPage.of([data(1), index(1)]).ledgers) == [ListedLedger(name(1), True, True, 110, 1_000)]


def test_too_many_halves_end_the_sweep_before_memory_does() -> None:
    pairing = Pairing(waiting_max=3)
    pairing.add(ListedPage.of([data(1), data(2), data(3)]).ledgers)
    pairing.add(ListedPage.of([index(1), data(4)]).ledgers)

    with pytest.raises(QuotaExceeded, match="more than 3 ledgers"):
        pairing.add(ListedPage.of([data(5)]).ledgers)


def test_what_is_left_comes_in_portions_and_once() -> None:
    pairing = Pairing()
    pairing.add(ListedPage.of([data(ledger_id) for ledger_id in range(7)]).ledgers)

    assert [len(portion) for portion in pairing.rest(3)] == [3, 3, 1]
    assert list(pairing.rest(3)) == []


def listed(entries: Sequence[ListedObject], chance: random.Random) -> tuple[list[ListedLedger], list[ListedLedger]]:
    """Whole ledgers and halves, listed in pages of any size."""
    pairing, whole = Pairing(), []
    for page in pages(entries, chance):
        whole += pairing.add(ListedPage.of(page).ledgers)
    return whole, [half for portion in pairing.rest(10) for half in portion]


def pages(entries: Sequence[ListedObject], chance: random.Random) -> Iterator[Sequence[ListedObject]]:
    start = 0
    while start < len(entries):
        size = chance.randint(1, 50)
        yield entries[start : start + size]
        start += size


# ---- age


@pytest.mark.parametrize(("modified_ms", "young"), [(8_999, False), (9_000, False), (9_001, True), (99_000, True)])
def test_a_ledger_is_young_until_the_grace_is_over(modified_ms: int, young: bool) -> None:
    assert orphans.is_young(ListedLedger(name(1), True, True, 1, modified_ms), 10_000, 1_000) is young


def test_a_pair_of_which_one_half_is_young_is_young() -> None:
    (ledger,) = ListedPage.of([data(1, modified_ms=0), index(1, modified_ms=9_500)]).ledgers

    assert orphans.is_young(ledger, 10_000, 1_000)


# ---- what metadata claims

WHOLE = ListedLedger(name(7), True, True, 110, 0)
DATA_ALONE = ListedLedger(name(7), True, False, 100, 0)
INDEX_ALONE = ListedLedger(name(7), False, True, 10, 0)


def test_a_claim_is_what_would_be_recorded() -> None:
    context = OffloadContext(name(7).uuid_msb, name(7).uuid_lsb, "aws-s3", (("bucket", "offloaded"),))

    found = claim_of(WHOLE, topics_metadata(), topics_metadata())

    delete = PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.OFFLOADED_LEDGER, 7, offload_context=context)
    assert found == LedgerClaim("t", delete)


def test_the_ledger_of_a_cursor_is_claimed_as_such() -> None:
    metadata = topics_metadata(**{"pulsar-cursor": "departures"})

    found = claim_of(WHOLE, metadata, metadata)

    assert isinstance(found, LedgerClaim)
    assert (found.pending_delete.component, found.pending_delete.cursor_name) == (
        LedgerComponent.MANAGED_CURSOR,
        "departures",
    )


def test_a_ledger_under_pulsars_own_name_is_claimed_for_the_topic() -> None:
    metadata = topics_metadata("tenant/space/persistent/flights")

    found = claim_of(WHOLE, metadata, metadata)

    assert isinstance(found, LedgerClaim)
    assert found.topic == "persistent://tenant/space/flights"


def claim_of(
    ledger: ListedLedger, of_data: Mapping[str, str] | None, of_index: Mapping[str, str] | None
) -> LedgerClaim | Finding:
    return orphans.claim_of(ledger, of_data, of_index, PLACE, topic_bytes_max=1_024)


SCHEMA = {"application": "pulsar", "component": "schema", "pulsar-schemaid": "tenant/space/flights"}


@pytest.mark.parametrize(
    ("of_data", "of_index"),
    [
        ({}, {}),
        (topics_metadata(), {}),
        ({}, topics_metadata()),
        (topics_metadata("t"), topics_metadata("other")),
        (topics_metadata(), topics_metadata(**{"pulsar-cursor": "departures"})),
        (topics_metadata(application="kafka"), topics_metadata(application="kafka")),
        (topics_metadata(""), topics_metadata("")),
        (topics_metadata("x" * 1_025), topics_metadata("x" * 1_025)),
        (topics_metadata(**{"pulsar-cursor": "c" * 256}), topics_metadata(**{"pulsar-cursor": "c" * 256})),
        (SCHEMA, SCHEMA),
    ],
    ids=[
        "no metadata",
        "none on the index",
        "none on the data",
        "of two topics",
        "of two components",
        "of another application",
        "an empty name",
        "a name that cannot be recorded",
        "a cursor that cannot be recorded",
        "a schema, which names no topic",
    ],
)
def test_objects_that_do_not_say_whose_they_are_are_not_identified(
    of_data: Mapping[str, str], of_index: Mapping[str, str]
) -> None:
    assert claim_of(WHOLE, of_data, of_index) is Finding.UNIDENTIFIED


@given(
    st.dictionaries(
        st.sampled_from(["application", "component", "pulsar-managed-ledger", "pulsar-cursor", "pulsar-schemaid"]),
        st.one_of(st.sampled_from(["pulsar", "managed-ledger", "schema", "t/n/persistent/%ff", "%", ""]), st.text()),
    )
)
def test_whatever_somebody_wrote_into_metadata_is_a_claim_or_none(metadata: Mapping[str, str]) -> None:
    found = claim_of(WHOLE, metadata, metadata)

    if isinstance(found, LedgerClaim):
        assert metadata_of_ledgers.mismatch(found.topic, found.pending_delete, metadata) is None
    else:
        assert found is Finding.UNIDENTIFIED


def test_an_object_without_its_other_half_is_claimed_by_what_it_says() -> None:
    assert isinstance(claim_of(DATA_ALONE, topics_metadata(), None), LedgerClaim)
    assert isinstance(claim_of(INDEX_ALONE, None, topics_metadata()), LedgerClaim)


def test_a_half_that_came_after_the_listing_makes_the_ledger_young() -> None:
    assert claim_of(DATA_ALONE, topics_metadata(), topics_metadata()) is Finding.YOUNG
    assert claim_of(INDEX_ALONE, topics_metadata(), topics_metadata()) is Finding.YOUNG
    assert claim_of(DATA_ALONE, None, topics_metadata()) is Finding.YOUNG


def test_what_vanished_since_the_listing_is_gone_and_half_of_it_is_what_is_left() -> None:
    assert claim_of(WHOLE, None, None) is Finding.GONE
    assert isinstance(claim_of(WHOLE, topics_metadata(), None), LedgerClaim)


# ---- the guard


@pytest.mark.parametrize(
    ("found", "listed_bytes", "refused"),
    [
        (1_000, 1_000, False),
        (1_001, 1_001, True),
        (1_001, 5_004, True),
        (1_001, 5_005, False),
        (0, 0, False),
    ],
    ids=["within the bytes", "all of it", "just above a fifth", "a fifth", "nothing"],
)
def test_orphans_above_both_limits_are_refused(found: int, listed_bytes: int, refused: bool) -> None:
    guard = Guard(share=0.2, size_bytes=1_000)

    assert bool(guard.refusal(ObjectCount(3, found), ObjectCount(9, listed_bytes))) is refused


def test_a_refusal_says_how_much_was_found_and_what_the_limits_are() -> None:
    text = Guard(share=0.2, size_bytes=1_000).refusal(ObjectCount(3, 1_500), ObjectCount(9, 2_000))

    for figure in ("3 orphaned objects", "1500 bytes", "0.2", "2000 bytes", "1000 bytes"):
        assert figure in text


# ---- counts


def test_everything_found_counts_under_its_own_name_and_what_is_gone_under_none() -> None:
    tally = Tally()
    tally.listed(ListedPage.of([data(1), ListedObject("readme", 3, 0)]))
    findings = [finding for finding in Finding if finding is not Finding.GONE]
    for number, finding in enumerate(findings, 1):
        tally.found(finding, ObjectCount(number, 10 * number))
    tally.found(Finding.GONE, ObjectCount(99, 99))

    counts = tally.counts()

    assert counts.listed == ObjectCount(2, 103)
    assert counts.foreign == ObjectCount(1, 3)
    for number, finding in enumerate(findings, 1):
        assert getattr(counts, finding.value) == ObjectCount(number, 10 * number)
