"""A write whose answer is lost, on every store that can lose one: what the writer is told, and how it finds out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import AlreadyExists, NotFound, ObjectStore, OutcomeUnknown
from storage_backends.s3 import S3Store
from tests._support.fault_store import Fault, FaultStore, Script
from tests._support.lost_answer_proxy import Loss, LostAnswerProxy
from tests._support.moto_server import MotoServer


@dataclass(frozen=True)
class Losing:
    """A store and the way to lose its next answer."""

    store: ObjectStore
    lose_next_answer: Callable[[], None]
    answer_exists: Callable[[], None]


@pytest.fixture(params=["memory", "local directory", "s3, closed connection", "s3, silence"])
def losing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Losing]:
    if not request.param.startswith("s3"):
        script = Script()
        inner = MemoryStore() if request.param == "memory" else LocalDirectory(tmp_path)
        yield Losing(
            FaultStore(inner, script),
            lambda: script.plan("put_if_absent", Fault.FAIL_AFTER),
            lambda: script.plan("put_if_absent", Fault.ANSWER_EXISTS),
        )
        inner.close()
        return
    moto: MotoServer = request.getfixturevalue("moto")
    proxy: LostAnswerProxy = request.getfixturevalue("proxy")
    loss, patience_s = (Loss.SILENT, 2) if "silence" in request.param else (Loss.CLOSED, 300)
    settings = moto.settings(
        "contract",
        endpoint_url=proxy.endpoint_url,
        prefix=f"lost/{loss.name}/{request.node.name[:20]}",
        read_timeout_s=patience_s,
    )
    with S3Store(settings) as store:
        yield Losing(
            store,
            lambda: proxy.drop_next_put_answer(loss=loss),
            lambda: proxy.answer_next_put_with(409),
        )


def test_a_lost_answer_is_an_unknown_outcome_and_head_shows_who_wrote(losing: Losing) -> None:
    losing.lose_next_answer()
    with pytest.raises(OutcomeUnknown, match="created"):
        losing.store.put_if_absent("created", b"body", metadata={"commitid": "mine"})
    assert losing.store.head("created").metadata["commitid"] == "mine"
    assert losing.store.get("created") == b"body"
    with pytest.raises(AlreadyExists):
        losing.store.put_if_absent("created", b"body", metadata={"commitid": "mine"})


def test_a_lost_refusal_is_an_unknown_outcome_too(losing: Losing) -> None:
    losing.store.put_if_absent("held", b"body", metadata={"commitid": "other"})
    losing.lose_next_answer()
    with pytest.raises(OutcomeUnknown):
        losing.store.put_if_absent("held", b"mine", metadata={"commitid": "mine"})
    assert losing.store.head("held").metadata["commitid"] == "other"


def test_it_may_be_said_to_exist_although_nobody_has_won(losing: Losing) -> None:
    losing.answer_exists()
    with pytest.raises(AlreadyExists):
        losing.store.put_if_absent("conflict", b"body", metadata={"commitid": "mine"})
    with pytest.raises(NotFound):
        losing.store.head("conflict")
    losing.store.put_if_absent("conflict", b"body", metadata={"commitid": "mine"})


def test_a_conditional_write_is_sent_once(moto: MotoServer, proxy: LostAnswerProxy) -> None:
    with S3Store(moto.settings("contract", endpoint_url=proxy.endpoint_url, prefix="once")) as store:
        for lose in (proxy.drop_next_put_answer, functools.partial(proxy.answer_next_put_with, 503)):
            before = proxy.conditional_puts
            lose()
            with pytest.raises(OutcomeUnknown):
                store.put_if_absent(f"slot-{before}", b"body", metadata={"commitid": "mine"})
            assert proxy.conditional_puts == before + 1
