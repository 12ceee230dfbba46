"""The port: what everything durable is written to and read from.

Owns: the operations, what each promises, the errors, and the rules for keys and metadata.
Does not own: which keys there are (`storage_backends.formats.names`), retries of conditional writes and the decision of
what happened (`storage_backends.commit`, the journal), the search for a store's broken promises (`probe`).

Every implementation is synchronous and may be called from any number of threads.

Promised, by every implementation:
- `put_if_absent` has at most one winner for a key, whoever asks, from whichever process or machine.
- What a successful write stored survives a crash of the machine and is seen by every later `get`, `head` and `list`.
- An object found by `get`, `get_run`, `get_with_metadata` or `head` survives a crash of the machine too, whoever wrote
  it.
- An object is seen whole or not at all: a `put` over an existing key leaves the old object or the new one.
- `list` is complete: it shows every object that was there before it began and is not deleted while it runs.

Not promised:
- The order in which `list` shows keys; that a listed object still exists, or survives a crash, before `head` found it.
- That a deletion survives a power failure: a deleted object may come back, with the bytes it had. (A local directory
  promises it when it is told to, S3 does so anyway.)
- Anything about the order of two overlapping `put` calls to one key.
- That a key and a key beneath it (`a` and `a/b`) can both exist. A directory cannot hold both and refuses the second.
- That `get_range` finds damage inside the range: its caller has checksums of the parts it reads.

How long to wait before something is tried again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Final, Self

KEY_BYTES_MAX: Final = 900
"""Longest key; S3 allows 1,024 bytes, and the store's own prefix needs its part of them."""

KEY_PART_BYTES_MAX: Final = 200
"""Longest part of a key between two slashes; a file name has at most 255 bytes."""

METADATA_BYTES_MAX: Final = 2048
"""Keys and values together; the limit of S3 for user metadata."""

NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})

_KEY_PART: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PREFIX: Final = re.compile(rf"(?:{_KEY_PART.pattern}/)*(?:{_KEY_PART.pattern})?")
_METADATA_KEY: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_METADATA_VALUE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")


class StoreError(Exception):
    """An operation of a store failed.

    `key`: the object or prefix it was about. `reason`: what went wrong.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


class NotFound(StoreError):
    """There is no object of this key."""


class AlreadyExists(StoreError):
    """An object of this key exists or is being written; it may be the caller's own of an earlier try. `head` tells."""


class OutcomeUnknown(StoreError):
    """A conditional write was sent and its answer is missing: it has landed, or lands later, or never."""


class StoreUnavailable(StoreError):
    """The store did not do it now; a later try may succeed.

    From `put_if_absent` it means that this try has not landed and never will. From `put` and `delete` it means nothing
    about what the store holds; both may be repeated.
    """


class StoreRefused(StoreError):
    """The store will not do it however often it is asked: permissions, configuration, or a promise it does not keep."""


class Damaged(StoreError):
    """What the store holds is not what was written, or shorter than the caller knows it to be; `reason` says where."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What `head` tells of an object. `size_bytes`: of the body."""

    key: str
    size_bytes: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ListedObject:
    """What `list` tells of an object.

    `size_bytes`: what the store keeps for it; the body, or a little more. `modified_ms`: when it was written last, by
    the store's clock, Unix time; some stores know only the second.
    """

    key: str
    size_bytes: int
    modified_ms: int


