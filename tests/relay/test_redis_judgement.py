"""The judgement of names, messages, positions and settings of Redis, and its answers, without a server."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tarry_relay import port, redis_answers, redis_judgement
from tarry_relay.port import Grade

BIG = 2**64 - 1


@pytest.mark.parametrize(
    "target",
    ["due", "a b", "a\0b", "ü", "{orders}:due", "out:orders:relay:1", "x" * 1_024, "*", "due:tarry", "a@0a1b2c3d:b"],
)
def test_any_name_of_some_length_can_be_a_target(target: str) -> None:
    assert redis_judgement.target_fault(target) == ""


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("", "must not be empty"),
        ("x" * 1_025, "has 1025 bytes"),
        ("ü" * 513, "has 1026 bytes"),
        ("a\ud800", "surrogate"),
        (b"out\xff".decode(errors="replace"), "no UTF-8"),
        (redis_judgement.once_key("out", "orders@0a1b2c3d:relay:1-2-3-4"), "has published"),
        (redis_judgement.former_once_key("out", "orders@0a1b2c3d:relay:1-2-3-4"), "has published"),
        (redis_judgement.former_once_key("out", "a:b@0a1b2c3d:bad:orders-1-2"), "has published"),
        ("out:a\nb@0a1b2c3d:relay:1", "has published"),
    ],
)
def test_what_can_be_no_target(target: str, reason: str) -> None:
    assert reason in redis_judgement.target_fault(target)


def test_no_two_messages_are_remembered_by_one_key() -> None:
    """A target has no part of a key in its name, so the key tells target and id apart."""
    pairs = [("a", "b:c"), ("a:b", "c"), ("a:b:c", "")]
    assert len({redis_judgement.once_key(*each) for each in pairs}) == len(pairs)


@pytest.mark.parametrize("position", [(0, 1), (1, 0), (BIG, BIG), (0, 1_795_773_600_000)])
def test_any_two_numbers_of_64_bits_are_a_position(position: tuple[int, int]) -> None:
    assert redis_judgement.position_fault(*position) == ""


@pytest.mark.parametrize("position", [(0, 0), (BIG + 1, 1), (1, BIG + 1), (-1, 1)])
def test_no_entry_has_the_position(position: tuple[int, int]) -> None:
    fault = redis_judgement.position_fault(*position)
    assert fault.startswith(f"no entry of a stream has ledger {position[0]} and entry {position[1]}: ")


def test_a_text_that_is_no_id_is_cut_in_the_reason() -> None:
    assert redis_judgement.position_of("1795773600000-3") == (3, 1_795_773_600_000)
    with pytest.raises(port.BadPosition, match=r"^'x{100}'\.\.\. \(40000 letters\) is no id") as error:
        redis_judgement.position_of("x" * 40_000)
    assert len(str(error.value)) < 300


def test_a_message_may_have_as_many_fields_as_one_command_takes() -> None:
    fields = [(b"a", b"b")] * redis_judgement.FIELDS_MAX
    assert redis_judgement.message_fault(fields) == ""
    assert "has 524001 fields" in redis_judgement.message_fault([*fields, (b"a", b"b")])


def test_fields_go_out_in_their_order_but_for_those_of_the_relay() -> None:
    body = ((b"b", b"1"), (b"a", b"\xff"), (b"tarry-x", b"2"), (b"b", b"3"), (b"id", b"4"), (b"Tarry-x", b"5"))
    outgoing = port.Outgoing("due", port.Message({}, body), {"id": "ü", "tarry-delivery-id": "1"}, "once")
    assert redis_judgement.fields_of(outgoing) == [
        *(b"b", b"1", b"a", b"\xff", b"b", b"3", b"Tarry-x", b"5"),
        *(b"id", "ü".encode(), b"tarry-delivery-id", b"1"),
    ]
    assert redis_judgement.fields_of(port.Outgoing("due", None, {"n": "1"}, "once")) == [b"n", b"1"]


@pytest.mark.parametrize(
    ("kind", "is_made", "grade"),
    [
        ("stream", True, Grade.OK),
        ("none", True, Grade.OK),
        ("none", False, Grade.MISSING),
        ("string", True, Grade.WRONG),
        ("hash", False, Grade.WRONG),
    ],
)
def test_a_key_of_another_kind_is_wrong_and_the_source_must_exist(kind: str, is_made: bool, grade: Grade) -> None:
    found = redis_judgement.finding_of_key("target", "due", kind, is_made=is_made)
    assert (found.name, found.grade) == ("target", grade)
    assert found.text.startswith("key due: ")


@pytest.mark.parametrize(
    ("policy", "grade"),
    [
        ("noeviction", Grade.OK),
        ("allkeys-lru", Grade.WRONG),
        ("allkeys-lfu", Grade.WRONG),
        ("allkeys-random", Grade.WRONG),
        ("volatile-lru", Grade.WARNING),
        ("volatile-ttl", Grade.WARNING),
        ("a policy of tomorrow", Grade.WRONG),
        (None, Grade.WARNING),
    ],
)
def test_what_evicts_the_source_is_wrong(policy: str | None, grade: Grade) -> None:
    found = redis_judgement.finding_of_eviction("orders", policy)
    assert (found.name, found.grade) == ("eviction", grade)
    assert grade is Grade.OK or "set maxmemory-policy noeviction" in found.text


@pytest.mark.parametrize(("pttl_ms", "grade"), [(-1, Grade.OK), (0, Grade.WRONG), (86_400_000, Grade.WRONG)])
def test_a_ttl_of_the_source_is_wrong(pttl_ms: int, grade: Grade) -> None:
    found = redis_judgement.finding_of_ttl("ttl", "orders", pttl_ms, Grade.WRONG)
    assert (found.name, found.grade) == ("ttl", grade)


def size(first: str, delivered: str, lowest_pending: str, *samples: redis_judgement.Sample) -> port.Finding:
    look = redis_judgement.Look(first, delivered, lowest_pending, samples)
    found = redis_judgement.finding_of_size("orders", look)
    assert found.name == "size"
    assert "\n" not in found.text
    return found


def sample(entry_id: str, *, exists: bool = False, is_pending: bool = False) -> redis_judgement.Sample:
    return redis_judgement.Sample(entry_id, exists, is_pending)


def test_what_was_trimmed_before_it_was_committed_is_wrong() -> None:
    # Unread then; and still.
    assert size("9-0", "1-0", "", sample("2-0")).grade is Grade.WRONG
    # Read meanwhile, and not committed.
    assert size("9-0", "5-0", "2-0", sample("2-0", is_pending=True)).grade is Grade.WRONG
    # Nothing is left.
    assert size("", "1-0", "", sample("10-0")).grade is Grade.WRONG


def test_what_was_trimmed_after_it_was_committed_is_no_matter() -> None:
    assert size("9-0", "5-0", "", sample("2-0")).grade is Grade.OK
    assert size("9-0", "10-0", "", sample("10-0", exists=True)).grade is Grade.OK
    assert redis_judgement.finding_of_size("orders", None).grade is Grade.OK


def test_one_entry_that_was_deleted_and_a_loss_of_before_the_first_look_are_warnings() -> None:
    assert size("1-0", "1-0", "", sample("2-0")).grade is Grade.WARNING
    assert size("9-0", "9-0", "2-0").grade is Grade.WARNING
    assert size("", "9-0", "2-0").grade is Grade.WARNING
    assert size("2-0", "9-0", "2-0").grade is Grade.OK


@pytest.mark.parametrize(
    ("info", "appendfsync", "grades"),
    [
        (None, None, {"durability": Grade.WARNING}),
        ({"aof_enabled": 1}, "always", {"durability": Grade.OK}),
        ({"aof_enabled": 1}, "everysec", {"durability": Grade.WARNING}),
        ({"aof_enabled": 1}, None, {"durability": Grade.WARNING}),
        ({"aof_enabled": 0}, "always", {"durability": Grade.WARNING}),
        ({}, "always", {"durability": Grade.WARNING}),
        (
            {"aof_enabled": 1, "role": "slave", "cluster_enabled": 1},
            "always",
            {"durability": Grade.OK, "role": Grade.WARNING, "cluster": Grade.WRONG},
        ),
        (
            {"aof_enabled": 1, "min_slaves_good_slaves": 0, "redis_version": "6.2.5"},
            "always",
            {"durability": Grade.WARNING},
        ),
        (
            {"aof_enabled": 1, "min_slaves_good_slaves": 0, "redis_version": "7.0.0"},
            "always",
            {"durability": Grade.OK},
        ),
    ],
)
def test_what_a_crash_may_lose_is_a_warning(
    info: dict[str, Any] | None, appendfsync: str | None, grades: dict[str, Grade]
) -> None:
    found = redis_judgement.findings_of_server(info, appendfsync)
    assert {each.name: each.grade for each in found} == grades


def test_a_retry_log_of_two_relays_is_wrong() -> None:
    groups = ["relay", "tarry-retry-of-1", "x"]
    assert redis_judgement.finding_of_retry_owners("failed", groups, "tarry-retry-of-1") is None
    found = redis_judgement.finding_of_retry_owners("failed", groups, "tarry-retry-of-2")
    assert found is not None
    assert found.grade is Grade.WRONG
    assert "XGROUP DESTROY failed tarry-retry-of-1" in found.text


SCRIPT = "Error running script (call to f_0a1b): "
READ_ONLY = "You can't write against a read only script"
IN_PIPELINE = "Command # 2 (XADD due * of pipeline caused error: ('x',)) of pipeline caused error: "


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        ("OOM command not allowed", "OOM", "OOM command not allowed"),
        ("@user_script: 3: -OOM command not allowed", "OOM", "OOM command not allowed"),
        (f"{SCRIPT}@user_script:3: @user_script: 3: -OOM command not", "OOM", "OOM command not"),
        (f"ERR {SCRIPT}@user_script:4: NOGROUP No such key", "NOGROUP", "NOGROUP No such key"),
        (f"{SCRIPT}@user_script:1: ERR no such key", "NOKEY", "no such key"),
        ("OOM command not allowed script: 0a1b, on @user_script:3.", "OOM", None),
        ("NOPERM ACL failure in script: User u has no permissions", "NOPERM", None),
        ("@user_script: 1: The user executing the script can't", "NOPERM", "The user executing the script can't"),
        (f"{IN_PIPELINE}('MISCONF Redis is',)", "MISCONF", "MISCONF Redis is"),
        (f'{IN_PIPELINE}("MISCONF Redis can\'t",)', "MISCONF", "MISCONF Redis can't"),
        ("something that nobody knows", "ERR", "something that nobody knows"),
        ("Elements are too large to be stored", redis_answers.TOO_LARGE, None),
        ("", "ERR", "ResponseError"),
    ],
)
def test_an_error_is_told_by_its_code_whatever_stands_before_it(text: str, code: str, shown: str | None) -> None:
    error = redis.ResponseError(text)
    assert redis_answers.code_of(error) == code
    answer = redis_answers.produced("due", error)
    assert (answer.code, answer.text) == (code, f"due: {text if shown is None else shown}")


def test_what_is_not_in_the_table_is_unknown() -> None:
    for error, code in ((redis.ResponseError("NEW it is"), "NEW"), (redis.InvalidResponse("x"), "InvalidResponse")):
        assert redis_answers.produced("due", error) == port.Produced(
            port.Meant(port.Meaning.UNKNOWN), code, f"due: {error}"
        )


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (redis.ConnectionError("closed"), port.Unreachable),
        (redis.TimeoutError("late"), port.Unreachable),
        (OSError("no"), port.Unreachable),
        (redis.BusyLoadingError("Redis is loading"), port.Unreachable),
        (redis.exceptions.ReadOnlyError(READ_ONLY), port.Unreachable),
        (redis.ResponseError("MISCONF no space"), port.Unreachable),
        (redis.ResponseError("BUSY Redis is busy"), port.Unreachable),
        (redis.exceptions.TryAgainError("later"), port.Unreachable),
        (redis.AuthenticationError("invalid username-password pair"), port.SessionOver),
        (redis.exceptions.NoPermissionError("this user has no permissions"), port.SessionOver),
        (redis.ResponseError("NOGROUP No such key"), port.NotThere),
        (redis.ResponseError("UNBLOCKED the stream key no longer exists"), port.NotThere),
        (redis.ResponseError("WRONGTYPE Operation against"), port.NotThere),
    ],
)
def test_a_failure_of_another_call_has_its_scope(error: Exception, failure: type[Exception]) -> None:
    with pytest.raises(failure, match=r"^key orders: "), redis_answers.failures("key orders"):
        raise error


def test_a_surprise_stays_as_it_is() -> None:
    with pytest.raises(redis.ResponseError, match=r"^value is not"), redis_answers.failures("key orders"):
        raise redis.ResponseError("value is not an integer")
