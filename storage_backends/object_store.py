"""Defines the port to an object store, which everything durable is written to and read from.

It has the operations and their promises, the errors, and the rules for keys and metadata. `formats.names` lists the
keys, `commit` and the daemon's log decide what became of conditional writes, and `probe` looks for promises that a
store breaks.

Every implementation is synchronous and may be called from any number of threads.

Promised, by every implementation:
- `put_if_absent` has at most one winner for a key, whichever process or machine calls it.
- What a successful write stored survives a crash of the machine and is seen by every later `get`, `head` and `list`.
- An object found by `get`, `get_run`, `get_with_metadata` or `head` survives a crash of the machine too, whoever wrote
  it.
- An object is seen whole or not at all: a `put` over an existing key leaves the old object or the new one.
- `list` is complete: it shows every object that was there before it began and is not deleted while it runs.

Not promised:
- The order in which `list` shows keys; that a listed object still exists, or survives a crash, before `head` found it.
- That a deletion survives a power failure: a deleted object may reappear, with the bytes it had. (A local directory
  promises it if asked to, S3 does so anyway.)
- Anything about the order of two overlapping `put` calls to one key.
- That a key and a key beneath it (`a` and `a/b`) can both exist. A directory cannot hold both and refuses the second.
- That `get_range` finds damage inside the range: its caller has checksums of the parts it reads.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Final, Self

from storage_backends.formats.format_errors import FormatError, NewerFormat

KEY_BYTES_MAX: Final = 900
"""Longest key (bytes); S3 allows 1,024, and the store's own prefix needs its part of them."""

KEY_PART_BYTES_MAX: Final = 200
"""Longest part of a key between two slashes (bytes); a file name has at most 255."""

METADATA_BYTES_MAX: Final = 2048
"""Keys and values together (bytes); the limit of S3 for user metadata."""

NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})

_KEY_PART: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PREFIX: Final = re.compile(rf"(?:{_KEY_PART.pattern}/)*(?:{_KEY_PART.pattern})?")
_METADATA_KEY: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_METADATA_VALUE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")


