"""Stores objects on S3, or on a server that speaks its protocol, through boto3.

boto3 repeats no request. A repeated conditional PUT whose first answer was lost gets the answer that the object exists,
and boto3 would hide that there was a first one. Everything else is repeated here, as a whole: boto3 does not read again
a body that was cut off, and it gives up at once when many requests have failed of late (its quota of retries).

409 and 412 mean the same: some servers answer the loser of two overlapping writes with the one, some with the other,
and a 409 does not even say that a writer won. The caller decides by `head`.

Listing a directory bucket (S3 Express) needs prefixes that end in `/`, and shows keys in no order.

`StoreClock` turns the `Date` headers of many answers, cut to whole seconds, into one narrow range for the store's time.
The module stands alone because importing it loads the AWS SDK; `store_opening` does that only for a store on S3.
"""

from __future__ import annotations

import email.utils
import random
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

import boto3.session
from botocore import exceptions as botocore_errors
from botocore.config import Config
from botocore.parsers import ResponseParserError
from urllib3 import exceptions as urllib3_errors

from storage_backends import object_store
from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    Bucket,
    Damaged,
    ListedObject,
    NotFound,
    ObjectInfo,
    ObjectStore,
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    check_key,
    check_metadata,
    check_prefix,
    check_range,
)

if TYPE_CHECKING:
    from botocore.awsrequest import AWSPreparedRequest
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2RequestTypeDef

DATE_RESOLUTION_S: Final = 1.0
"""The resolution of a `Date` header (seconds)"""

READING_S: Final = 60.0
"""Longest time whose answers make one range (seconds): clocks drift, and are set right."""


