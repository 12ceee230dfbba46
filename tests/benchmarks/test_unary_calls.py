"""The client of unary calls: every call is answered, and a wrong answer is no answer."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from benchmarks import unary_calls

METHOD = "/test.Service/Method"


class Served:
    """What a server was asked, and what it answers."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.answer: bytes | None = b"answer"
        self.address = ""

    def __call__(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.asked.append(request)
        if self.answer is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return self.answer


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        handlers: dict[str, Any] = {"Method": grpc.unary_unary_rpc_method_handler(found)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
        found.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield found
        server.stop(None).wait()


@pytest.mark.parametrize("connections", [1, 7, 30])
def test_every_request_is_a_call_and_answered(served: Served, connections: int) -> None:
    requests = [b"%d" % number for number in range(20)]
    called = unary_calls.call(served.address, METHOD, requests, b"answer", connections=connections)
    assert sorted(served.asked) == sorted(requests)
    assert called.seconds > 0


def test_an_empty_answer_is_one(served: Served) -> None:
    served.answer = b""
    unary_calls.call(served.address, METHOD, [b""] * 3, b"", connections=2)
    assert served.asked == [b""] * 3


@pytest.mark.parametrize("answer", [b"another", b"", None])
def test_a_wrong_answer_and_a_refusal_are_told(served: Served, answer: bytes | None) -> None:
    served.answer = answer
    with pytest.raises(unary_calls.CallFailed, match=METHOD):
        unary_calls.call(served.address, METHOD, [b"x"], b"answer", connections=1)


def test_a_method_that_there_is_not_is_told(served: Served) -> None:
    with pytest.raises(unary_calls.CallFailed, match="of /test"):
        unary_calls.call(served.address, "/test.Service/Other", [b"x"], b"answer", connections=1)
