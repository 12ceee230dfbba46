"""An owner of ledgers who is asked by HTTP. `docs/DELETION.md` says what it has to do.

It is an implementation of the port `LedgerStore`, imported by `ledger_stores` alone so that the HTTP client is loaded
only if an owner is configured.

Every request has a connection of its own. An owner could close a kept connection just when it is used again, and it
would be unknown whether the request was seen. Redirects are not followed, so the authorization goes nowhere else. A
status 4xx means that nothing was deleted.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import urllib3
from urllib3 import exceptions

from daemon import settings
from daemon.core.deletions import ledger_metadata
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed, Guard, InUseAnswer, LedgerStore, Step
from storage_backends.formats.deletion_format import DeletionOutcome, PendingDelete

ANSWER_BYTES_MAX: Final = 64 << 10
TEXT_MAX: Final = 1000
AUTHORIZATION_BYTES_MAX: Final = 64 << 10

OUTCOMES: Final[Mapping[str, DeletionOutcome]] = {
    "deleted": DeletionOutcome.DELETED,
    "gone": DeletionOutcome.ALREADY_GONE,
    "in_use": DeletionOutcome.IN_USE,
    "mismatch": DeletionOutcome.METADATA_MISMATCH,
    "malformed": DeletionOutcome.MALFORMED,
}

# No connection was established, so nothing was sent.
_NOT_SENT: Final = (exceptions.NewConnectionError, exceptions.ConnectTimeoutError, exceptions.LocationValueError)
_READ_BYTES: Final = 16 << 10


class Owner(LedgerStore):
    """One owner. `clock` is monotonic (seconds)."""

    def __init__(self, entry: settings.DeletionOwner, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.entry: Final = entry
        self._clock = clock
        urls = (entry.delete_url, entry.in_use_url)
        by_tls = any(url is not None and url.lower().startswith("https:") for url in urls)
        # Reading this machine's trust store takes tens of milliseconds.
        self._tls: Final = ssl.create_default_context() if by_tls else None

    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step) -> Answer:
        step("deletion.before_verify")
        url = self.entry.delete_url
        if url is None:
            raise DeletionFailed(f"owner {self.entry.name} has no delete_url", maybe_deleted=False)
        request = self._request(topic, delete)
        # The owner verifies.
        step("deletion.after_verify")
        guard()
        result, text = self._post(url, request)
        if result not in OUTCOMES:
            raise self._failed(f"result {result!r} is none of {', '.join(OUTCOMES)}", maybe_deleted=True)
        step("deletion.after_delete")
        return Answer(OUTCOMES[result], text)

    def ask_in_use(self, topic: str, delete: PendingDelete) -> InUseAnswer:
        """Return the owner's answer about the ledger; it must have an `in_use_url`.

        Raise `DeletionFailed` on failure.
        """
        if self.entry.in_use_url is None:
            raise DeletionFailed(f"owner {self.entry.name} has no in_use_url", maybe_deleted=False)
        try:
            result, _ = self._post(self.entry.in_use_url, self._request(topic, delete))
        except DeletionFailed as error:
            raise DeletionFailed(error.reason, maybe_deleted=False) from error
        try:
            return InUseAnswer(result)
        except ValueError as error:
            known = ", ".join(answer.value for answer in InUseAnswer)
            raise self._failed(f"result {result!r} is none of {known}", maybe_deleted=False) from error

    def close(self) -> None:
        """Do nothing, since no connection is kept open."""

    def _failed(self, reason: str, *, maybe_deleted: bool) -> DeletionFailed:
        return DeletionFailed(f"owner {self.entry.name}: {reason}", maybe_deleted=maybe_deleted)

    def _request(self, topic: str, delete: PendingDelete) -> _Request:
        """Build body and headers of a request. Raise `DeletionFailed` if the authorization cannot be read."""
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": "tarryd",
            "Connection": "close",
        }
        authorization = self._authorization()
        if authorization is not None:
            headers["Authorization"] = authorization
        return json.dumps(body_of(topic, delete)).encode(), headers

    def _authorization(self) -> str | None:
        """Read the authorization file. Raise `DeletionFailed` on failure."""
        path = self.entry.authorization_file
        if path is None:
            return None
        try:
            with Path(path).open("rb") as file:
                value = file.read(AUTHORIZATION_BYTES_MAX + 1)
        except OSError as error:
            raise self._failed(f"authorization_file {path}: {error.strerror}", maybe_deleted=False) from error
        text = value.strip().decode("latin-1")
        if not text or not text.isascii() or not text.isprintable() or len(value) > AUTHORIZATION_BYTES_MAX:
            raise self._failed(
                f"authorization_file {path}: it must be one line of printable ASCII, "
                f"at most {AUTHORIZATION_BYTES_MAX} bytes",
                maybe_deleted=False,
            )
        return text

    def _post(self, url: str, request: _Request) -> tuple[str, str]:
        """Return `result` and `text` of the answer. Raise `DeletionFailed` on failure."""
        body, headers = request
        timeout_s = self.entry.timeout_s
        try:
            with urllib3.PoolManager(retries=False, ssl_context=self._tls) as connections:
                answer = connections.request(
                    "POST",
                    url,
                    body=body,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                )
                with contextlib.closing(answer):
                    found = self._read(answer, self._clock() + timeout_s)
        except exceptions.HTTPError as error:
            raise self._failed(f"{type(error).__name__}: {error}", maybe_deleted=_may_be_sent(error)) from error
        if answer.status != 200:
            raise self._failed(
                f"status {answer.status}: {found[:TEXT_MAX].decode('utf-8', 'replace')}",
                maybe_deleted=not 400 <= answer.status < 500,
            )
        return self._result(found)

    def _read(self, answer: urllib3.BaseHTTPResponse, until_s: float) -> bytes:
        """Read the body of the answer, at most a byte more than allowed. Each read has the request's own time-out."""
        parts = bytearray()
        while len(parts) <= ANSWER_BYTES_MAX:
            part = answer.read1(min(_READ_BYTES, ANSWER_BYTES_MAX + 1 - len(parts)))
            if not part:
                break
            parts += part
            if self._clock() > until_s:
                raise self._failed(f"the answer took longer than {self.entry.timeout_s:g} s", maybe_deleted=True)
        return bytes(parts)

    def _result(self, body: bytes) -> tuple[str, str]:
        if len(body) > ANSWER_BYTES_MAX:
            raise self._failed(f"the answer has more than {ANSWER_BYTES_MAX} bytes", maybe_deleted=True)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise self._failed(f"the answer is not JSON: {body[:100]!r}", maybe_deleted=True) from error
        if not isinstance(answer, dict):
            raise self._failed(f"the answer is no JSON object: {body[:100]!r}", maybe_deleted=True)
        result, text = answer.get("result"), answer.get("text")
        if not isinstance(result, str):
            raise self._failed(f"the answer has no result that is a text: {body[:100]!r}", maybe_deleted=True)
        return result, text[:TEXT_MAX] if isinstance(text, str) else ""


