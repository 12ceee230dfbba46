"""Which store a record belongs to, and who is asked first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from daemon import config, errors, settings
from daemon.ledger_stores.ledger_owner import Owner
from daemon.ledger_stores.ledger_store import DeletionFailed, InUseAnswer
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.ledger_stores.offloaded_ledgers import OffloadedLedgers
from storage_backends.formats.deletion_format import (
    DeletionOutcome,
    LedgerComponent,
    LedgerType,
    OffloadContext,
    PendingDelete,
)
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore, StoreUnavailable
from storage_backends.storage_settings import S3
from tests.daemon.ledger_stores._support.scripted_owner import ScriptedOwner, answering, saying
from tests.daemon.ledger_stores.conftest import DRIVER, LEDGER_METADATA, NAME, TOPIC, Place, record

LEDGER = PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.LEDGER, 7)


@pytest.fixture
def owners() -> Iterator[dict[str, ScriptedOwner]]:
    """Three that answer "gone" when they are told, and "in use" when they are asked."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(ScriptedOwner(saying(result="gone"))) for name in ("one", "two", "three")}


def owner(
    name: str,
    server: ScriptedOwner,
    *prefixes: str,
    drivers: tuple[str, ...] = (),
    deletes: bool = True,
    answers_in_use: bool = False,
) -> Owner:
    return Owner(
        settings.DeletionOwner(
            name=name,
            topic_prefixes=prefixes,
            drivers=drivers,
            delete_url=server.url("/delete") if deletes else None,
            in_use_url=server.url("/in-use") if answers_in_use else None,
        )
    )


def s3_store(name: str, bucket: str, *drivers: str) -> tuple[OffloadedLedgers, MemoryStore]:
    """Memory in the place of a bucket, with the objects of one ledger."""
    memory = MemoryStore()
    for key in (NAME.data, NAME.index):
        memory.put(key, b"", metadata=LEDGER_METADATA)
    entry = settings.DeletionObjectStore(name=name, drivers=drivers, s3=S3(bucket=bucket))
    return OffloadedLedgers(entry, lambda _: memory), memory


def delete(stores: LedgerStores, topic: str, pending: PendingDelete) -> DeletionOutcome:
    return stores.delete(topic, pending, lambda: None).outcome


def reason(stores: LedgerStores, topic: str, pending: PendingDelete) -> str:
    with pytest.raises(DeletionFailed) as failed:
        stores.delete(topic, pending, lambda: None)
    assert not failed.value.maybe_deleted
    return failed.value.reason


def with_context(driver: str, **metadata: str) -> PendingDelete:
    context = OffloadContext(NAME.uuid_msb, NAME.uuid_lsb, driver, tuple(sorted(metadata.items())))
    return dataclasses.replace(record(), offload_context=context)


def is_empty(store: ObjectStore) -> bool:
    return not list(store.list(""))


# Ledgers


def test_a_ledger_belongs_to_the_owner_with_the_longest_prefix(owners: dict[str, ScriptedOwner]) -> None:
    stores = LedgerStores(
        owners=[
            owner("one", owners["one"], "", "x/long/prefix/"),
            owner("two", owners["two"], "persistent://t/"),
            owner("three", owners["three"], "persistent://t/n/", deletes=False, answers_in_use=True),
        ]
    )
    for topic, name in ((TOPIC, "two"), ("persistent://u/n/a", "one"), ("", "one"), ("persistent://t/", "two")):
        before = len(owners[name].requests)
        assert delete(stores, topic, LEDGER) is DeletionOutcome.ALREADY_GONE
        assert len(owners[name].requests) == before + 1, topic
    assert owners["three"].requests == []


def test_a_ledger_that_belongs_to_nobody_fails_as_of_an_unknown_owner(owners: dict[str, ScriptedOwner]) -> None:
    stores = LedgerStores(owners=[owner("one", owners["one"], "persistent://u/", drivers=(DRIVER,))])
    assert reason(stores, TOPIC, LEDGER) == f"unknown owner: no owner of topic '{TOPIC}' is configured"
    assert reason(LedgerStores(), TOPIC, LEDGER).startswith("unknown owner")
    assert owners["one"].requests == []


# Offloaded ledgers


