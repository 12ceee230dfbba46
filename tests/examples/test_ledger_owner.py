"""The example of an owner does what docs/DELETION.md says, asked by the daemon's own code."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from daemon import settings
from daemon.ledger_stores.ledger_owner import Owner
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed, InUseAnswer
from daemon.ledger_stores.ledger_stores import LedgerStores
from examples import ledger_owner
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, LedgerType, PendingDelete
from tests._support.processes import child

TOPIC = "persistent://t/n/orders"
TIMEOUT_S = 300.0
METADATA = {"application": "pulsar", "component": "managed-ledger", "pulsar/managed-ledger": "t/n/persistent/orders"}


def ledger(number: int, **changes: Any) -> PendingDelete:
    given = {"component": LedgerComponent.MANAGED_LEDGER, "ledger_type": LedgerType.LEDGER, **changes}
    return PendingDelete(ledger_id=number, **given)


def put(directory: Path, number: int, metadata: dict[str, str]) -> Path:
    folder = directory / "ledgers" / str(number)
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    (folder / "data").write_bytes(b"entries")
    return folder


def use(directory: Path, ledgers: Sequence[int]) -> None:
    (directory / "topics.json").write_text(json.dumps({TOPIC: {"ledger": ledgers}}))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ledger_owner.Owner]:
    use(tmp_path, [])
    with ledger_owner.Owner(ledger_owner.Ledgers(tmp_path), authorization="Bearer one") as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(TIMEOUT_S)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("Bearer one\n")
    return path


@pytest.fixture
def owner(server: ledger_owner.Owner, token: Path) -> Owner:
    return owner_at(server.url("/delete"), server.url("/in-use"), token)


def owner_at(delete_url: str, in_use_url: str, token: Path) -> Owner:
    return Owner(
        settings.DeletionOwner(
            name="example",
            topic_prefixes=("",),
            delete_url=delete_url,
            in_use_url=in_use_url,
            authorization_file=str(token),
            timeout_s=TIMEOUT_S,
        )
    )


def delete(owner: Owner, pending: PendingDelete, topic: str = TOPIC) -> Answer:
    return LedgerStores(owners=[owner]).delete(topic, pending, lambda: None)


def test_a_ledger_is_deleted_and_then_gone(owner: Owner, tmp_path: Path) -> None:
    kept, removed = put(tmp_path, 1, METADATA), put(tmp_path, 2, METADATA)
    assert delete(owner, ledger(2)).outcome is DeletionOutcome.DELETED
    assert delete(owner, ledger(2)).outcome is DeletionOutcome.ALREADY_GONE
    assert kept.is_dir()
    assert not removed.exists()
    assert [path.name for path in (tmp_path / "ledgers").iterdir()] == ["1"]


def test_a_ledger_in_use_stays_until_it_is_not(owner: Owner, tmp_path: Path) -> None:
    folder = put(tmp_path, 1, METADATA)
    use(tmp_path, [1])
    assert owner.ask_in_use(TOPIC, ledger(1)) is InUseAnswer.IN_USE
    assert delete(owner, ledger(1)).outcome is DeletionOutcome.IN_USE
    assert (folder / "data").exists()
    use(tmp_path, [2])
    assert owner.ask_in_use(TOPIC, ledger(1)) is InUseAnswer.NOT_IN_USE
    assert owner.ask_in_use("another topic", ledger(1)) is InUseAnswer.NO_SUCH_TOPIC
    assert delete(owner, ledger(1)).outcome is DeletionOutcome.DELETED


@pytest.mark.parametrize(
    ("topic", "pending"),
    [
        ("persistent://t/n/other", ledger(1)),
        (TOPIC, ledger(1, component=LedgerComponent.MANAGED_CURSOR, cursor_name="billing")),
        (TOPIC, ledger(1, component=LedgerComponent.SCHEMA_STORAGE, schema_id="1")),
    ],
)
def test_a_ledger_that_is_not_what_the_record_says_stays(
    owner: Owner, tmp_path: Path, topic: str, pending: PendingDelete
) -> None:
    folder = put(tmp_path, 1, METADATA)
    assert delete(owner, pending, topic).outcome is DeletionOutcome.METADATA_MISMATCH
    assert (folder / "data").exists()


def test_a_cursors_ledger_is_not_its_topics(owner: Owner, tmp_path: Path) -> None:
    put(tmp_path, 1, {**METADATA, "pulsar/cursor": "billing"})
    answer = delete(owner, ledger(1))
    assert answer == Answer(DeletionOutcome.METADATA_MISMATCH, "pulsar/cursor is 'billing', not None")
    cursor = ledger(1, component=LedgerComponent.MANAGED_CURSOR, cursor_name="billing")
    assert delete(owner, cursor).outcome is DeletionOutcome.DELETED


def test_without_the_right_token_nothing_is_answered(owner: Owner, token: Path, tmp_path: Path) -> None:
    folder = put(tmp_path, 1, METADATA)
    token.write_text("Bearer two")
    with pytest.raises(DeletionFailed, match="status 401") as failed:
        delete(owner, ledger(1))
    assert not failed.value.maybe_deleted
    with pytest.raises(DeletionFailed, match="status 401"):
        owner.ask_in_use(TOPIC, ledger(1))
    assert folder.is_dir()
    token.write_text("Bearer one")
    assert delete(owner, ledger(1)).outcome is DeletionOutcome.DELETED


def test_an_owner_that_cannot_tell_is_asked_again(owner: Owner, tmp_path: Path) -> None:
    folder = put(tmp_path, 1, METADATA)
    (tmp_path / "topics.json").write_text("not JSON")
    with pytest.raises(DeletionFailed, match="status 500") as failed:
        delete(owner, ledger(1))
    assert failed.value.maybe_deleted
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        ("/delete", {}, b"{}", 401),
        ("/elsewhere", {"Authorization": "Bearer one"}, b"{}", 404),
        ("/delete", {"Authorization": "Bearer one"}, b"{", 400),
        ("/delete", {"Authorization": "Bearer one", "Content-Length": "9999999999"}, b"{}", 413),
        ("/delete", {"Authorization": "Bearer one"}, b"[]", 500),
    ],
)
def test_a_wrong_request_is_refused(
    server: ledger_owner.Owner, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=TIMEOUT_S)
    connection.request("POST", path, body, headers)
    assert connection.getresponse().status == status
    connection.close()


def test_one_of_two_at_once_deletes(owner: Owner, tmp_path: Path) -> None:
    put(tmp_path, 1, METADATA)
    with ThreadPoolExecutor(2) as threads:
        outcomes = [answer.outcome for answer in threads.map(lambda _: delete(owner, ledger(1)), range(2))]
    assert sorted(outcomes) == [DeletionOutcome.DELETED, DeletionOutcome.ALREADY_GONE]


def test_what_a_killed_owner_was_removing_is_gone_when_it_is_back(tmp_path: Path) -> None:
    put(tmp_path, 1, METADATA).rename(tmp_path / "ledgers" / f"{ledger_owner.DELETING}1")
    ledger_owner.Ledgers(tmp_path)
    assert list((tmp_path / "ledgers").iterdir()) == []


def test_it_runs_as_a_program(tmp_path: Path, token: Path) -> None:
    folder = put(tmp_path, 1, METADATA)
    use(tmp_path, [])
    command = [sys.executable, "-m", "examples.ledger_owner"]
    command += ["--directory", str(tmp_path), "--authorization-file", str(token)]
    with child(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        owner = owner_at(**json.loads(process.stdout.readline()), token=token)
        assert owner.ask_in_use(TOPIC, ledger(1)) is InUseAnswer.NOT_IN_USE
        assert delete(owner, ledger(1)).outcome is DeletionOutcome.DELETED
    assert not folder.exists()