_Request: TypeAlias = tuple[bytes, Mapping[str, str]]
"""Body and headers"""


def _may_be_sent(error: exceptions.HTTPError) -> bool:
    """Return whether the owner may have seen the request.

    It has not if no connection was established, or if the owner's certificate was not trusted.
    """
    if isinstance(error, exceptions.SSLError):
        return not any(isinstance(cause, ssl.SSLCertVerificationError) for cause in (*error.args, error.__cause__))
    return not isinstance(error, _NOT_SENT)


def body_of(topic: str, delete: PendingDelete) -> dict[str, object]:
    """Describe a record for an owner. 64-bit numbers are decimal strings, since not every JSON reader supports them."""
    context = delete.offload_context
    return {
        "topic": topic,
        "component": delete.component.name.lower(),
        "cursor_name": delete.cursor_name,
        "schema_id": delete.schema_id,
        "ledger_type": delete.ledger_type.name.lower(),
        "ledger_id": str(delete.ledger_id),
        "offload_context": None
        if context is None
        else {
            "uuid": ledger_metadata.uuid_text(context.uuid_msb, context.uuid_lsb),
            "driver_name": context.driver_name,
            "driver_metadata": dict(context.driver_metadata),
        },
        "metadata": ledger_metadata.table(topic, delete),
    }