def test_an_offloaded_ledger_belongs_to_the_store_of_its_driver_and_bucket() -> None:
    (hot, in_hot), (cold, in_cold) = s3_store("hot", "b1", DRIVER), s3_store("cold", "b2", "other", DRIVER)
    stores = LedgerStores(object_stores=[hot, cold])
    assert delete(stores, TOPIC, with_context(DRIVER, bucket="b2", region="anywhere")) is DeletionOutcome.DELETED
    assert (is_empty(in_hot), is_empty(in_cold)) == (False, True)
    assert delete(stores, TOPIC, with_context("other")) is DeletionOutcome.ALREADY_GONE
    assert delete(stores, TOPIC, with_context(DRIVER, bucket="b1")) is DeletionOutcome.DELETED
    assert is_empty(in_hot)


def test_a_bucket_that_is_not_configured_is_not_reached() -> None:
    hot, in_hot = s3_store("hot", "b1", DRIVER)
    stores = LedgerStores(object_stores=[hot])
    for forged in ("b2", "", "B1", "b1/other"):
        pending = with_context(DRIVER, bucket=forged, endpoint="http://127.0.0.1:1")
        assert reason(stores, TOPIC, pending) == f"unknown driver: 'aws-s3' with bucket '{forged}' is not configured"
    assert reason(stores, TOPIC, with_context("gcs", bucket="b1")) == "unknown driver: 'gcs' is not configured"
    assert not is_empty(in_hot)


def test_a_local_store_has_no_bucket(tmp_path: Path) -> None:
    entry = settings.DeletionObjectStore(name="cold", drivers=(DRIVER,), kind="local", path=str(tmp_path))
    memory = MemoryStore()
    stores = LedgerStores(object_stores=[OffloadedLedgers(entry, lambda _: memory)])
    assert "with bucket 'b1' is not configured" in reason(stores, TOPIC, with_context(DRIVER, bucket="b1"))
    assert delete(stores, TOPIC, with_context(DRIVER)) is DeletionOutcome.ALREADY_GONE


def test_without_a_bucket_a_driver_of_several_stores_says_too_little() -> None:
    (hot, in_hot), (cold, in_cold) = s3_store("hot", "b1", DRIVER), s3_store("cold", "b2", DRIVER)
    stores = LedgerStores(object_stores=[hot, cold])
    said = reason(stores, TOPIC, with_context(DRIVER, region="r"))
    assert said == "driver_metadata names no bucket, and 2 object stores have driver 'aws-s3'"
    assert not is_empty(in_hot)
    assert not is_empty(in_cold)


def test_a_driver_of_no_object_store_may_be_an_owners(owners: dict[str, ScriptedOwner]) -> None:
    hot, in_hot = s3_store("hot", "b1", DRIVER)
    own = owner("one", owners["one"], "elsewhere", drivers=("tape", DRIVER), answers_in_use=True)
    asked = owner("two", owners["two"], "", answers_in_use=True)
    stores = LedgerStores(object_stores=[hot], owners=[own, asked])
    assert delete(stores, TOPIC, with_context("tape")) is DeletionOutcome.ALREADY_GONE
    assert delete(stores, TOPIC, with_context(DRIVER, bucket="b2")) is DeletionOutcome.ALREADY_GONE
    assert [head.split()[1] for head, _ in owners["one"].requests] == ["/delete", "/delete"]
    # It knows itself what is in use.
    assert owners["two"].requests == []
    assert not is_empty(in_hot)


# In use


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("in_use", DeletionOutcome.IN_USE),
        ("not_in_use", DeletionOutcome.DELETED),
        ("no_such_topic", DeletionOutcome.DELETED),
    ],
)
def test_the_owner_is_asked_before_an_object_store_is_touched(
    owners: dict[str, ScriptedOwner], answer: str, outcome: DeletionOutcome, place: Place
) -> None:
    owners["one"].answer = saying(result=answer)
    stores = LedgerStores(
        object_stores=[place.ledgers],
        owners=[
            owner("one", owners["one"], "persistent://t/", deletes=False, answers_in_use=True),
            owner("two", owners["two"], "", answers_in_use=True),
            owner("three", owners["three"], "persistent://t/n/"),
        ],
    )
    place.put()
    assert delete(stores, TOPIC, place.record()) is outcome
    assert [head.split()[1] for head, _ in owners["one"].requests] == ["/in-use"]
    assert owners["two"].requests == owners["three"].requests == []
    assert (place.keys() == set()) is (outcome is DeletionOutcome.DELETED)
    assert (place.calls() == []) is (outcome is DeletionOutcome.IN_USE)


def test_a_topic_that_is_gone_does_not_save_the_metadata_from_being_compared(
    owners: dict[str, ScriptedOwner], place: Place
) -> None:
    owners["one"].answer = saying(result="no_such_topic")
    stores = LedgerStores(
        object_stores=[place.ledgers], owners=[owner("one", owners["one"], "", deletes=False, answers_in_use=True)]
    )
    place.put(index={**LEDGER_METADATA, "pulsar-managed-ledger": "t/n/persistent/other"})
    assert delete(stores, TOPIC, place.record()) is DeletionOutcome.METADATA_MISMATCH
    assert place.keys() == {NAME.data, NAME.index}


