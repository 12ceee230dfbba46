"""Draws the fate of each request to a store that sometimes fails, and lists the requests.

`takeover` and `cost` use this module, which knows nothing of daemons. The proxy that carries out the faults is
`tests._support.lost_answer_proxy`.
"""

from __future__ import annotations

import dataclasses
import random
import time
import urllib.parse

from tests._support.lost_answer_proxy import Asked, Fault, Loss

UNAVAILABLE = 503


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """The parts of requests that fail.

    `cut` is the part of reads whose body ends in the middle; `unavailable`, of requests answered with 503 and not
    carried out; `lost`, of requests carried out whose connection is closed without an answer.
    """

    cut: float = 0.0
    unavailable: float = 0.0
    lost: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request.

    `kind` is conditional put, put, get, list, head or delete. `key` is that of the object, or the prefix of a listing.
    `arrived_s` is by `time.monotonic` (seconds).
    """

    arrived_s: float
    kind: str
    key: str
    fault: Fault


class FailingStore:
    """The faults of a store, called with each request, one at a time.

    `faults` may be set while requests arrive.
    """

    def __init__(self, bucket: str, seed: int) -> None:
        self.faults = Faults()
        self.requests: list[Request] = []
        self._front = f"/{bucket}/"
        self._random = random.Random(seed)

    def __call__(self, asked: Asked) -> Fault:
        kind, key = self._read(asked)
        fault = self._drawn(kind)
        self.requests.append(Request(time.monotonic(), kind, key, fault))
        return fault

    def _read(self, asked: Asked) -> tuple[str, str]:
        target = urllib.parse.urlsplit(asked.target)
        question = urllib.parse.parse_qs(target.query, keep_blank_values=True)
        if "list-type" in question:
            return "list", question.get("prefix", [""])[0]
        kind = "conditional put" if asked.conditional else asked.method.lower()
        return kind, urllib.parse.unquote(target.path).removeprefix(self._front)

    def _drawn(self, kind: str) -> Fault:
        faults = self.faults
        if self._random.random() < faults.unavailable:
            return UNAVAILABLE
        if self._random.random() < faults.lost:
            return Loss.CLOSED
        if kind in ("get", "list") and self._random.random() < faults.cut:
            return Loss.CUT
        return None
