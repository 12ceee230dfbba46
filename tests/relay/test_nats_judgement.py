"""The tables of what can be a name, a position and a source at NATS."""

from __future__ import annotations

from typing import Any

import pytest

from tarry_relay import nats_judgement, port
from tarry_relay.port import Grade

SOUND: dict[str, Any] = {
    "retention": "limits",
    "max_msgs": -1,
    "max_bytes": -1,
    "max_msgs_per_subject": -1,
    "discard": "old",
    "storage": "file",
    "duplicate_window": 120_000_000_000,
    "allow_direct": True,
    "consumer_limits": {},
}
"""What STREAM.INFO shows of a stream with defaults."""


@pytest.mark.parametrize(
    "target",
    [
        "due",
        "out.x",
        "out.a*b",
        "out.ü",
        "a" * nats_judgement.SUBJECT_BYTES_MAX,
        "JS.API",
        "x.$JS",
        "x._INBOX",
        "out.'",
    ],
)
def test_a_subject_that_can_be_a_target(target: str) -> None:
    assert nats_judgement.target_fault(target) == ""


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("", "empty word"),
        ("out.", "empty word"),
        (".out", "empty word"),
        ("out..x", "empty word"),
        ("out x", "a blank"),
        ("out\tx", "a blank"),
        ("out\r\nPUB x 0", "a blank"),
        ("out\0x", "control character"),
        ("out\vx", "control character"),
        ("out\x7fx", "control character"),
        ("out.*", "a wildcard"),
        ("out.>", "a wildcard"),
        (">", "a wildcard"),
        ("out.\ud800", "UTF-8 cannot encode"),
        ("out.\ufffd", "no UTF-8"),
        ("a" * 6_000, "6000 bytes"),
        ("ü" * 2_000, "4000 bytes"),
        ("$JS.API.STREAM.PURGE.OTHER", "NATS itself"),
        ("$SYS.x", "NATS itself"),
        ("_INBOX.x", "NATS itself"),
        ("_R_.x", "NATS itself"),
        ("_GR_.x", "NATS itself"),
    ],
)
def test_a_subject_that_can_be_no_target(target: str, reason: str) -> None:
    fault = nats_judgement.target_fault(target)
    assert reason in fault
    assert len(fault.encode()) < 300
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("subject", "targets", "others"),
    [
        ("orders", ["orders"], ["orders.a", "order"]),
        ("orders.*", ["orders.a"], ["orders", "orders.a.b", "x.a"]),
        ("orders.>", ["orders.a", "orders.a.b"], ["orders", "x.a"]),
        ("*.new", ["orders.new"], ["orders.old", "new"]),
        (">", ["a", "a.b"], []),
    ],
)
def test_a_subject_stands_for_what_its_wildcards_say(subject: str, targets: list[str], others: list[str]) -> None:
    assert [nats_judgement.fits(subject, each) for each in (*targets, *others)] == [
        *[True] * len(targets),
        *[False] * len(others),
    ]


@pytest.mark.parametrize("name", ["", "a.b", "a*", ">", "a b", "a/b", "a\\b", "a\0", "x" * 256])
def test_a_name_that_no_stream_or_consumer_can_have(name: str) -> None:
    assert nats_judgement.name_fault(name) != ""
    assert nats_judgement.name_fault("orders-1_ü") == ""


def test_a_position_of_a_stream() -> None:
    assert nats_judgement.position_fault(1, 1) == nats_judgement.position_fault(1, 2**64 - 1) == ""
    assert nats_judgement.position_fault(2, 1).startswith("ledger 2 ")
    for entry in (-1, 0, 2**64):
        assert nats_judgement.position_fault(1, entry).startswith(f"entry {entry} ")
    assert nats_judgement.position_of("17") == (1, 17)
    for bad in ("0", "-1", "1 ", "x", str(2**64), "\u0661"):
        with pytest.raises(port.BadPosition):
            nats_judgement.position_of(bad)


def test_a_block_of_headers_fits_beside_those_of_the_relay() -> None:
    most = nats_judgement.HEADERS_BYTES_MAX - port.OWN_HEADERS_BYTES_MAX - 512
    assert nats_judgement.headers_fault(most) == ""
    assert str(most) in nats_judgement.headers_fault(most + 1)


def test_a_sound_source_has_no_finding() -> None:
    found = nats_judgement.judge_source("orders", SOUND)
    assert {each.name for each in found} == {"retention", "size", "subject", "rollup", "ttl", "direct get"}
    assert {each.grade for each in found} == {Grade.OK}


@pytest.mark.parametrize(
    ("name", "grade", "config"),
    [
        ("retention", Grade.WRONG, {"retention": "workqueue"}),
        ("retention", Grade.WRONG, {"retention": "interest"}),
        ("size", Grade.WRONG, {"max_msgs": 10}),
        ("size", Grade.WRONG, {"max_bytes": 10}),
        ("size", Grade.OK, {"max_msgs": 10, "max_bytes": 10, "discard": "new"}),
        ("subject", Grade.WRONG, {"max_msgs_per_subject": 1}),
        ("subject", Grade.WRONG, {"max_msgs_per_subject": 1, "discard": "new"}),
        ("subject", Grade.OK, {"max_msgs_per_subject": 1, "discard": "new", "discard_new_per_subject": True}),
        ("rollup", Grade.WRONG, {"allow_rollup_hdrs": True}),
        ("ttl", Grade.WRONG, {"allow_msg_ttl": True}),
        ("ttl", Grade.WRONG, {"subject_delete_marker_ttl": 1}),
        ("direct get", Grade.WARNING, {"allow_direct": False}),
        ("storage", Grade.WARNING, {"storage": "memory"}),
        ("storage", Grade.WARNING, {"persist_mode": "async"}),
        ("sealed", Grade.WARNING, {"sealed": True}),
        ("sources", Grade.WARNING, {"sources": [{"name": "x"}]}),
        ("consumer", Grade.WARNING, {"consumer_limits": {"inactive_threshold": 1_000_000_000}}),
    ],
)
def test_a_setting_of_the_source(name: str, grade: Grade, config: dict[str, Any]) -> None:
    found = {each.name: each for each in nats_judgement.judge_source("orders", {**SOUND, **config})}
    assert found[name].grade is grade
    assert {each.grade for each in found.values() if each.name != name} == {Grade.OK}
    assert found[name].text.startswith("stream orders: ")
    assert "\n" not in found[name].text


@pytest.mark.parametrize(
    ("grade", "config"),
    [
        (Grade.OK, {}),
        (Grade.WRONG, {"no_ack": True}),
        (Grade.WRONG, {"allow_msg_counter": True}),
        (Grade.WRONG, {"sealed": True}),
        (Grade.WARNING, {"duplicate_window": 0}),
        (Grade.WARNING, {"retention": "interest"}),
        (Grade.WARNING, {"storage": "memory"}),
    ],
)
def test_a_setting_of_a_target(grade: Grade, config: dict[str, Any]) -> None:
    found = nats_judgement.judge_target("due", "DUE", {**SOUND, **config})
    assert (found.name, found.grade) == ("target", grade)
    assert found.text.startswith("subject due: stream DUE ")


def test_a_consumer_holds_no_more_than_its_stream_allows() -> None:
    assert nats_judgement.max_ack_pending(SOUND, 160_000) == 160_000
    assert nats_judgement.max_ack_pending({"consumer_limits": {"max_ack_pending": 500}}, 160_000) == 500