def test_a_question_that_fails_deletes_nothing(owners: dict[str, ScriptedOwner], place: Place) -> None:
    owners["one"].answer = answering("503 Later", b"later")
    stores = LedgerStores(
        object_stores=[place.ledgers], owners=[owner("one", owners["one"], "", deletes=False, answers_in_use=True)]
    )
    place.put()
    assert reason(stores, TOPIC, place.record()) == "owner one: status 503: later"
    assert place.keys() == {NAME.data, NAME.index}
    assert place.calls() == []


def test_a_sweep_asks_the_same_owner(owners: dict[str, ScriptedOwner]) -> None:
    owners["one"].answer = saying(result="no_such_topic")
    stores = LedgerStores(owners=[owner("one", owners["one"], "persistent://t/", deletes=False, answers_in_use=True)])
    assert stores.ask_in_use(TOPIC, record()) is InUseAnswer.NO_SUCH_TOPIC
    assert stores.answers_in_use(TOPIC)
    assert stores.ask_in_use("persistent://u/n/a", record()) is None
    assert not stores.answers_in_use("persistent://u/n/a")


# By name, and from the configuration


def test_an_object_store_is_found_by_its_name_and_opened_once() -> None:
    opened: list[str] = []

    def opening(entry: settings.DeletionObjectStore) -> ObjectStore:
        opened.append(entry.name)
        return MemoryStore()

    s3 = settings.DeletionObjectStore(name="cold", drivers=(DRIVER, "s3"), s3=S3(bucket="b1"))
    local = settings.DeletionObjectStore(name="disk", drivers=("filesystem",), kind="local", path="offloaded")
    stores = LedgerStores(object_stores=[OffloadedLedgers(entry, opening) for entry in (s3, local)])
    assert opened == []
    assert stores.object_store("cold") is stores.object_store("cold")
    assert stores.driver_of("cold") == OffloadContext(0, 0, DRIVER, (("bucket", "b1"),))
    assert stores.driver_of("disk") == OffloadContext(0, 0, "filesystem")
    assert opened == ["cold"]
    for ask in (stores.object_store, stores.driver_of):
        with pytest.raises(errors.NotFound, match="object store 'hot' is not configured"):
            ask("hot")
    stores.close()
    stores.close()


def test_what_cannot_be_opened_ahead_is_opened_for_the_record_that_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[str] = []

    def opening(entry: settings.DeletionObjectStore) -> ObjectStore:
        tries.append(entry.name)
        if tries == ["late"]:
            raise StoreUnavailable("late", "not mounted")
        return MemoryStore()

    entries = [settings.DeletionObjectStore(name=name, drivers=(name,)) for name in ("late", "there")]
    stores = LedgerStores(object_stores=[OffloadedLedgers(entry, opening) for entry in entries])
    stores.open_ahead()
    assert "object store late cannot be opened yet: late: not mounted" in caplog.text
    assert [delete(stores, TOPIC, with_context(name)) for name in ("late", "there")] == 2 * [
        DeletionOutcome.ALREADY_GONE
    ]
    assert tries == ["late", "there", "late"]


def test_the_configuration_makes_them(tmp_path: Path, place: Place, owners: dict[str, ScriptedOwner]) -> None:
    """Everything by its own code: the file, the choice, the store."""
    entry, s3 = place.entry, place.entry.s3
    kind = (
        f'kind = "local"\npath = "{entry.path}"\n'
        if entry.kind == "local"
        else f'[deletion.object_stores.s3]\nbucket = "{s3.bucket}"\nprefix = "{s3.prefix}"\n'
        f'endpoint_url = "{s3.endpoint_url}"\n'
    )
    path = tmp_path / "tarryd.toml"
    path.write_text(
        f'[[deletion.object_stores]]\nname = "cold"\ndrivers = ["{DRIVER}"]\n{kind}'
        f'[[deletion.owners]]\nname = "one"\ntopic_prefixes = ["t"]\ndelete_url = "{owners["one"].url()}"\n'
    )
    stores = LedgerStores.from_settings(config.load(path, environment={}))
    place.put()
    assert delete(stores, TOPIC, place.record()) is DeletionOutcome.DELETED
    assert place.keys() == set()
    assert delete(stores, "topic", LEDGER) is DeletionOutcome.ALREADY_GONE
    stores.close()
