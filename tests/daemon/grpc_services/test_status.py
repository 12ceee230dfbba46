"""Errors as gRPC statuses."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

from daemon import errors
from daemon.grpc_services import status


def leaves(kind: type[errors.TarryError]) -> list[type[errors.TarryError]]:
    below = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    return [leaf for each in below for leaf in leaves(each)] if below else [kind]


def test_each_kind_of_error_has_a_code_of_its_own() -> None:
    assert set(status.CODES) == set(leaves(errors.TarryError))
    assert len(set(status.CODES.values())) == len(status.CODES)


def info_of(error: Exception) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    (detail,) = status.refusal(error).details
    assert detail.Unpack(info)
    return info


@pytest.mark.parametrize(
    ("error", "reason", "hints"),
    [
        (errors.DelayTooLong("x"), "DELAY_TOO_LONG", {}),
        (errors.Conflict("x"), "CONFLICT", {}),
        (errors.QuotaExceeded("x", retry_after_ms=0), "QUOTA_EXCEEDED", {"retry_after_ms": "0"}),
        (errors.NotOwner("x", owner_address="h:1"), "NOT_OWNER", {"owner_address": "h:1"}),
        (errors.OutcomeUnknown("x", owner_address="h:1"), "OUTCOME_UNKNOWN", {"owner_address": "h:1"}),
        (errors.OutcomeUnknown("x"), "OUTCOME_UNKNOWN", {}),
        (errors.NotOwner("x"), "NOT_OWNER", {}),
        (errors.Unavailable("x"), "UNAVAILABLE", {}),
        (errors.Unavailable("x", retry_after_ms=9), "UNAVAILABLE", {"retry_after_ms": "9"}),
        (KeyError("x"), "INTERNAL", {}),
    ],
)
def test_details_name_the_reason_and_what_to_do(error: Exception, reason: str, hints: dict[str, str]) -> None:
    info = info_of(error)
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, "tarry.v1", hints)


def test_what_is_no_error_of_ours_is_internal_and_keeps_its_text_to_the_log() -> None:
    refusal = status.refusal(KeyError("secret"))
    assert refusal.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in refusal.message


def test_a_long_text_is_cut_so_that_it_fits_the_headers() -> None:
    assert len(status.refusal(errors.InvalidArgument("x" * 100_000)).message) < 1100
