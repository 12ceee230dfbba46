"""What the answer to joined acknowledgements tells each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry import columns, results, stream_requests, wire
from tarry.v1 import dispatch_pb2

REASONS = list(tarry.IgnoredReason)


def acknowledgement(number: int, entries: range) -> stream_requests.Request[int]:
    positions = columns.positions(7, list(entries), 1_000)
    return stream_requests.Request(
        number, wire.encode_acknowledge, positions, number, lambda done, ignored: ignored, positions, positions.rows
    )


def taken_back(entries: list[int]) -> columns.Positions:
    return columns.positions(7, entries, 1_000)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    before=st.sets(st.integers(0, 29)),
    after=st.sets(st.integers(0, 29)),
    other=st.dictionaries(st.integers(0, 29), st.sampled_from(REASONS)),
)
def test_each_is_told_what_was_ignored_of_its_own_rows_whatever_is_taken_back_when(
    sizes: list[int], before: set[int], after: set[int], other: dict[int, tarry.IgnoredReason]
) -> None:
    """Entries are counted over all of them. `before` and `after` they were sent, entries are taken back."""
    firsts = np.cumsum([0, *sizes])
    ranges = [range(first, first + size) for first, size in zip(firsts.tolist(), sizes, strict=False)]
    members = [acknowledgement(number, entries) for number, entries in enumerate(ranges)]
    joined = stream_requests.Joined(99, members)
    leave_out(members, before)
    sent = dispatch_pb2.SubscribeRequest.FromString(joined.message()).acknowledge
    assert sent.request_id == 99
    assert list(sent.entry_id) == [entry for entry in range(firsts[-1]) if entry not in before]
    leave_out(members, after)

    # The daemon ignores what it took back before it read them.
    why = dict.fromkeys(after, tarry.IgnoredReason.TAKEN_BACK) | other
    ignored = [(index, why[entry]) for index, entry in enumerate(sent.entry_id) if entry in why]
    done = dispatch_pb2.Done(request_id=99, ignored=len(ignored))
    done.ignored_index.extend([index for index, _ in ignored])
    reasons: Any = [int(reason) for _, reason in ignored]
    done.ignored_reason.extend(reasons)

    expected = why | dict.fromkeys(before, tarry.IgnoredReason.TAKEN_BACK)
    for entries, settled in zip(ranges, joined.settled(done), strict=True):
        told = settled.result
        assert isinstance(told, results.Ignored)
        assert (told, told.rows) == (len(told.index), len(entries))
        assert {entries[row]: reason for row, reason in told.items()} == {
            entry: expected[entry] for entry in entries if entry in expected
        }


def leave_out(members: list[stream_requests.Request[int]], entries: set[int]) -> None:
    if entries:
        for member in members:
            member.leave_out(taken_back(sorted(entries)))


def test_a_request_of_its_own_is_answered_about_what_was_sent() -> None:
    request = acknowledgement(1, range(3))
    request.message()
    request.leave_out(taken_back([0]))
    done = dispatch_pb2.Done(request_id=1, ignored=1, ignored_index=[0])
    done.ignored_reason.append(dispatch_pb2.IGNORED_REASON_TAKEN_BACK)
    settled = request.settled(done)
    assert isinstance(settled.result, results.Ignored)
    assert list(settled.result.items()) == [(0, tarry.IgnoredReason.TAKEN_BACK)], "it is told once"
    again = dispatch_pb2.SubscribeRequest.FromString(request.message()).acknowledge
    assert list(again.entry_id) == [1, 2]
    done.ignored_reason[0] = dispatch_pb2.IGNORED_REASON_NOT_THERE
    settled = request.settled(done)
    assert isinstance(settled.result, results.Ignored)
    assert list(settled.result.items()) == [
        (0, tarry.IgnoredReason.TAKEN_BACK),
        (1, tarry.IgnoredReason.NOT_THERE),
    ]


@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=12), rows_max=st.integers(5, 12))
def test_groups_hold_no_more_than_a_request_and_keep_their_order(sizes: list[tuple[int, bool]], rows_max: int) -> None:
    given_requests = []
    for number, (size, names_counts) in enumerate(sizes):
        request = acknowledgement(number, range(size))
        if names_counts:
            request.positions = request.positions._replace(redelivery_count=np.zeros(size, np.uint32))
        given_requests.append(request)
    groups = list(stream_requests.joinable(given_requests, rows_max))
    assert [each for group in groups for each in group] == given_requests
    for group in groups:
        assert 0 < sum(each.positions.rows for each in group) <= rows_max
        assert len({each.positions.redelivery_count is None for each in group}) == 1