class StoreClock:
    """The difference between the store's clock and this machine's.

    Thread-safe. Each answer bounds it: the store wrote its time after the request was sent and before the answer came.
    Bounds of successive answers are intersected: the first one leaves a second and the time that it took, some more
    leave little beyond the time of the fastest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._least_s = self._most_s = 0.0
        self._began_s: float | None = None
        self._last: tuple[float, float] | None = None

    def answered(self, date_s: float, *, sent_s: float, received_s: float) -> None:
        """Take the `Date` of an answer.

        `date_s` is Unix time of the store, `sent_s` and `received_s` of this machine (seconds).
        """
        least_s, most_s = date_s - received_s, date_s + DATE_RESOLUTION_S - sent_s
        with self._lock:
            narrow = max(self._least_s, least_s), min(self._most_s, most_s)
            fresh = self._began_s is not None and 0.0 <= received_s - self._began_s < READING_S
            if not fresh or narrow[0] > narrow[1]:
                if fresh:
                    # One of the clocks was set.
                    self._last = None
                elif self._began_s is not None:
                    self._last = self._least_s, self._most_s
                self._began_s, narrow = received_s, (least_s, most_s)
            self._least_s, self._most_s = narrow

    def skew_s(self) -> float | None:
        """Return the store's time minus this machine's (seconds), or None before the first answer.

        It is the middle of the narrower range: the one that is being measured, or the one before it.
        """
        with self._lock:
            if self._began_s is None:
                return None
            ranges = [(self._least_s, self._most_s), *([] if self._last is None else [self._last])]
            least_s, most_s = min(ranges, key=lambda each: each[1] - each[0])
            return (least_s + most_s) / 2


T = TypeVar("T")

# The first and the longest delay before a retry (seconds)
_FIRST_DELAY_S: Final = 0.1
_LAST_DELAY_S: Final = 2.0
# Time after the first try in which another may begin (seconds): tries that time out are few, those answered 503 many.
_AGAIN_WITHIN_S: Final = 20.0

# The request was not sent, because no connection was made.
_NOT_SENT: Final = (
    botocore_errors.EndpointConnectionError,
    botocore_errors.ConnectTimeoutError,
    botocore_errors.ProxyConnectionError,
)
# The request was or may have been sent, and the answer did not come or was cut off.
_TRANSPORT: Final = (
    botocore_errors.HTTPClientError,
    botocore_errors.ConnectionError,
    botocore_errors.IncompleteReadError,
    ResponseParserError,
    urllib3_errors.HTTPError,
    OSError,
)
# Answers 4xx that mean "try again"
_PASSING_CODES: Final = frozenset({"RequestTimeout", "SlowDown", "Throttling", "OperationAborted"})
_PASSING_STATUS: Final = frozenset({408, 409, 425, 429})


@dataclass(frozen=True, slots=True)
class S3Settings:
    """The address of the store, and how to speak to it.

    `prefix` stands before every key: whole parts without a slash at either end, or empty. `endpoint_url` is that of a
    server that is not AWS, such as `http://127.0.0.1:9000`. If `access_key_id`, `secret_access_key` and `session_token`
    are None, boto3's own chain applies (environment, profile, instance). `addressing_style` `auto` puts the bucket into
    the path for an `endpoint_url`, and lets boto3 choose for AWS. `checksums` are those that boto3 adds to requests and
    checks in answers; `auto` is `when_required` for an `endpoint_url`, because many look-alikes refuse what they do not
    know, and `when_supported` for AWS. `connect_timeout_s` and `read_timeout_s` apply to one try (seconds). `attempts`
    counts tries of everything but conditional writes, which are tried once; fewer are made if tries take long, since
    none begins more than 20 s after the first. `connections_max` limits the open connections of each of the two
    clients, and so the threads that wait for the store. `list_page_keys` limits the keys in one answer to a listing, at
    most 1,000.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str = "us-east-1"
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    checksums: Literal["auto", "when_required", "when_supported"] = "auto"
    connect_timeout_s: float = 1.0
    read_timeout_s: float = 5.0
    attempts: int = 12
    connections_max: int = 32
    list_page_keys: int = 1000

    def __post_init__(self) -> None:
        if self.prefix:
            check_key(self.prefix)
        if not self.bucket:
            raise ValueError("bucket is empty; it must be a name")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("give both access_key_id and secret_access_key, or neither")
        for name in ("attempts", "connections_max", "list_page_keys"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.list_page_keys > 1000:
            raise ValueError(f"list_page_keys is {self.list_page_keys}; it must be at most 1000")


class S3Store(ObjectStore):
    """The objects beneath a prefix of a bucket.

    The bucket must exist. `wall_clock` returns this machine's Unix time (seconds), to compare the store's with. `sleep`
    waits between two tries, and `monotonic` (seconds) ends them.
    """

    def __init__(
        self,
        settings: S3Settings,
        *,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings: Final = settings
        self._bucket: Final = settings.bucket
        self._front: Final = f"{settings.prefix}/" if settings.prefix else ""
        session = boto3.session.Session()
        self._sleep = sleep
        self._monotonic = monotonic
        # Reads must not wait for the connections that make decisions durable.
        self._conditional: Final = _client(session, settings)
        self._data: Final = _client(session, settings)
        # Each racing thread has its own `wait`.
        self._at_the_line = threading.local()
        self._conditional.meta.events.register("before-send.s3", self._wait_at_the_line)
        self._clock: Final = _ClockReader(wall_clock)
        self._counting: Final = threading.Lock()
        self._sent: Final = Counter(dict.fromkeys(("GET", "HEAD", "LIST", "PUT", "DELETE"), 0))
        for client in (self._conditional, self._data):
            self._clock.read_answers_of(client)
            client.meta.events.register("before-send.s3", self._count)

    @property
    def bucket(self) -> Bucket:
        # The URL that requests go to: the environment or a profile may name it, too.
        url = urllib.parse.urlsplit(self._conditional.meta.endpoint_url)
        return Bucket(f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}", self._bucket)

    def clock_skew_s(self) -> float | None:
        return self._clock.read.skew_s()

    @property
    def requests_sent(self) -> Mapping[str, int]:
        with self._counting:
            return dict(self._sent)

    def _count(self, *, event_name: str, request: AWSPreparedRequest, **_: object) -> None:
        # A listing is a GET with a price of its own.
        kind = "LIST" if event_name.endswith(".ListObjectsV2") else request.method
        with self._counting:
            self._sent[kind] += 1

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        check_key(key)
        check_metadata(metadata)
        self._repeated(
            key,
            lambda: self._data.put_object(
                Bucket=self._bucket, Key=self._front + key, Body=body, Metadata=dict(metadata)
            ),
        )

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        check_key(key)
        check_metadata(metadata)
        try:
            self._conditional.put_object(
                Bucket=self._bucket, Key=self._front + key, Body=body, Metadata=dict(metadata), IfNoneMatch="*"
            )
        except (botocore_errors.ClientError, botocore_errors.BotoCoreError, *_TRANSPORT) as error:
            _raise_for_conditional(key, error)

    def race_put_if_absent(
        self, key: str, body: bytes, *, metadata: Mapping[str, str], at_the_line: Callable[[], None]
    ) -> None:
        vars(self._at_the_line)["wait"] = at_the_line
        try:
            self.put_if_absent(key, body, metadata=metadata)
        finally:
            vars(self._at_the_line).clear()

    def _wait_at_the_line(self, **_: object) -> None:
        # A request that is redirected is sent again, and waits no second time.
        wait: Callable[[], None] | None = vars(self._at_the_line).pop("wait", None)
        if wait is not None:
            wait()

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        check_key(key)

        def read() -> tuple[bytes, Mapping[str, str]]:
            answer = self._data.get_object(Bucket=self._bucket, Key=self._front + key)
            with answer["Body"] as stream:
                return stream.read(), answer["Metadata"]

        return self._repeated(key, read)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_key(key)
        check_range(offset, length)

        def read() -> tuple[bytes, int]:
            answer = self._data.get_object(
                Bucket=self._bucket, Key=self._front + key, Range=f"bytes={offset}-{offset + length - 1}"
            )
            with answer["Body"] as stream:
                return stream.read(), answer["ResponseMetadata"]["HTTPStatusCode"]

        body, status = self._repeated(key, read)
        if status != 206:
            raise StoreRefused(key, f"the server ignores ranges: {len(body)} bytes for {length} from {offset}")
        if len(body) != length:
            raise Damaged(key, f"{len(body)} bytes came back for {length} from {offset}")
        return body

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        answer = self._repeated(key, lambda: self._data.head_object(Bucket=self._bucket, Key=self._front + key))
        return ObjectInfo(key, answer["ContentLength"], answer["Metadata"])

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def _list(self, prefix: str, start_after: str | None) -> Iterator[ListedObject]:
        request: ListObjectsV2RequestTypeDef = {
            "Bucket": self._bucket,
            "Prefix": self._front + prefix,
            "StartAfter": "" if start_after is None else self._front + start_after,
            "MaxKeys": self.settings.list_page_keys,
        }
        while True:
            page = self._repeated(prefix, lambda: self._data.list_objects_v2(**request))
            for found in page.get("Contents", ()):
                modified_ms = int(found["LastModified"].timestamp() * 1000)
                yield ListedObject(found["Key"].removeprefix(self._front), found["Size"], modified_ms)
            if not page["IsTruncated"]:
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._repeated(key, lambda: self._data.delete_object(Bucket=self._bucket, Key=self._front + key))
        except NotFound:
            return  # some look-alikes answer 404, S3 does not

    def _repeated(self, key: str, ask: Callable[[], T]) -> T:
        """Repeat a request, later each time, while its failure may be transient.

        Raises as `_translated` does, after as many tries as `attempts` and the time allow.
        """
        delays_s = object_store.delays_s(random.random, first_s=_FIRST_DELAY_S, last_s=_LAST_DELAY_S)
        last_begins_s = self._monotonic() + _AGAIN_WITHIN_S
        for _ in range(1, self.settings.attempts):
            try:
                with _translated(key):
                    return ask()
            except StoreUnavailable:
                delay_s = next(delays_s)
                if self._monotonic() + delay_s > last_begins_s:
                    raise
                self._sleep(delay_s)
        with _translated(key):
            return ask()

    def close(self) -> None:
        self._conditional.close()
        self._data.close()


class _ClockReader:
    """A reader of the `Date` of every answer, errors included, and of every try of a request."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self.read: Final = StoreClock()
        self._wall_clock = wall_clock
        # A request is sent and answered in one thread.
        self._of_thread = threading.local()

    def read_answers_of(self, client: S3Client) -> None:
        client.meta.events.register("before-send.s3", self._sending)
        client.meta.events.register("response-received.s3", self._received)

    def _sending(self, **_: object) -> None:
        self._of_thread.sent_s = self._wall_clock()

    def _received(self, *, response_dict: Mapping[str, Any] | None, **_: object) -> None:
        date = None if response_dict is None else response_dict["headers"].get("date")
        if date is None:
            return
        try:
            date_s = email.utils.parsedate_to_datetime(date).timestamp()
        except ValueError:
            return  # a look-alike that does not write dates as in RFC 9110
        self.read.answered(date_s, sent_s=self._of_thread.sent_s, received_s=self._wall_clock())


def _client(session: boto3.session.Session, settings: S3Settings) -> S3Client:
    own_server = settings.endpoint_url is not None
    checksums = settings.checksums
    if checksums == "auto":
        checksums = "when_required" if own_server else "when_supported"
    addressing_style = settings.addressing_style
    if addressing_style == "auto" and own_server:
        addressing_style = "path"
    config = Config(
        region_name=settings.region,
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=settings.connections_max,
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
        s3={"addressing_style": addressing_style},
    )
    return session.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=settings.secret_access_key,
        aws_session_token=settings.session_token,
        config=config,
    )


def _raise_for_conditional(key: str, error: Exception) -> NoReturn:
    """Raise the meaning of a failure for a write that was sent at most once.

    A write that is not known to have failed may have landed.
    """
    if isinstance(error, botocore_errors.ClientError):
        status, code, reason = _answer(error)
        if status in (409, 412):
            raise AlreadyExists(key, reason) from error
        if _is_refusal(status, code):
            raise StoreRefused(key, reason) from error
        raise OutcomeUnknown(key, reason) from error
    if isinstance(error, _NOT_SENT):
        raise StoreUnavailable(key, _describe(error)) from error
    if isinstance(error, _TRANSPORT):
        raise OutcomeUnknown(key, _describe(error)) from error
    raise StoreRefused(key, _describe(error)) from error


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Raise errors of boto3, for a request that may be repeated, as errors of the store."""
    try:
        yield
    except botocore_errors.ClientError as error:
        status, code, reason = _answer(error)
        if code == "NoSuchKey" or (status == 404 and code != "NoSuchBucket"):
            raise NotFound(key, "no such object") from error
        if status == 416:
            raise Damaged(key, f"the body ends before the range: {reason}") from error
        kind: type[StoreError] = StoreRefused if _is_refusal(status, code) else StoreUnavailable
        raise kind(key, reason) from error
    except (*_NOT_SENT, *_TRANSPORT) as error:
        raise StoreUnavailable(key, _describe(error)) from error
    except botocore_errors.BotoCoreError as error:
        raise StoreRefused(key, _describe(error)) from error


def _answer(error: botocore_errors.ClientError) -> tuple[int, str, str]:
    """Return status, code, and both in words."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    details = error.response.get("Error", {})
    code = details.get("Code", "")
    return status, code, f"the server answered {status} {code}: {details.get('Message', '')}"


def _is_refusal(status: int, code: str) -> bool:
    """Return whether the same request is never accepted: a redirect to elsewhere, a client's error, not implemented."""
    passing = status in _PASSING_STATUS or code in _PASSING_CODES
    return status == 501 or (300 <= status < 500 and not passing)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
