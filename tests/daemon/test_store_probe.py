"""What a daemon probes before it serves, what beside serving, and what becomes of what is seen there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import pytest

from daemon import store_probe
from daemon.store_probe import LOCAL_RACES, StoreProbe
from storage_backends.formats import names
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import AlreadyExists, Bucket, ObjectInfo, OutcomeUnknown, StoreUnavailable
from storage_backends.probe import RACES, BrokenPromise, NotJudged, has_passed, remember

BUCKET = Bucket("http://127.0.0.1:9000", "orders")
# No story here waits longer; a busy machine may need much of it.
TIMEOUT_S = 300.0


class Server(MemoryStore):
    """A store on a server. Each race but the first waits for `goes_on`.

    With `shows` every writer wins a race. Without `answers` no conditional write is answered. With `is_away` the next
    `head` fails.
    """

    def __init__(self, bucket: Bucket | None = BUCKET) -> None:
        super().__init__()
        self._of = bucket
        self.raced: set[str] = set()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.shows = False
        self.answers = True
        self.is_away = threading.Event()

    @property
    def bucket(self) -> Bucket | None:
        return self._of

    def head(self, key: str) -> ObjectInfo:
        if self.is_away.is_set():
            self.is_away.clear()
            raise StoreUnavailable(key, "out for lunch")
        return super().head(key)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        if "race-" in key:
            if self.raced - {key}:
                assert self.goes_on.wait(TIMEOUT_S)
            self.raced.add(key)
        if not self.answers:
            raise OutcomeUnknown(key, "no answer")
        try:
            super().put_if_absent(key, body, metadata=metadata)
        except AlreadyExists:
            if not self.shows or "race-" not in key:
                raise
            self.put(key, body, metadata=metadata)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_probe, "BETWEEN_S", 0.0)


def run_to_its_end(store: MemoryStore, *, at_length: bool = False) -> None:
    with StoreProbe(store, at_length=at_length) as probing:
        probing.may_serve.result(TIMEOUT_S)
        assert probing.has_passed()


def objects(store: MemoryStore) -> list[str]:
    return [listed.key for listed in store.list("")]


def test_the_first_start_of_a_root_runs_the_long_probe_and_stores_the_pass() -> None:
    store = Server()
    run_to_its_end(store)
    assert len(store.raced) == RACES
    assert objects(store) == [names.PROBE_PASS_KEY]
    assert has_passed(store, BUCKET)


def test_a_later_start_races_once_and_goes_on_beside_serving() -> None:
    store = Server()
    remember(store, BUCKET, now_ms=7)
    store.goes_on.clear()
    with StoreProbe(store, at_length=False) as probing:
        probing.may_serve.result(TIMEOUT_S)
        assert not probing.has_passed()
        assert len(store.raced) == 1
        store.goes_on.set()
        probing._thread.join(TIMEOUT_S)
        assert probing.has_passed()
        assert not probing.broken.done()
    assert len(store.raced) == 1 + RACES
    assert objects(store) == [names.PROBE_PASS_KEY]


@pytest.mark.parametrize("other", [Bucket("http://127.0.0.1:9001", "orders"), Bucket("http://127.0.0.1:9000", "copy")])
def test_a_root_that_was_moved_is_probed_at_length_again(other: Bucket) -> None:
    store = Server()
    remember(store, other, now_ms=7)
    run_to_its_end(store)
    assert len(store.raced) == RACES
    assert has_passed(store, BUCKET)


def test_a_check_runs_the_long_probe_whatever_is_remembered() -> None:
    store = Server()
    remember(store, BUCKET, now_ms=7)
    run_to_its_end(store, at_length=True)
    assert len(store.raced) == RACES


def test_a_store_on_no_server_is_raced_at_each_start_and_nothing_is_stored() -> None:
    store = Server(bucket=None)
    for starts in (1, 2):
        run_to_its_end(store)
        assert len(store.raced) == starts * LOCAL_RACES
    assert objects(store) == []


@pytest.mark.parametrize("at_length", [True, False])
def test_a_broken_promise_refuses_the_start_and_the_pass_is_forgotten(at_length: bool) -> None:
    store = Server()
    remember(store, BUCKET, now_ms=7)
    store.shows = True
    with StoreProbe(store, at_length=at_length) as probing, pytest.raises(BrokenPromise, match="8 of 8"):
        probing.may_serve.result(TIMEOUT_S)
    assert objects(store) == []


def test_a_promise_that_is_broken_beside_serving_is_told_and_the_next_start_is_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Server()
    remember(store, BUCKET, now_ms=7)
    store.goes_on.clear()
    with StoreProbe(store, at_length=False) as probing:
        probing.may_serve.result(TIMEOUT_S)
        store.shows = True
        store.goes_on.set()
        with pytest.raises(BrokenPromise, match="the store checks, and writes later"):
            probing.broken.result(TIMEOUT_S)
        assert not probing.has_passed()
    assert objects(store) == []
    (told,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "this daemon ends, since its store cannot be trusted any longer" in told.getMessage()


def test_a_store_that_is_not_judged_refuses_the_start_and_is_not_accused() -> None:
    store = Server()
    store.answers = False
    with StoreProbe(store, at_length=False) as probing, pytest.raises(NotJudged, match="could not be judged"):
        probing.may_serve.result(TIMEOUT_S)
    assert objects(store) == []


def test_a_store_that_is_not_judged_beside_serving_is_told_and_judged_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_probe, "AGAIN_S", 0.0)
    store = Server()
    remember(store, BUCKET, now_ms=7)
    store.goes_on.clear()
    with StoreProbe(store, at_length=False) as probing:
        probing.may_serve.result(TIMEOUT_S)
        store.is_away.set()
        store.goes_on.set()
        probing._thread.join(TIMEOUT_S)
        assert probing.has_passed()
        assert not probing.broken.done()
    (told,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "could not be judged: out for lunch" in told.getMessage()
    assert objects(store) == [names.PROBE_PASS_KEY]


def test_a_probe_that_is_stopped_leaves_nothing_behind() -> None:
    store = Server()
    store.goes_on.clear()
    with StoreProbe(store, at_length=False) as probing:
        while not store.raced:
            assert probing._thread.is_alive()
        store.goes_on.set()
    probing._thread.join(TIMEOUT_S)
    assert [key for key in objects(store) if key != names.PROBE_PASS_KEY] == []
