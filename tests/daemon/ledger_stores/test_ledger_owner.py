"""An owner that is asked by HTTP: what it is told, and what each answer and each silence means."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from daemon import settings
from daemon.ledger_stores.ledger_owner import ANSWER_BYTES_MAX, TEXT_MAX, Owner
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed, InUseAnswer
from daemon.ledger_stores.ledger_stores import LedgerStores
from storage_backends.formats.deletion_format import (
    DeletionOutcome,
    LedgerComponent,
    LedgerType,
    OffloadContext,
    PendingDelete,
)
from tests.daemon.ledger_stores._support.scripted_owner import ScriptedOwner, answering, saying, sending
from tests.daemon.ledger_stores.conftest import TOPIC

LEDGER = PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.LEDGER, 2**63 - 1)
PROMPT_S = 300.0


@pytest.fixture
def server() -> Iterator[ScriptedOwner]:
    with ScriptedOwner(saying(result="deleted")) as running:
        yield running


def owner_of(server: ScriptedOwner, *, timeout_s: float = PROMPT_S, authorization_file: str | None = None) -> Owner:
    return Owner(
        settings.DeletionOwner(
            name="brokers",
            topic_prefixes=("",),
            delete_url=server.url("/delete"),
            in_use_url=server.url("/in-use"),
            authorization_file=authorization_file,
            timeout_s=timeout_s,
        )
    )


def delete(owner: Owner, pending: PendingDelete = LEDGER) -> Answer:
    return LedgerStores(owners=[owner]).delete(TOPIC, pending, lambda: None)


def failure(owner: Owner, pending: PendingDelete = LEDGER) -> DeletionFailed:
    with pytest.raises(DeletionFailed) as failed:
        delete(owner, pending)
    assert failed.value.reason.startswith("owner brokers: ")
    return failed.value


# What it is told


@pytest.mark.parametrize(
    ("pending", "says"),
    [
        (
            LEDGER,
            {
                "component": "managed_ledger",
                "ledger_type": "ledger",
                "ledger_id": "9223372036854775807",
                "metadata": {
                    "application": "pulsar",
                    "component": "managed-ledger",
                    "pulsar/managed-ledger": "t/n/persistent/orders",
                    "pulsar/cursor": None,
                    "pulsar/schemaId": None,
                },
            },
        ),
        (
            PendingDelete(LedgerComponent.MANAGED_CURSOR, LedgerType.LEDGER, 5, cursor_name="zähler"),
            {
                "component": "managed_cursor",
                "ledger_type": "ledger",
                "ledger_id": "5",
                "cursor_name": "zähler",
                "metadata": {
                    "application": "pulsar",
                    "component": "managed-ledger",
                    "pulsar/managed-ledger": "t/n/persistent/orders",
                    "pulsar/cursor": "zähler",
                    "pulsar/schemaId": None,
                },
            },
        ),
        (
            PendingDelete(
                LedgerComponent.SCHEMA_STORAGE,
                LedgerType.OFFLOADED_LEDGER,
                0,
                schema_id="t/n/orders",
                offload_context=OffloadContext(1, 2**64 - 1, "own", (("bucket", "b"), ("region", "r"))),
            ),
            {
                "component": "schema_storage",
                "ledger_type": "offloaded_ledger",
                "ledger_id": "0",
                "schema_id": "t/n/orders",
                "offload_context": {
                    "uuid": "00000000-0000-0001-ffff-ffffffffffff",
                    "driver_name": "own",
                    "driver_metadata": {"bucket": "b", "region": "r"},
                },
                "metadata": {
                    "application": "pulsar",
                    "component": "schema",
                    "pulsar/managed-ledger": None,
                    "pulsar/cursor": None,
                    "pulsar/schemaId": "t/n/orders",
                },
            },
        ),
    ],
)
def test_it_is_told_the_whole_record_and_what_the_metadata_must_be(
    server: ScriptedOwner, pending: PendingDelete, says: dict[str, object]
) -> None:
    owner = owner_of(server)
    absent = {"cursor_name": None, "schema_id": None, "offload_context": None}
    owner.delete(TOPIC, pending, lambda: None, lambda step: None)
    server.answer = saying(result="not_in_use")
    owner.ask_in_use(TOPIC, pending)
    (first, told), (second, asked) = server.requests
    assert told == asked == {"topic": TOPIC, **absent, **says}
    assert first.startswith("POST /delete HTTP/1.1\r\n")
    assert second.startswith("POST /in-use HTTP/1.1\r\n")
    assert "\r\nContent-Type: application/json\r\n" in first
    assert "authorization" not in first.lower()


def test_the_token_is_read_for_each_request(server: ScriptedOwner, tmp_path: Path) -> None:
    token = tmp_path / "token"
    owner = owner_of(server, authorization_file=str(token))
    for value in ("Bearer one", "Bearer two"):
        token.write_text(f"{value}\n")
        delete(owner)
        assert f"\r\nAuthorization: {value}\r\n" in f"{server.requests[-1][0]}\r\n"


@pytest.mark.parametrize("content", [None, b"", b"\n", b"a\nb", b"a\r\nX-Evil: b", "ä".encode(), b"a" * 70_000])
def test_without_a_proper_token_nothing_is_sent(server: ScriptedOwner, tmp_path: Path, content: bytes | None) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content)
    failed = failure(owner_of(server, authorization_file=str(token)))
    assert "authorization_file" in failed.reason
    assert not failed.maybe_deleted
    assert server.requests == []


# What it answers


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ("deleted", DeletionOutcome.DELETED),
        ("gone", DeletionOutcome.ALREADY_GONE),
        ("in_use", DeletionOutcome.IN_USE),
        ("mismatch", DeletionOutcome.METADATA_MISMATCH),
        ("malformed", DeletionOutcome.MALFORMED),
    ],
)
def test_each_answer_is_an_outcome(server: ScriptedOwner, result: str, outcome: DeletionOutcome) -> None:
    server.answer = saying(result=result, text="so it is", more=[1])
    assert delete(owner_of(server)) == Answer(outcome, "so it is")


def test_a_long_text_is_cut_and_one_that_is_none_is_left_out(server: ScriptedOwner) -> None:
    server.answer = saying(result="gone", text="x" * (TEXT_MAX + 1))
    assert delete(owner_of(server)).text == "x" * TEXT_MAX
    server.answer = saying(result="gone", text=5)
    assert delete(owner_of(server)).text == ""


@pytest.mark.parametrize("answer", list(InUseAnswer))
def test_each_answer_to_the_question_is_known(server: ScriptedOwner, answer: InUseAnswer) -> None:
    server.answer = saying(result=answer.value)
    assert owner_of(server).ask_in_use(TOPIC, LEDGER) is answer


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is not JSON"),
        (b"deleted", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 50_000, "is not JSON"),
        (b'"deleted"', "no JSON object"),
        (b"{}", "no result"),
        (b'{"result": true}', "no result"),
        (b'{"result": "DELETED"}', "'DELETED' is none of deleted, gone, in_use, mismatch, malformed"),
        (b'{"result": "not_in_use"}', "is none of"),
        (b'{"result": "deleted", "text": "' + b"x" * ANSWER_BYTES_MAX + b'"}', "more than 65536 bytes"),
    ],
)
def test_an_answer_that_is_none_may_have_deleted(server: ScriptedOwner, body: bytes, says: str) -> None:
    server.answer = answering("200 OK", body)
    failed = failure(owner_of(server))
    assert says in failed.reason
    assert failed.maybe_deleted


@pytest.mark.parametrize(
    ("status", "maybe_deleted"),
    [
        ("201 Created", True),
        ("202 Accepted", True),
        ("204 No Content", True),
        ("400 Bad Request", False),
        ("401 Unauthorized", False),
        ("403 Forbidden", False),
        ("404 Not Found", False),
        ("409 Conflict", False),
        ("429 Too Many Requests", False),
        ("500 Internal Server Error", True),
        ("503 Service Unavailable", True),
        ("504 Gateway Timeout", True),
    ],
)
def test_another_status_is_a_failure_whatever_the_body_says(
    server: ScriptedOwner, status: str, maybe_deleted: bool
) -> None:
    body = b"" if status.startswith("204") else b'{"result": "deleted"}'
    server.answer = answering(status, body, "Retry-After: 0")
    failed = failure(owner_of(server))
    assert f"status {status[:3]}" in failed.reason
    assert failed.maybe_deleted is maybe_deleted
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_a_redirect_is_not_followed_and_the_token_goes_nowhere(
    server: ScriptedOwner, tmp_path: Path, status: str
) -> None:
    (tmp_path / "token").write_text("Bearer secret")
    with ScriptedOwner(saying(result="deleted")) as elsewhere:
        server.answer = answering(status, b"", f"Location: {elsewhere.url('/delete')}")
        failed = failure(owner_of(server, authorization_file=str(tmp_path / "token")))
        assert f"status {status[:3]}" in failed.reason
        assert failed.maybe_deleted
        assert elsewhere.requests == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"result": "deleted"}',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\x00" * 100,
    ],
)
def test_an_answer_that_is_cut_off_or_no_http_may_have_deleted_and_is_not_asked_for_again(
    server: ScriptedOwner, data: bytes
) -> None:
    server.answer = sending(data)
    assert failure(owner_of(server)).maybe_deleted
    assert len(server.requests) == 1


def test_an_owner_that_hangs_may_have_deleted(server: ScriptedOwner) -> None:
    server.answer = lambda connection: _wait(server.closing)
    failed = failure(owner_of(server, timeout_s=0.2))
    assert "ReadTimeoutError" in failed.reason
    assert failed.maybe_deleted


def test_an_owner_that_answers_byte_by_byte_is_not_waited_for_longer_than_is_allowed(server: ScriptedOwner) -> None:
    """Each byte comes in time, the whole of them does not."""
    sent = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
        for _ in range(60_000):
            connection.sendall(b" ")
            sent.set()
            if server.closing.wait(0.001):
                return

    server.answer = drip
    seconds = itertools.count()
    owner = Owner(owner_of(server).entry, clock=lambda: float(next(seconds)))
    failed = failure(owner)
    assert f"longer than {PROMPT_S:g} s" in failed.reason
    assert failed.maybe_deleted
    assert sent.is_set()


def test_where_nobody_listens_nothing_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "no-such-host.invalid"):
        entry = settings.DeletionOwner(name="brokers", topic_prefixes=("",), delete_url=f"http://{host}/", timeout_s=5)
        failed = failure(Owner(entry))
        assert not failed.maybe_deleted, failed.reason


def test_a_connection_that_does_not_come_about_in_time_was_not_used() -> None:
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # Nobody accepts: when the queue is full, whoever comes next waits.
        for _ in range(3):
            connection = waiting.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/"
        entry = settings.DeletionOwner(name="brokers", topic_prefixes=("",), delete_url=url, timeout_s=0.3)
        failed = failure(Owner(entry))
        assert "ConnectTimeoutError" in failed.reason
        assert not failed.maybe_deleted


def test_an_owner_whose_certificate_is_not_believed_is_told_nothing(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_certificate(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[bytes] = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                received.append(secure.recv(1000))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        entry = settings.DeletionOwner(name="brokers", topic_prefixes=("",), delete_url=url, timeout_s=PROMPT_S)
        failed = failure(Owner(entry))
        thread.join(PROMPT_S)
    assert re.search("certificate verify failed", failed.reason, re.IGNORECASE)
    assert not failed.maybe_deleted
    assert received in ([], [b""])


# Order, and the question


def test_the_guard_speaks_before_the_owner_is_told(server: ScriptedOwner) -> None:
    def refuse() -> None:
        raise DeletionFailed("not now", maybe_deleted=False)

    owner = owner_of(server)
    with pytest.raises(DeletionFailed, match="not now") as failed:
        owner.delete(TOPIC, LEDGER, refuse, lambda step: None)
    assert not failed.value.maybe_deleted
    assert server.requests == []
    steps: list[str] = []
    owner.delete(TOPIC, LEDGER, lambda: steps.append("guard"), steps.append)
    assert steps == ["deletion.before_verify", "deletion.after_verify", "guard", "deletion.after_delete"]


def test_a_question_that_fails_has_deleted_nothing(server: ScriptedOwner) -> None:
    owner = owner_of(server, timeout_s=0.2)
    for answer in (
        saying(result="deleted"),
        saying(result="perhaps"),
        answering("500 Oops", b""),
        sending(b""),
        lambda connection: _wait(server.closing),
    ):
        server.answer = answer
        with pytest.raises(DeletionFailed, match="owner brokers") as failed:
            owner.ask_in_use(TOPIC, LEDGER)
        assert not failed.value.maybe_deleted


def test_many_threads_may_ask_one_owner(server: ScriptedOwner) -> None:
    barrier = threading.Barrier(8)
    owner = owner_of(server)
    answers: list[Answer] = []

    def ask() -> None:
        barrier.wait(PROMPT_S)
        answers.append(delete(owner))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMPT_S)
    assert [answer.outcome for answer in answers] == [DeletionOutcome.DELETED] * 8
    owner.close()
    owner.close()


def _wait(ended: threading.Event) -> None:
    assert ended.wait(PROMPT_S)


def _certificate(folder: Path) -> Path:
    """A certificate that nobody has signed but itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = folder / "owner.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path
