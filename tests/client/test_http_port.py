"""The HTTP ports of the daemon and of the relay keep their limits, whatever callers do."""

from __future__ import annotations

import contextlib
import functools
import gc
import gzip
import io
import itertools
import json
import logging
import threading
import time
import types
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry, Gauge

from daemon import metrics_endpoint
from tarry import http_port
from tarry_relay import status_endpoint
from tarry_relay.health import Health
from tarry_relay.relay_metrics import RelayMetrics
from tests._support.hostile_callers import ASK, TIMEOUT_S, connected, crowd, is_ended, reset, scraped

SERIES = 2_000


@functools.cache
def _many_series() -> Gauge:
    """4 MB: more than the buffers of a connection hold."""
    gauge = Gauge("many", "Many series.", ["name"], registry=None)
    for number in range(SERIES):
        gauge.labels(f"{number:02000}").set(number)
    return gauge


@contextlib.contextmanager
def _of_daemon() -> Iterator[int]:
    registry = CollectorRegistry()
    registry.register(_many_series())
    endpoint = metrics_endpoint.Endpoint(registry, host="127.0.0.1", port=0)
    try:
        yield endpoint.port
    finally:
        endpoint.close()


@contextlib.contextmanager
def _of_relay() -> Iterator[int]:
    metrics = RelayMetrics(Health())
    metrics.registry.register(_many_series())
    with status_endpoint.serving("127.0.0.1:0", metrics) as address:
        assert address is not None
        yield int(address.rpartition(":")[2])


@pytest.fixture(params=[_of_daemon, _of_relay], ids=["daemon", "relay"])
def port(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[int]:
    with request.param() as found:
        yield found
    # A task of the port that has failed is logged when it is collected.
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.records]
    assert [record for record in records if record.levelno >= logging.WARNING] == []


def test_a_crowd_of_silent_callers_takes_no_thread_and_keeps_no_scrape_waiting(port: int) -> None:
    threads = threading.active_count()
    with crowd(port, 3 * http_port.CONNECTIONS_MAX) as callers:
        assert scraped(port).count(b"many{") == SERIES
        assert threading.active_count() == threads
        # The scrape and the last ones had room because the first ones were ended.
        assert all(is_ended(each) for each in callers[: 2 * http_port.CONNECTIONS_MAX])


@pytest.mark.parametrize("sent", [b"", ASK], ids=["a request", "an answer"])
def test_no_caller_keeps_a_connection_by_taking_its_time_for(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "CONNECTION_MAX_S", 0.3)
    with connected(port) as caller:
        caller.sendall(sent)
        # The caller goes on saying something, and reads nothing.
        for _ in range(TIMEOUT_S * 100):
            try:
                caller.sendall(b"x")
            except ConnectionError:
                return
            time.sleep(0.01)
    pytest.fail("the connection was kept")


def test_a_caller_that_resets_with_unread_answers_is_not_told_of(
    port: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(20):
        caller = connected(port)
        caller.sendall(ASK)
        caller.recv(1)
        reset(caller)
    scraped(port)
    assert (capfd.readouterr().err, caplog.text) == ("", "")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"y" * (1 << 20), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (b"GET /other HTTP/1.0\r\n\r\n", HTTPStatus.NOT_FOUND),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"\xff\xfe\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"PRI * HTTP/2.0\r\n\r\n", HTTPStatus.BAD_REQUEST),
    ],
    ids=["long", "many", "path", "method", "bytes", "version"],
)
def test_other_requests_are_refused(port: int, sent: bytes, status: HTTPStatus) -> None:
    with connected(port) as caller:
        # The port may refuse a long request before all of it has been sent.
        with contextlib.suppress(ConnectionError):
            caller.sendall(sent)
        try:
            first = caller.recv(64)
        except ConnectionError:
            assert status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            return
    assert first.startswith(f"HTTP/1.1 {status.value} ".encode())


def test_a_head_request_has_the_length_and_no_body(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", method="HEAD")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert int(answer.headers["Content-Length"]) > SERIES
        assert answer.read() == b""


def test_a_scrape_may_be_compressed(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert gzip.GzipFile(fileobj=io.BytesIO(answer.read())).read().count(b"many{") == SERIES


def test_the_health_of_a_relay_that_cannot_go_on_is_503() -> None:
    health = Health()
    health.explain("source", "it is gone")
    with status_endpoint.serving("127.0.0.1:0", RelayMetrics(health)) as address:
        with pytest.raises(urllib.error.HTTPError) as failed:
            urllib.request.urlopen(f"http://{address}/health", timeout=TIMEOUT_S)
        with failed.value as answer:
            assert (answer.code, json.load(answer)["reasons"]) == (503, {"source": "it is gone"})


def test_a_page_that_takes_long_is_made_for_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(http_port, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    made = itertools.count()

    def make() -> http_port.Answer:
        nonlocal now_s
        now_s += 0.5
        return http_port.Answer(f"{next(made)}".encode())

    page = http_port._KeptPage(make)
    for _ in range(10_000):
        page.answer(gzipped=False)
        now_s += 0.01
    # 100 s of a flood, and the pages that may be made at once at its start
    assert now_s * 0.1 / 0.5 <= next(made) <= now_s * 0.1 / 0.5 + 2
    before = next(made)
    now_s += 1_000
    assert int(page.answer(gzipped=True).body[:1] == b"\x1f") == 1
    assert next(made) == before + 2


def test_a_page_that_cannot_be_made_is_an_error_that_is_logged_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr(http_port, "time", types.SimpleNamespace(monotonic=lambda: now_s))

    def make() -> http_port.Answer:
        nonlocal now_s
        now_s += 0.2
        raise ZeroDivisionError

    page = http_port._KeptPage(make)
    assert {page.answer(gzipped=False).status for _ in range(1_000)} == {HTTPStatus.INTERNAL_SERVER_ERROR}
    assert len(caplog.records) == 1
