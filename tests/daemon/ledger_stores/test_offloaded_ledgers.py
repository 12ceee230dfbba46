"""Offloaded ledgers: what is deleted, in which order, and what is never deleted."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from pathlib import Path
from typing import Any

import pytest

from daemon import settings
from daemon.core.deletions.ledger_metadata import LEDGER_ID_MAX, OffloadedName
from daemon.ledger_stores.ledger_store import DeletionFailed
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.ledger_stores.offloaded_ledgers import OffloadedLedgers
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, OffloadContext
from storage_backends.local_directory import LocalDirectory
from storage_backends.object_store import ObjectStore, StoreUnavailable
from storage_backends.s3 import S3Store
from storage_backends.storage_settings import S3
from tests._support.fault_store import Fault
from tests._support.lost_answer_proxy import Loss, lost_answer_proxy
from tests._support.moto_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, MotoServer
from tests._support.patience import within_some_time
from tests.daemon.ledger_stores.conftest import DRIVER, LEDGER_METADATA, NAME, TOPIC, Place, record

CURSOR_METADATA = {**LEDGER_METADATA, "pulsar-cursor": "billing"}
SCHEMA_METADATA = {"application": "pulsar", "component": "schema", "pulsar-schemaid": "t/n/orders"}
OTHER_NAME = OffloadedName(NAME.uuid_msb, NAME.uuid_lsb, 4)
BOTH = {NAME.data, NAME.index}


def allowed() -> None:
    """The guard of a daemon that may delete."""


def refused() -> None:
    raise DeletionFailed("another daemon may own the shard", maybe_deleted=False)


def test_both_objects_are_verified_and_then_deleted_the_index_first(place: Place) -> None:
    place.put()
    place.put(OTHER_NAME)
    steps: list[str] = []
    answer = place.stores.delete(TOPIC, place.record(), lambda: steps.append("guard"), steps.append)
    assert answer.outcome is DeletionOutcome.DELETED
    assert place.keys() == {OTHER_NAME.data, OTHER_NAME.index}
    assert place.calls() == [
        ("head", NAME.index),
        ("head", NAME.data),
        ("delete", NAME.index),
        ("delete", NAME.data),
    ]
    assert steps == [
        "deletion.before_verify",
        "deletion.after_verify",
        "guard",
        "deletion.after_index_delete",
        "deletion.after_delete",
    ]


@pytest.mark.parametrize(
    ("component", "name", "metadata"),
    [
        (LedgerComponent.MANAGED_LEDGER, {}, LEDGER_METADATA),
        (LedgerComponent.MANAGED_CURSOR, {"cursor_name": "billing"}, CURSOR_METADATA),
        (LedgerComponent.SCHEMA_STORAGE, {"schema_id": "t/n/orders"}, SCHEMA_METADATA),
    ],
)
def test_a_record_deletes_what_its_component_says_and_nothing_else(
    place: Place, component: LedgerComponent, name: dict[str, Any], metadata: dict[str, str]
) -> None:
    for other in (LEDGER_METADATA, CURSOR_METADATA, SCHEMA_METADATA):
        place.put(data=other, index=other)
        answer = place.stores.delete(TOPIC, place.record(component=component, **name), allowed)
        if other == metadata:
            assert answer.outcome is DeletionOutcome.DELETED
            assert place.keys() == set()
        else:
            assert answer.outcome is DeletionOutcome.METADATA_MISMATCH
            assert place.keys() == BOTH


def test_a_cursors_objects_are_not_deleted_for_its_topics_ledger(place: Place) -> None:
    place.put(data=CURSOR_METADATA, index=CURSOR_METADATA)
    answer = place.stores.delete(TOPIC, place.record(), allowed)
    assert answer.outcome is DeletionOutcome.METADATA_MISMATCH
    assert answer.text.endswith("metadata pulsar/cursor is 'billing', it must be absent")
    assert NAME.index in answer.text
    assert place.keys() == BOTH


@pytest.mark.parametrize("which", ["data", "index"])
def test_one_object_that_does_not_match_saves_both(place: Place, which: str) -> None:
    place.put(**{which: {**LEDGER_METADATA, "pulsar-managed-ledger": "t/n/persistent/other"}})  # type: ignore[arg-type]
    answer = place.stores.delete(TOPIC, place.record(), allowed)
    assert answer.outcome is DeletionOutcome.METADATA_MISMATCH
    assert place.keys() == BOTH
    assert "delete" not in {operation for operation, _ in place.calls()}


@pytest.mark.parametrize("which", ["data", "index"])
def test_one_object_that_is_left_is_verified_and_deleted(place: Place, which: str) -> None:
    place.put(**{which: None})  # type: ignore[arg-type]
    assert place.stores.delete(TOPIC, place.record(), allowed).outcome is DeletionOutcome.DELETED
    assert place.keys() == set()
    place.put(**{which: None, "index" if which == "data" else "data": CURSOR_METADATA})  # type: ignore[arg-type]
    assert place.stores.delete(TOPIC, place.record(), allowed).outcome is DeletionOutcome.METADATA_MISMATCH
    assert len(place.keys()) == 1


def test_what_is_not_there_is_gone_and_so_it_is_the_second_time(place: Place) -> None:
    place.put(OTHER_NAME)
    assert place.stores.delete(TOPIC, place.record(), allowed).outcome is DeletionOutcome.ALREADY_GONE
    place.put()
    outcomes = [place.stores.delete(TOPIC, place.record(), allowed).outcome for _ in range(2)]
    assert outcomes == [DeletionOutcome.DELETED, DeletionOutcome.ALREADY_GONE]
    assert place.keys() == {OTHER_NAME.data, OTHER_NAME.index}


@pytest.mark.parametrize(
    "other",
    [
        OffloadedName(NAME.uuid_msb ^ 1, NAME.uuid_lsb, NAME.ledger_id),
        OffloadedName(NAME.uuid_msb, NAME.uuid_lsb ^ 1, NAME.ledger_id),
        OffloadedName(NAME.uuid_lsb, NAME.uuid_msb, NAME.ledger_id),
        OffloadedName(NAME.uuid_msb, NAME.uuid_lsb, NAME.ledger_id * 10),
    ],
)
def test_another_uuid_or_ledger_is_another_ledger(place: Place, other: OffloadedName) -> None:
    place.put()
    assert place.stores.delete(TOPIC, place.record(other), allowed).outcome is DeletionOutcome.ALREADY_GONE
    assert place.keys() == BOTH


def test_a_forged_record_of_another_topic_deletes_nothing(place: Place) -> None:
    place.put()
    for topic in ("persistent://t/n/order", "persistent://t/n/orders2", "t/n/orders", "persistent://t/m/orders"):
        answer = place.stores.delete(topic, place.record(), allowed)
        assert answer.outcome is DeletionOutcome.METADATA_MISMATCH, topic
    assert place.keys() == BOTH


def test_objects_without_metadata_are_nobodys(place: Place) -> None:
    place.put(data={}, index={})
    answer = place.stores.delete(TOPIC, place.record(), allowed)
    assert answer.outcome is DeletionOutcome.METADATA_MISMATCH
    assert answer.text.endswith("metadata application is absent, it must be 'pulsar'")
    assert place.keys() == BOTH


@pytest.mark.parametrize(
    ("topic", "stored"),
    [
        ("persistent://t/n/a b/ü", "t/n/persistent/a+b%2F%C3%BC"),
        ("persistent://t/n/100%", "t/n/persistent/100%25"),
        ("persistent://t/n/100%", "persistent://t/n/100%25"),
        ("plain topic", "plain topic"),
        ("Größe 100%", "Gr%C3%B6%C3%9Fe 100%25"),
    ],
)
def test_names_that_a_store_cannot_keep_are_percent_encoded(place: Place, topic: str, stored: str) -> None:
    found = {**LEDGER_METADATA, "pulsar-managed-ledger": stored, "pulsar-cursor": "%C3%BC"}
    place.put(data=found, index=found)
    delete = place.record(component=LedgerComponent.MANAGED_CURSOR, cursor_name="ü")
    other = place.record(component=LedgerComponent.MANAGED_CURSOR, cursor_name="u")
    assert place.stores.delete(topic, other, allowed).outcome is DeletionOutcome.METADATA_MISMATCH
    assert place.stores.delete(topic, delete, allowed).outcome is DeletionOutcome.DELETED


@pytest.mark.parametrize("ledger_id", [LEDGER_ID_MAX + 1, 2**64 - 1])
def test_an_id_that_makes_no_name_is_malformed(place: Place, ledger_id: int) -> None:
    answer = place.stores.delete(TOPIC, place.record(ledger_id=ledger_id), allowed)
    assert (answer.outcome, place.calls()) == (DeletionOutcome.MALFORMED, [])
    assert "ledger_id" in answer.text


def test_a_record_without_a_place_is_malformed(place: Place) -> None:
    for context in (None, OffloadContext(0, 0, DRIVER, ())):
        answer = place.stores.delete(TOPIC, place.record(offload_context=context), allowed)
        assert (answer.outcome, place.calls()) == (DeletionOutcome.MALFORMED, [])


# The guard


def test_the_guard_speaks_before_anything_is_deleted(place: Place) -> None:
    place.put()
    with pytest.raises(DeletionFailed, match="another daemon") as failed:
        place.stores.delete(TOPIC, place.record(), refused)
    assert not failed.value.maybe_deleted
    assert place.calls() == [("head", NAME.index), ("head", NAME.data)]
    assert place.keys() == BOTH


def test_the_guard_is_not_asked_where_nothing_would_be_deleted(place: Place) -> None:
    assert place.stores.delete(TOPIC, place.record(), refused).outcome is DeletionOutcome.ALREADY_GONE
    place.put(data=CURSOR_METADATA)
    assert place.stores.delete(TOPIC, place.record(), refused).outcome is DeletionOutcome.METADATA_MISMATCH


# Failures


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.REFUSE])
@pytest.mark.parametrize("key_part", [NAME.index, NAME.data])
def test_a_failure_of_verifying_has_deleted_nothing(place: Place, fault: Fault, key_part: str) -> None:
    place.put()
    place.script.plan("head", fault, key_part=key_part)
    with pytest.raises(DeletionFailed, match=r"object store cold: .*fault") as failed:
        place.stores.delete(TOPIC, place.record(), allowed)
    assert not failed.value.maybe_deleted
    assert place.keys() == BOTH
    assert place.stores.delete(TOPIC, place.record(), allowed).outcome is DeletionOutcome.DELETED


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DELIVER_LATE, Fault.REFUSE])
@pytest.mark.parametrize("which", [0, 1])
def test_a_failure_of_deleting_may_have_deleted_and_the_next_attempt_ends_it(
    place: Place, fault: Fault, which: int
) -> None:
    place.put()
    # The name of the data is part of the name of the index.
    for number in range(which + 1):
        place.script.plan("delete", fault if number == which else Fault.NONE)
    with pytest.raises(DeletionFailed, match=r"object store cold: .*fault") as failed:
        place.stores.delete(TOPIC, place.record(), allowed)
    assert failed.value.maybe_deleted
    again = place.stores.delete(TOPIC, place.record(), allowed)
    all_gone = fault is Fault.FAIL_AFTER and which == 1
    assert again.outcome is (DeletionOutcome.ALREADY_GONE if all_gone else DeletionOutcome.DELETED)
    place.opened[0].deliver_late()
    assert place.keys() == set()
    assert place.script.unmet() == 0


def test_nothing_is_gone_because_a_listing_fails(place: Place) -> None:
    place.script.plan("list", Fault.FAIL_BEFORE)
    with pytest.raises(DeletionFailed) as failed:
        place.stores.delete(TOPIC, place.record(), allowed)
    assert not failed.value.maybe_deleted


def test_what_nobody_foresaw_is_a_failure_of_the_attempt(place: Place) -> None:
    place.put()

    def break_at(broken: str, step: str) -> None:
        if step == broken:
            raise RuntimeError("boom")

    for broken, maybe_deleted in (("deletion.after_verify", False), ("deletion.after_index_delete", True)):
        with pytest.raises(DeletionFailed, match="RuntimeError: boom") as failed:
            place.stores.delete(TOPIC, place.record(), allowed, functools.partial(break_at, broken))
        assert failed.value.maybe_deleted is maybe_deleted


def test_what_kills_a_thread_is_not_held_up(place: Place) -> None:
    place.put()

    def kill(step: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.stores.delete(TOPIC, place.record(), allowed, kill)


# Places that are not there


@pytest.mark.parametrize("entry", ["s3"], indirect=True)
def test_a_bucket_that_does_not_exist_is_no_empty_one(entry: settings.DeletionObjectStore) -> None:
    nowhere = settings.DeletionObjectStore(
        name="cold", drivers=(DRIVER,), s3=S3(bucket="nowhere", endpoint_url=entry.s3.endpoint_url, attempts=1)
    )
    stores = LedgerStores(object_stores=[OffloadedLedgers(nowhere)])
    with pytest.raises(DeletionFailed, match="NoSuchBucket") as failed:
        stores.delete(TOPIC, record(bucket="nowhere"), allowed)
    assert not failed.value.maybe_deleted
    stores.close()


def test_a_directory_that_is_no_store_is_no_empty_one_and_may_become_one(tmp_path: Path) -> None:
    path = tmp_path / "mounted-later"
    entry = settings.DeletionObjectStore(name="cold", drivers=(DRIVER,), kind="local", path=str(path))
    stores = LedgerStores(object_stores=[OffloadedLedgers(entry)])
    for _ in range(2):
        with pytest.raises(DeletionFailed, match="no store in this directory") as failed:
            stores.delete(TOPIC, record(), allowed)
        assert not failed.value.maybe_deleted
        path.mkdir(exist_ok=True)
    with pytest.raises(StoreUnavailable):
        stores.object_store("cold")
    with LocalDirectory(path) as store:
        store.put(NAME.data, b"entries", metadata=LEDGER_METADATA)
        assert stores.delete(TOPIC, record(), allowed).outcome is DeletionOutcome.DELETED
        assert list(store.list("")) == []
    # And it goes away again.
    path.rename(tmp_path / "elsewhere")
    path.mkdir()
    with pytest.raises(DeletionFailed):
        stores.delete(TOPIC, record(), allowed)
    stores.close()


def test_a_file_that_is_no_object_is_a_failure(tmp_path: Path) -> None:
    entry = settings.DeletionObjectStore(name="cold", drivers=(DRIVER,), kind="local", path=str(tmp_path))
    LocalDirectory(tmp_path).close()
    (tmp_path / NAME.data).write_bytes(b"written by somebody else")
    stores = LedgerStores(object_stores=[OffloadedLedgers(entry)])
    with pytest.raises(DeletionFailed, match="envelope") as failed:
        stores.delete(TOPIC, record(), allowed)
    assert not failed.value.maybe_deleted
    stores.close()


# On the wire


@pytest.mark.parametrize("loss", [Loss.CLOSED, Loss.SILENT])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_deletion_whose_answer_is_lost_may_have_deleted_and_the_next_attempt_ends_it(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch, loss: Loss, lost: int
) -> None:
    """The request of the index, or that of the data: it takes effect, and nobody is told."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    bucket = f"lost-{loss.name.lower()}-{lost}"
    writer = S3Store(moto.settings(bucket))
    with lost_answer_proxy(moto.endpoint_url) as proxy:

        def lose(step: str) -> None:
            if step == ("deletion.after_verify" if lost == 1 else "deletion.after_index_delete"):
                proxy.drop_next_answer("DELETE", loss=loss)

        def story(seconds: float) -> None:
            for key in BOTH:
                writer.put(key, b"entries", metadata=LEDGER_METADATA)
            impatient, patient = (_stores_on_s3(bucket, proxy.endpoint_url, read_s) for read_s in (seconds, 300))
            with pytest.raises(DeletionFailed, match="object store cold") as failed:
                impatient.delete(TOPIC, record(bucket=bucket), allowed, lose)
            left = {found.key for found in writer.list("")}
            assert left == ({NAME.data} if lost == 1 else set())
            assert failed.value.maybe_deleted
            again = patient.delete(TOPIC, record(bucket=bucket), allowed).outcome
            assert again is (DeletionOutcome.DELETED if lost == 1 else DeletionOutcome.ALREADY_GONE)
            assert list(writer.list("")) == []
            impatient.close()
            patient.close()

        within_some_time(story)
    writer.close()


def _stores_on_s3(bucket: str, endpoint_url: str, read_timeout_s: float) -> LedgerStores:
    s3 = S3(bucket=bucket, endpoint_url=endpoint_url, attempts=1, read_timeout_s=read_timeout_s)
    entry = settings.DeletionObjectStore(name="cold", drivers=(DRIVER,), s3=s3)
    return LedgerStores(object_stores=[OffloadedLedgers(entry)])


def test_an_end_does_not_wait_for_a_store_that_hangs_while_it_is_opened() -> None:
    opening, released = threading.Event(), threading.Event()

    def hang(_: settings.DeletionObjectStore) -> ObjectStore:
        opening.set()
        released.wait(900)
        raise StoreUnavailable("disk", "it hangs")

    offloaded = OffloadedLedgers(settings.DeletionObjectStore(name="disk", drivers=(DRIVER,)), hang)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        opened = threads.submit(offloaded.store)
        assert opening.wait(300)
        try:
            threads.submit(offloaded.close).result(300)
        finally:
            released.set()
        with pytest.raises(StoreUnavailable):
            opened.result()
