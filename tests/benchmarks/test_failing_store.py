"""The store that fails now and then: which requests fail, and how each is noted."""

from __future__ import annotations

from collections import Counter

from benchmarks.failing_store import UNAVAILABLE, FailingStore, Faults
from benchmarks.takeover import of_takeover
from tests._support.lost_answer_proxy import Asked, Loss

LOG, SHARD = "logs/01/", "shards/00/manifest/"


def get(key: str) -> Asked:
    return Asked("GET", f"/bucket/{key}", False)


def listing(prefix: str) -> Asked:
    return Asked("GET", f"/bucket?list-type=2&prefix={prefix.replace('/', '%2F')}&encoding-type=url", False)


def created(key: str) -> Asked:
    return Asked("PUT", f"/bucket/{key}", True)


def test_requests_are_noted_by_kind_and_key() -> None:
    store = FailingStore("bucket", seed=1)
    asked = (
        get("a/b%20c"),
        listing("logs/01/"),
        created("k"),
        Asked("PUT", "/bucket/k", False),
        Asked("HEAD", "/bucket/k", False),
    )
    assert [store(each) for each in asked] == [None] * 5
    assert [(each.kind, each.key) for each in store.requests] == [
        ("get", "a/b c"),
        ("list", "logs/01/"),
        ("conditional put", "k"),
        ("put", "k"),
        ("head", "k"),
    ]


def test_so_many_requests_fail_as_is_said_and_only_bodies_are_cut() -> None:
    store = FailingStore("bucket", seed=1)
    store.faults = Faults(cut=0.5, unavailable=0.2, lost=0.1)
    reads = Counter(store(get("a")) for _ in range(2_000))
    assert 350 < reads[UNAVAILABLE] < 450
    assert 130 < reads[Loss.CLOSED] < 190
    assert 650 < reads[Loss.CUT] < 790
    writes = Counter(store(created("a")) for _ in range(2_000))
    assert writes.keys() == {UNAVAILABLE, Loss.CLOSED, None}
    store.faults = Faults()
    assert store(get("a")) is None


def test_a_takeover_is_counted_from_the_list_before_its_fence_to_its_last_claim() -> None:
    store = FailingStore("bucket", seed=1)
    before = [listing("daemons/"), listing(LOG), Asked("HEAD", f"/bucket/{LOG}1", False), get("daemons/one")]
    takeover = [
        listing(LOG),
        get(f"{LOG}7"),
        created(f"{LOG}8"),
        created("logs/02/1"),
        get(f"{SHARD}3"),
        created(f"{SHARD}4"),
    ]
    after = [created(f"{SHARD}5"), created("shards/00/topics/a/manifest/1"), get(f"{LOG}6")]
    for each in (*before, *takeover, *after):
        store(each)
    assert of_takeover(store.requests) == {"list": 1, "get": 2, "conditional put": 3}
    assert of_takeover(store.requests[:2]) == {}
