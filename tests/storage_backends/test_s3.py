"""What only S3 does: settings, what the server's answers mean, which client repeats what."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator

import pytest

from storage_backends.object_store import (
    AlreadyExists,
    Bucket,
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from storage_backends.s3 import S3Settings, S3Store
from tests._support.lost_answer_proxy import Loss, LostAnswerProxy, lost_answer_proxy
from tests._support.moto_server import MotoServer, moto_server

# Requests, each with three tries in vain: boto3's quota of retries is over after a third of them.
BEYOND_THE_QUOTA = 100


def no_sleep(seconds: float) -> None:
    """What is waited for is not the time."""


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(moto: MotoServer) -> Iterator[LostAnswerProxy]:
    with lost_answer_proxy(moto.endpoint_url) as running:
        yield running


@pytest.fixture(scope="module")
def proxied(moto: MotoServer, proxy: LostAnswerProxy) -> Iterator[S3Store]:
    with S3Store(moto.settings("answers", endpoint_url=proxy.endpoint_url)) as store:
        yield store


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StoreRefused),
        (401, StoreRefused),
        (403, StoreRefused),
        (404, StoreRefused),
        (405, StoreRefused),
        (408, OutcomeUnknown),
        (409, AlreadyExists),
        (412, AlreadyExists),
        (429, OutcomeUnknown),
        (500, OutcomeUnknown),
        (501, StoreRefused),
        (502, OutcomeUnknown),
        (503, OutcomeUnknown),
        (504, OutcomeUnknown),
    ],
)
def test_each_answer_to_a_conditional_write_has_one_meaning(
    proxied: S3Store, proxy: LostAnswerProxy, status: int, kind: type[StoreError]
) -> None:
    before = proxy.conditional_puts
    proxy.answer_next_put_with(status)
    with pytest.raises(kind, match=rf"slot/{status}: .*{status}"):
        proxied.put_if_absent(f"slot/{status}", b"body", metadata={"commitid": "1"})
    assert proxy.conditional_puts == before + 1, "a conditional write is sent once"


def test_a_server_that_cannot_be_connected_to_has_done_nothing() -> None:
    with socket.socket() as unused:  # bound and not listening: a connection is refused
        unused.bind(("127.0.0.1", 0))
        settings = S3Settings(bucket="b", endpoint_url=f"http://127.0.0.1:{unused.getsockname()[1]}", attempts=1)
        with S3Store(settings) as store:
            for operation in (
                lambda: store.put_if_absent("slot", b"", metadata={}),
                lambda: store.put("slot", b""),
                lambda: store.get("slot"),
                lambda: store.get_range("slot", 0, 1),
                lambda: store.head("slot"),
                lambda: list(store.list("")),
                lambda: store.delete("slot"),
            ):
                with pytest.raises(StoreUnavailable, match="EndpointConnectionError"):
                    operation()


def test_a_server_that_accepts_and_says_nothing_leaves_a_conditional_write_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = S3Settings(
            bucket="b", endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}", attempts=1, read_timeout_s=0.2
        )
        with S3Store(settings) as store:
            with pytest.raises(OutcomeUnknown, match="ReadTimeoutError"):
                store.put_if_absent("slot", b"", metadata={})
            with pytest.raises(StoreUnavailable, match="ReadTimeoutError"):
                store.head("slot")


def test_a_bucket_is_named_by_the_server_that_is_asked_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, endpoint in (
        ("http://user:secret@127.0.0.1:9000/s3?token=secret", "http://127.0.0.1:9000/s3"),
        ("https://[::1]:9000", "https://[::1]:9000"),
        (None, "https://s3.eu-central-1.amazonaws.com"),
    ):
        with S3Store(S3Settings(bucket="orders", endpoint_url=url, region="eu-central-1")) as store:
            assert store.bucket == Bucket(endpoint, "orders")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9001")
    with S3Store(S3Settings(bucket="orders")) as store:
        assert store.bucket == Bucket("http://127.0.0.1:9001", "orders")


def test_everything_but_conditional_writes_is_repeated(moto: MotoServer) -> None:
    with (
        lost_answer_proxy(moto.endpoint_url) as proxy,
        S3Store(moto.settings("answers", endpoint_url=proxy.endpoint_url, prefix="repeated", attempts=2)) as store,
    ):
        proxy.drop_next_answer("PUT")
        store.put("a", b"body")
        assert proxy.requests["PUT"] == 2
        proxy.drop_next_answer("GET")
        assert store.get("a") == b"body"
        proxy.drop_next_answer("DELETE")
        store.delete("a")
        proxy.drop_next_answer("HEAD", count=2)
        with pytest.raises(StoreUnavailable, match="ConnectionClosedError"):
            store.head("a")
        assert proxy.requests == {"PUT": 2, "GET": 2, "DELETE": 2, "HEAD": 2}
        assert proxy.lost_answers == 5


def test_every_request_that_is_sent_is_counted_by_its_kind(moto: MotoServer) -> None:
    with (
        lost_answer_proxy(moto.endpoint_url) as proxy,
        S3Store(
            moto.settings("answers", endpoint_url=proxy.endpoint_url, prefix="counted", list_page_keys=2),
            sleep=no_sleep,
        ) as store,
    ):
        assert store.requests_sent == {"GET": 0, "HEAD": 0, "LIST": 0, "PUT": 0, "DELETE": 0}
        for key in ("a", "b", "c"):
            store.put_if_absent(key, b"body", metadata={})
        with pytest.raises(AlreadyExists):
            store.put_if_absent("a", b"body", metadata={})
        store.put("d", b"body")
        proxy.drop_next_answer("GET", count=2)
        assert store.get("a") == b"body"
        store.get_range("a", 0, 1)
        store.head("a")
        assert len(list(store.list(""))) == 4
        store.delete("a")
        assert store.requests_sent == {"GET": 4, "HEAD": 1, "LIST": 2, "PUT": 5, "DELETE": 1}
        assert proxy.requests == {"GET": 6, "HEAD": 1, "PUT": 5, "DELETE": 1}


def test_a_read_comes_through_where_most_answers_are_503_and_gives_up_after_its_tries(moto: MotoServer) -> None:
    with (
        lost_answer_proxy(moto.endpoint_url) as proxy,
        S3Store(moto.settings("answers", endpoint_url=proxy.endpoint_url, prefix="busy"), sleep=no_sleep) as store,
    ):
        store.put("a", b"body")
        tries = store.settings.attempts
        proxy.answer_next_with("GET", 503, count=tries - 1)
        assert store.get("a") == b"body"
        assert proxy.requests["GET"] == tries
        proxy.answer_next_with("GET", 503, count=tries)
        with pytest.raises(StoreUnavailable, match="503"):
            store.get("a")
        assert proxy.requests["GET"] == 2 * tries


def test_no_try_begins_long_after_the_first(moto: MotoServer) -> None:
    """Each of these takes six seconds, as one that times out does: not as many are made as there may be."""
    now_s = [0.0]

    def later() -> float:
        now_s[0] += 6.0
        return now_s[0]

    with (
        lost_answer_proxy(moto.endpoint_url) as proxy,
        S3Store(
            moto.settings("answers", endpoint_url=proxy.endpoint_url, prefix="slow"), sleep=no_sleep, monotonic=later
        ) as store,
    ):
        proxy.answer_next_with("HEAD", 503, count=store.settings.attempts)
        with pytest.raises(StoreUnavailable, match="503"):
            store.head("a")
        assert proxy.requests["HEAD"] == 4


def test_a_body_that_is_cut_off_is_read_again_as_a_whole(moto: MotoServer) -> None:
    with (
        lost_answer_proxy(moto.endpoint_url) as proxy,
        S3Store(moto.settings("answers", endpoint_url=proxy.endpoint_url, prefix="cut"), sleep=no_sleep) as store,
    ):
        store.put("a", b"0123456789")
        proxy.drop_next_answer("GET", loss=Loss.CUT)
        assert store.get("a") == b"0123456789"
        proxy.drop_next_answer("GET", loss=Loss.CUT)
        assert store.get_range("a", 2, 4) == b"2345"
        proxy.drop_next_answer("GET", loss=Loss.CUT)
        assert [found.key for found in store.list("")] == ["a"]
        assert (proxy.requests["GET"], proxy.lost_answers) == (6, 3)
        proxy.drop_next_answer("GET", count=store.settings.attempts, loss=Loss.CUT)
        with pytest.raises(StoreUnavailable):
            store.get("a")


def test_a_page_of_a_listing_that_fails_is_asked_for_again_and_no_key_comes_twice(moto: MotoServer) -> None:
    settings = moto.settings("answers", prefix="pages", list_page_keys=2)
    keys = [f"key-{number}" for number in range(5)]
    with (
        lost_answer_proxy(moto.endpoint_url) as proxy,
        S3Store(dataclasses.replace(settings, endpoint_url=proxy.endpoint_url), sleep=no_sleep) as store,
    ):
        for key in keys:
            store.put(key, b"")
        listing = store.list("")
        found = [next(listing), next(listing)]
        proxy.answer_next_with("GET", 503, count=2)
        found += listing
        assert [each.key for each in found] == keys
        assert proxy.requests["GET"] == 5
        assert [each.key for each in store.list("", start_after="key-2")] == ["key-3", "key-4"]


def test_each_request_has_its_tries_however_many_have_failed_of_late(moto: MotoServer) -> None:
    slept: list[float] = []
    with (
        lost_answer_proxy(moto.endpoint_url) as proxy,
        S3Store(moto.settings("answers", endpoint_url=proxy.endpoint_url, prefix="busy"), sleep=slept.append) as store,
    ):
        store.put("a", b"body")
        for _ in range(BEYOND_THE_QUOTA):
            proxy.answer_next_with("GET", 503, count=3)
            assert store.get("a") == b"body"
    assert len(slept) == 3 * BEYOND_THE_QUOTA
    for first, second, third in zip(slept[::3], slept[1::3], slept[2::3], strict=True):
        assert 0.05 <= first <= 0.1 <= second <= 0.2 <= third <= 0.4


def test_a_bucket_that_does_not_exist_is_a_refusal(moto: MotoServer) -> None:
    with S3Store(dataclasses.replace(moto.settings("answers"), bucket="nosuchbucket")) as store:
        with pytest.raises(StoreRefused, match="NoSuchBucket"):
            store.put_if_absent("slot", b"", metadata={})
        with pytest.raises(StoreRefused, match="NoSuchBucket"):
            store.get("slot")
        with pytest.raises(StoreRefused, match="NoSuchBucket"):
            list(store.list(""))


def test_objects_of_another_prefix_are_not_seen(moto: MotoServer) -> None:
    with (
        S3Store(moto.settings("prefixes", prefix="one")) as one,
        S3Store(moto.settings("prefixes", prefix="one/two")) as two,
        S3Store(moto.settings("prefixes")) as whole,
    ):
        one.put("a", b"1")
        two.put("a", b"2")
        assert [found.key for found in two.list("")] == ["a"]
        assert {found.key for found in one.list("")} == {"a", "two/a"}
        assert {found.key for found in whole.list("")} == {"one/a", "one/two/a"}
        assert whole.get("one/two/a") == b"2"


def test_checksums_and_addressing_follow_the_endpoint() -> None:
    with S3Store(S3Settings(bucket="b", endpoint_url="http://127.0.0.1:1")) as store:
        config = store._data.meta.config
        assert config.request_checksum_calculation == "when_required"  # type: ignore[attr-defined]
        assert config.s3 == {"addressing_style": "path"}  # type: ignore[attr-defined]
    with S3Store(S3Settings(bucket="b")) as store:
        config = store._data.meta.config
        assert config.request_checksum_calculation == "when_supported"  # type: ignore[attr-defined]
        assert config.s3 == {"addressing_style": "auto"}  # type: ignore[attr-defined]
    with S3Store(S3Settings(bucket="b", checksums="when_required", addressing_style="virtual")) as store:
        config = store._data.meta.config
        assert config.response_checksum_validation == "when_required"  # type: ignore[attr-defined]
        assert config.s3 == {"addressing_style": "virtual"}  # type: ignore[attr-defined]


def test_checksums_sent_with_every_request_are_understood(moto: MotoServer) -> None:
    with S3Store(moto.settings("answers", prefix="checked", checksums="when_supported")) as store:
        store.put("a", b"body")
        store.put_if_absent("b", b"body", metadata={"commitid": "1"})
        assert store.get("a") == store.get("b") == b"body"
        assert store.get_range("b", 1, 2) == b"od"


def test_secrets_are_not_shown() -> None:
    settings = S3Settings(bucket="b", access_key_id="id", secret_access_key="hidden", session_token="concealed")
    assert "hidden" not in repr(settings)
    assert "concealed" not in repr(settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bucket", ""),
        ("prefix", "/a"),
        ("prefix", "a/"),
        ("prefix", "a b"),
        ("access_key_id", "alone"),
        ("secret_access_key", "alone"),
        ("attempts", 0),
        ("connections_max", 0),
        ("list_page_keys", 0),
        ("list_page_keys", 1001),
    ],
)
def test_bad_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field}|key"):
        dataclasses.replace(S3Settings(bucket="b"), **{field: value})  # type: ignore[arg-type]
