"""Each status is one class, with the hints of the daemon, wherever they stand."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

import tarry
from tarry import errors
from tests.client._support import fake_daemon


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (code_pb2.INVALID_ARGUMENT, tarry.InvalidArgument, False),
        (code_pb2.OUT_OF_RANGE, tarry.OutOfRange, False),
        (code_pb2.NOT_FOUND, tarry.NotFound, False),
        (code_pb2.ALREADY_EXISTS, tarry.AlreadyExists, False),
        (code_pb2.RESOURCE_EXHAUSTED, tarry.ResourceExhausted, False),
        (code_pb2.FAILED_PRECONDITION, tarry.NotOwner, True),
        (code_pb2.ABORTED, tarry.Aborted, True),
        (code_pb2.UNAVAILABLE, tarry.Unavailable, True),
        (code_pb2.UNKNOWN, tarry.OutcomeUnknown, True),
        (code_pb2.DATA_LOSS, tarry.DataLoss, False),
        (code_pb2.INTERNAL, tarry.Internal, False),
        (code_pb2.UNAUTHENTICATED, tarry.Unauthenticated, False),
        (code_pb2.PERMISSION_DENIED, tarry.PermissionDenied, False),
        (code_pb2.UNIMPLEMENTED, tarry.TarryError, False),
    ],
)
def test_each_code_is_one_class(code: int, kind: type[tarry.TarryError], retryable: bool) -> None:
    error = errors.from_status(status_pb2.Status(code=code, message="why"))
    assert type(error) is kind
    assert (error.code.value[0], error.message) == (code, "why")
    assert errors.is_retryable(error) is retryable


def test_hints_of_an_answer_in_band_are_read() -> None:
    quota = errors.from_status(fake_daemon.status(code_pb2.RESOURCE_EXHAUSTED, retry_after_ms="250"))
    assert isinstance(quota, tarry.ResourceExhausted)
    assert quota.retry_after_ms == 250
    assert errors.is_retryable(quota)


@pytest.mark.parametrize(("hints", "ends"), [({}, False), ({"damaged": "topic"}, True), ({"damaged": "bucket"}, False)])
def test_damage_ends_only_a_stream_that_is_told_that_it_is_of_its_topic(hints: dict[str, str], ends: bool) -> None:
    info = error_details_pb2.ErrorInfo(reason="CORRUPTION", metadata=hints)
    status = status_pb2.Status(code=code_pb2.DATA_LOSS, message="it is damaged")
    status.details.add().Pack(info)
    error = errors.from_status(status)
    assert isinstance(error, tarry.DataLoss)
    assert errors.ends_stream(error) is ends
    assert not errors.is_retryable(error), "of a call it is an answer"
    moved = errors.from_status(fake_daemon.status(code_pb2.FAILED_PRECONDITION, owner_address="127.0.0.1:9"))
    assert isinstance(moved, tarry.NotOwner)
    assert moved.owner_address == "127.0.0.1:9"
    unknown = errors.from_status(fake_daemon.status(code_pb2.UNKNOWN, owner_address="127.0.0.1:9"))
    assert isinstance(unknown, tarry.OutcomeUnknown)
    assert unknown.owner_address == "127.0.0.1:9"


def test_the_daemon_s_own_time_is_obeyed_and_a_named_owner_is_asked_at_once() -> None:
    policy = tarry.RetryPolicy(initial_s=1.0, max_s=5.0, uniform=lambda low, high: high)
    assert policy.delay_s(tarry.ResourceExhausted("", retry_after_ms=250), 9) == 0.25
    assert policy.delay_s(tarry.Unavailable("", retry_after_ms=40), 1) == 0.04
    assert policy.delay_s(tarry.NotOwner("", owner_address="a:1"), 1) == 0.0
    assert policy.delay_s(tarry.NotOwner("", owner_address="a:1"), 2) == 2.0
    assert [policy.delay_s(tarry.Unavailable(""), attempt) for attempt in (1, 2, 3, 4, 100)] == [1, 2, 4, 5, 5]


def test_a_status_with_damaged_details_is_a_bug_and_not_a_crash() -> None:
    status = fake_daemon.status(code_pb2.UNAVAILABLE, retry_after_ms="1")
    status.details[0].value = b"\xff"
    assert errors.from_status(status).code is grpc.StatusCode.INTERNAL