class ObjectStore(ABC):
    """Objects by key. Keys are as `check_key` wants them, metadata as `check_metadata`; else `ValueError`.

    Any operation may raise `StoreUnavailable` or `StoreRefused`.
    """

    @abstractmethod
    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        """Store the object whether or not the key exists. May be repeated: for unique names, and for heartbeats."""

    @abstractmethod
    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        """Store the object if the key does not exist. It is sent once; nothing beneath this call repeats it.

        Raises `AlreadyExists`, or `OutcomeUnknown`: then the caller decides by `head` and its own metadata.
        """

    @abstractmethod
    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        """The whole body and the metadata. Raises `NotFound`, `Damaged`."""

    def get(self, key: str) -> bytes:
        """The whole body. Raises `NotFound`, `Damaged`."""
        return self.get_with_metadata(key)[0]

    def get_run(self, keys: Sequence[str]) -> list[bytes]:
        """The whole bodies of these objects, up to the first that does not exist. Raises `Damaged`."""
        bodies = []
        for key in keys:
            try:
                bodies.append(self.get(key))
            except NotFound:
                break
        return bodies

    @property
    def reads_are_requests(self) -> bool:
        """Whether a read waits for another machine: then many should be under way at once."""
        return True

    @property
    def folder(self) -> str | None:
        """The folder in which everything lies; None where the store is no local directory."""
        return None

    @abstractmethod
    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes (at least one) of the body from `offset` on.

        Raises `NotFound`, and `Damaged` when the body ends before that.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size and metadata. Raises `NotFound`, `Damaged`."""

    @abstractmethod
    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        """Every object whose key begins with `prefix` (any part of a key, or nothing), in no order.

        `start_after`: only keys above this one.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; that there is none is success."""

    def clock_skew_s(self) -> float | None:
        """The store's time minus this machine's in seconds, as recent answers told; None where nothing tells it.

        Reads what is known: sends nothing, raises nothing.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Give up connections, files and locks; no operation may follow. May be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_key(key: str) -> None:
    """Raise `ValueError` unless the parts between slashes are of letters, digits and `._-`, none empty or beginning
    with a dot, and short enough for every store."""
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"key of {len(key)} bytes: the limit is {KEY_BYTES_MAX}: {key!r}")
    for part in key.split("/"):
        if _KEY_PART.fullmatch(part) is None:
            raise ValueError(
                f"key {key!r}: part {part!r} must be letters, digits, '.', '_' or '-', not empty, not begin with '.'"
            )
        if len(part) > KEY_PART_BYTES_MAX:
            raise ValueError(f"key {key!r}: a part of {len(part)} bytes, the limit is {KEY_PART_BYTES_MAX}")


def check_prefix(prefix: str) -> None:
    """Raise `ValueError` unless `prefix` is what a key can begin with: nothing, whole parts, a part of a part."""
    if _PREFIX.fullmatch(prefix) is None:
        raise ValueError(
            f"prefix {prefix!r}: its parts must be letters, digits, '.', '_' or '-', not empty, not begin with '.'"
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise `ValueError` unless keys are lower-case letters and digits, with hyphens between them, values printable
    ASCII without blanks at their ends, and all of it within `METADATA_BYTES_MAX`: what every S3 look-alike gives back
    unchanged."""
    size_bytes = 0
    for name, value in metadata.items():
        if _METADATA_KEY.fullmatch(name) is None:
            raise ValueError(f"metadata key {name!r} must be lower-case letters and digits, with hyphens between them")
        if _METADATA_VALUE.fullmatch(value) is None:
            raise ValueError(f"metadata {name}={value!r} must be printable ASCII, not empty, no blank at either end")
        size_bytes += len(name) + len(value)
    if size_bytes > METADATA_BYTES_MAX:
        raise ValueError(f"metadata of {size_bytes} bytes: the limit is {METADATA_BYTES_MAX}")


def check_range(offset: int, length: int) -> None:
    """Raise `ValueError` unless the range is of at least one byte and does not begin before the body."""
    if offset < 0 or length < 1:
        raise ValueError(f"range of {length} bytes from {offset}: at least one byte, from 0 on")


def delays_s(jitter: Callable[[], float], *, first_s: float, last_s: float) -> Iterator[float]:
    """Doubling delays in seconds, each drawn from the upper half of its step; without end. `jitter`: a number in
    [0, 1), drawn anew at each call.
    """
    step_s = first_s
    while True:
        yield step_s * (0.5 + jitter() / 2)
        step_s = min(2 * step_s, last_s)
