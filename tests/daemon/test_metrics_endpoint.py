"""Scrapes over HTTPS, for those who show the token of an identity that may see every topic."""

from __future__ import annotations

import contextlib
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import config, metrics, metrics_endpoint
from daemon.auth import Door
from tests._support.door_files import DoorFiles, door_files, identity, token_of

TIMEOUT_S = 300


@pytest.fixture
def files(tmp_path: Path) -> DoorFiles:
    return door_files(
        tmp_path,
        identity("scraper", ["inspect"], [""]),
        identity("other-scope", ["admin"], [""]),
        identity("own-topics", ["inspect"], ["own/"]),
    )


@contextlib.contextmanager
def serving(files: DoorFiles) -> Iterator[tuple[Door, int]]:
    settings = config.load(environment={}, overrides=files.settings())
    door = Door(settings.tls, settings.access)
    endpoint = metrics_endpoint.Endpoint(
        metrics.Metrics().registry,
        host="127.0.0.1",
        port=0,
        certificates=lambda: door.certificates,
        identities=lambda: door.identities,
    )
    try:
        yield door, endpoint.port
    finally:
        endpoint.close()


def scrape(files: DoorFiles, port: int, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    request = urllib.request.Request(f"https://localhost:{port}/metrics", headers=headers)
    try:
        context = ssl.create_default_context(cafile=files.ca)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            status, body = int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read()
    assert (b"tarry_serving" in body) == (status == 200)
    return status


def test_a_scrape_needs_the_token_of_who_may_see_every_topic(files: DoorFiles) -> None:
    with serving(files) as (_, port):
        given = [None, "Bearer unknown", *(f"Bearer {token_of(name)}" for name in ("other-scope", "own-topics"))]
        assert [scrape(files, port, each) for each in given] == [401, 401, 403, 403]
        assert scrape(files, port, f"Bearer {token_of('scraper')}") == 200


def test_a_silent_caller_keeps_nobody_waiting(files: DoorFiles) -> None:
    with serving(files) as (_, port), socket.create_connection(("127.0.0.1", port)):
        assert scrape(files, port, f"Bearer {token_of('scraper')}") == 200


def test_the_next_connection_has_the_next_certificate_and_the_next_identities(files: DoorFiles) -> None:
    with serving(files) as (door, port):
        files.issue()
        files.admit(identity("next", ["inspect"], [""]))
        for watched in (door._certificates, door._identities):
            assert watched is not None
            assert (watched.look(), watched.look()) == (None, True)
        shown = ssl.get_server_certificate(("localhost", port), ca_certs=str(files.ca), timeout=TIMEOUT_S)
        assert shown.split() == files.cert.read_text().split()
        given = (token_of("scraper"), token_of("next"))
        assert [scrape(files, port, f"Bearer {each}") for each in given] == [401, 200]