class StoreError(Exception):
    """The failure of an operation of a store.

    `key` names the object or prefix, `reason` says what went wrong.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


class NotFound(StoreError):
    """The error for a key without an object."""


class AlreadyExists(StoreError):
    """The error for a key whose object exists or is being written.

    It may be the caller's own, of an earlier try; `head` shows that.
    """


class OutcomeUnknown(StoreError):
    """The error of a conditional write without an answer: it has landed, or lands later, or never."""


class StoreUnavailable(StoreError):
    """The failure of an operation that may succeed later.

    From `put_if_absent` it means that this try has not landed and never will. From `put` and `delete` it means nothing
    about what the store holds; both may be repeated.
    """


class StoreRefused(StoreError):
    """The failure of an operation that no retry helps.

    The reason is permissions, configuration, or a promise that the store breaks.
    """


class Damaged(StoreError):
    """The error of an object that differs from what was written, or is shorter than known; `reason` says where."""


class NewerObject(Damaged):
    """The error of an object that may be whole, but that only a newer release reads.

    It is refused as a damaged one is. Nothing takes its place: no older object, no loss that is recorded.
    """


def unreadable(key: str, error: FormatError, of: str = "") -> Damaged:
    """Return the error of an object whose content was not decoded; `of` comes before its reason."""
    kind = NewerObject if isinstance(error, NewerFormat) else Damaged
    return kind(key, f"{of}{error}")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The answer of `head` for an object. `size_bytes` is the size of the body."""

    key: str
    size_bytes: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ListedObject:
    """The answer of `list` for an object.

    `size_bytes` is what the store keeps for it: the body, or a little more. `modified_ms` is the time of the last write
    by the store's clock (Unix milliseconds); some stores know only the second.
    """

    key: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The bucket of a server that holds the objects of a store.

    `endpoint` is the URL of the server, without user, password and query.
    """

    endpoint: str
    name: str


class ObjectStore(ABC):
    """A store of objects by key.

    Keys must pass `check_key` and metadata `check_metadata`, else `ValueError` is raised. Any operation may raise
    `StoreUnavailable` or `StoreRefused`.
    """

    @abstractmethod
    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        """Store the object whether or not the key exists. May be repeated. For unique names and heartbeats."""

    @abstractmethod
    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        """Store the object if the key does not exist.

        It is sent once; nothing beneath this call repeats it. Raises `AlreadyExists`, or `OutcomeUnknown`: then the
        caller decides by `head` and its own metadata.
        """

    def race_put_if_absent(
        self, key: str, body: bytes, *, metadata: Mapping[str, str], at_the_line: Callable[[], None]
    ) -> None:
        """Do what `put_if_absent` does, and call `at_the_line` when nothing is left to do but to send the request.

        Writers that wait for each other there send at the same moment. It is not called if the write fails before that.
        """
        at_the_line()
        self.put_if_absent(key, body, metadata=metadata)

    @abstractmethod
    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        """Return the whole body and the metadata. Raises `NotFound`, `Damaged`."""

    def get(self, key: str) -> bytes:
        """Return the whole body. Raises `NotFound`, `Damaged`."""
        return self.get_with_metadata(key)[0]

    def get_run(self, keys: Sequence[str]) -> list[bytes]:
        """Return the whole bodies of these objects, up to the first that does not exist. Raises `Damaged`."""
        bodies = []
        for key in keys:
            try:
                bodies.append(self.get(key))
            except NotFound:
                break
        return bodies

    @property
    def reads_are_requests(self) -> bool:
        """True if a read waits for another machine, so that many reads should be in flight at once."""
        return True

    @property
    def folder(self) -> str | None:
        """The folder that holds all objects, or None if the store is no local directory."""
        return None

    @property
    def bucket(self) -> Bucket | None:
        """The bucket that holds all objects, or None if the store is on no server."""
        return None

    @abstractmethod
    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes (at least one) of the body from `offset` on.

        Raises `NotFound`, and `Damaged` if the body ends before that.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size and metadata. Raises `NotFound`, `Damaged`."""

    @abstractmethod
    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        """List every object whose key begins with `prefix` (any part of a key, or nothing), in no order.

        `start_after` restricts the list to keys above it.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object; succeeds if there is none."""

    def clock_skew_s(self) -> float | None:
        """Return the store's time minus this machine's (seconds), by recent answers, or None if it is unknown.

        Reads what is known: sends nothing, raises nothing.
        """
        return None

    @property
    def requests_sent(self) -> Mapping[str, int]:
        """The requests that were sent to a server, repeated ones included, by kind; empty if the store is on none.

        The kinds are those of S3's price list: GET, HEAD, LIST, PUT and DELETE. May be read in any thread.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close connections, files and locks; no operation may follow. May be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_key(key: str) -> None:
    """Check that a key is valid for every store; raise `ValueError` if not.

    The parts between slashes are of letters, digits and `._-`, none empty or beginning with a dot, and all short
    enough.
    """
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"key {key!r} has {len(key)} bytes; it must have at most {KEY_BYTES_MAX}")
    for part in key.split("/"):
        if _KEY_PART.fullmatch(part) is None:
            raise ValueError(
                f"key {key!r}: part {part!r} must be one or more of letters, digits, '.', '_', '-', not '.' first"
            )
        if len(part) > KEY_PART_BYTES_MAX:
            raise ValueError(f"key {key!r}: a part has {len(part)} bytes; it must have at most {KEY_PART_BYTES_MAX}")


def check_prefix(prefix: str) -> None:
    """Raise `ValueError` unless a key can begin with `prefix`: nothing, whole parts, or a part of a part."""
    if _PREFIX.fullmatch(prefix) is None:
        raise ValueError(
            f"prefix {prefix!r}: its parts must be one or more of letters, digits, '.', '_', '-', not '.' first"
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise `ValueError` unless every S3 look-alike returns the metadata unchanged.

    Keys are lower-case letters and digits with hyphens between them, values printable ASCII without blanks at their
    ends, and all of it is within `METADATA_BYTES_MAX`.
    """
    size_bytes = 0
    for name, value in metadata.items():
        if _METADATA_KEY.fullmatch(name) is None:
            raise ValueError(f"metadata key {name!r} must be lower-case letters and digits, with hyphens between them")
        if _METADATA_VALUE.fullmatch(value) is None:
            raise ValueError(f"metadata {name}={value!r} must be printable ASCII, not empty, without outer blanks")
        size_bytes += len(name) + len(value)
    if size_bytes > METADATA_BYTES_MAX:
        raise ValueError(f"metadata has {size_bytes} bytes; it must have at most {METADATA_BYTES_MAX}")


def check_range(offset: int, length: int) -> None:
    """Raise `ValueError` unless the range has at least one byte and does not begin before the body."""
    if offset < 0 or length < 1:
        raise ValueError(f"range is {length} bytes from {offset}; it must be at least one byte from 0 or above")


def delays_s(jitter: Callable[[], float], *, first_s: float, last_s: float) -> Iterator[float]:
    """Yield doubling delays (seconds) without end, each drawn from the upper half of its step.

    `jitter` returns a new number in [0, 1) at each call.
    """
    step_s = first_s
    while True:
        yield step_s * (0.5 + jitter() / 2)
        step_s = min(2 * step_s, last_s)
