"""What becomes of each request to a store that fails now and then, and which requests there were.

Owns: the draw for each request, and the list of them. Does not own: the proxy that does it
(`tests._support.lost_answer_proxy`), and the store behind it.
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
    """Parts of all requests. `cut`: of those that read a body, which ends in the middle. `unavailable`: answered 503,
    and nothing else happens. `lost`: carried out, and the connection is closed without an answer.
    """

    cut: float = 0.0
    unavailable: float = 0.0
    lost: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """`kind`: conditional put, put, get, list, head or delete. `key`: of the object, or the prefix of a listing.
    `arrived_s`: by `time.monotonic`.
    """

    arrived_s: float
    kind: str
    key: str
    fault: Fault


class FailingStore:
    """Called with each request, one at a time. `faults` may be set while requests come."""

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
