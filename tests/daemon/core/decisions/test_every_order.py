"""Hand-outs by name: every order in which an acknowledgement, a late negative one, a time-out, the end of a stream and
a takeover may come. Each test is a row of that table of PROTOCOL.md.

In the names: H(c) a hand-out with the count c, A its acknowledgement, N a forwarded negative one of it, X an ack
time-out, S the end of a stream, K a takeover, 2 a repeat.
"""

from __future__ import annotations

from tests.daemon.core._support.journaled_topic import batch_of
from tests.daemon.core._support.named_deliveries import DONE, START_MS, OnePosition, P
from tests.daemon.core._support.oracle import part_of


def handed_out(*, max_count: int | None = None) -> OnePosition:
    one = OnePosition(max_count=max_count)
    one.add()
    one.comes(0)
    return one


def test_h_n_a_the_row_waits_and_the_acknowledgement_is_of_another_delivery() -> None:
    one = handed_out()
    assert one.nack(0) == DONE
    assert one.ack(0) == "OTHER_DELIVERY"
    one.later()
    one.comes(1)
    assert one.ack(1) == DONE
    one.nothing_comes()


def test_h_a_n_the_subscription_gets_a_row_of_its_own_with_the_time_and_the_next_count() -> None:
    one = handed_out()
    assert one.ack(0) == DONE
    assert one.nack(0) == DONE
    one.later()
    one.comes(1)
    assert one.ack(1) == DONE
    one.nothing_comes()


def test_h_a_n_other_subscriptions_that_owe_the_shared_row_are_not_touched() -> None:
    one = OnePosition()
    other = one.topic.create_subscription()
    one.add(time_ms=START_MS + 1)
    one.time_ms = one.topic.now_ms = START_MS + 1
    one.comes(0)
    one.ack(0)
    assert one.nack(0) == DONE
    one.later()
    one.comes(1)
    one.ack(1)
    one.topic.core.open(other, 50)
    assert len(one.topic.drain(other, 50)) == 1


def test_h_a_n_while_the_acknowledgement_is_staged_the_nack_waits() -> None:
    one = handed_out()
    one.ack(0, commit=False)
    assert one.waits_for_what_is_staged()
    one.commit()
    assert not one.waits_for_what_is_staged()
    assert one.nack(0) == DONE
    assert one.waits_with == 1


def test_h_s_n_what_is_ready_again_is_nacked() -> None:
    one = handed_out()
    one.stream_ends()
    assert one.nack(0) == DONE
    assert one.handed_out() == []
    one.later()
    one.comes(1)


def test_h_s_h_n_a_a_one_name_comes_twice_and_both_acknowledgements_are_ignored() -> None:
    one = handed_out()
    one.stream_ends()
    one.comes(0)
    assert one.nack(0) == DONE
    assert one.ack(0) == "OTHER_DELIVERY"
    assert one.ack(0) == "OTHER_DELIVERY"
    one.later()
    one.comes(1)


def test_h_x_n_then_a_a_new_time_and_the_acknowledgement_is_ignored() -> None:
    one = handed_out()
    one.times_out()
    one.topic.now_ms += 50
    assert one.nack(0) == DONE
    assert one.waits_with == 1
    assert one.ack(0) == "OTHER_DELIVERY"
    one.topic.now_ms += 50
    assert one.handed_out() == [], "it has the new time"
    one.topic.now_ms += 50
    one.comes(1)


def test_h_x_h_n_a_newer_hand_out_is_out_and_the_old_one_ends_nothing_any_more() -> None:
    one = handed_out()
    one.times_out()
    one.later()
    one.comes(1)
    assert one.nack(0) == "OTHER_DELIVERY"
    assert one.ack(0) == "OTHER_DELIVERY", "its dispatcher said that it failed"
    assert one.ack(1) == DONE


def test_h_x_a_ends_it() -> None:
    one = handed_out()
    one.times_out()
    assert one.ack(0) == DONE
    one.nothing_comes()


def test_h_x_h_a_of_the_first_ends_it() -> None:
    one = handed_out()
    one.times_out()
    one.later()
    one.comes(1)
    assert one.ack(0) == DONE
    one.nothing_comes()


def test_a_nack_that_is_repeated_does_not_count_twice_is_ignored_or_comes_once_more() -> None:
    one = handed_out()
    assert one.nack(0) == DONE
    assert one.nack(0) == DONE, "the new time"
    assert one.waits_with == 1
    one.later()
    one.comes(1)
    assert one.nack(0) == "OTHER_DELIVERY"
    assert one.ack(1) == DONE
    assert one.nack(0) == DONE
    one.later()
    one.comes(1)


def test_a_durable_k_n_a2_a_new_row_and_the_repeated_acknowledgement_is_ignored() -> None:
    one = handed_out()
    one.ack(0)
    one.takeover()
    assert one.nack(0) == DONE
    assert one.ack(0) == "OTHER_DELIVERY"
    one.later()
    one.comes(1)


def test_a_lost_k_n_a2_the_row_waits_the_acknowledgement_is_ignored_and_it_is_not_held() -> None:
    one = handed_out()
    one.ack(0, commit=False)
    one.topic.staged = type(one.topic.staged)()
    one.takeover()
    one.topic.pass_all()
    assert one.nack(0) == DONE
    assert one.ack(0) == "OTHER_DELIVERY"
    assert not one.is_held_again(0)
    one.later()
    one.comes(1)


def test_after_k_a_position_is_held_only_by_the_name_that_its_row_has() -> None:
    one = handed_out()
    one.nack(0)
    one.later()
    one.comes(1)
    one.takeover()
    one.later()
    assert one.state.nacks.take_due(one.topic.now_ms, 9)
    assert not one.is_held_again(0)
    assert one.is_held_again(1)


def test_k_a_replayed_nack_waits_an_acknowledgement_ends_it_and_a_nack_counts() -> None:
    for ends in (True, False):
        one = handed_out()
        one.nack(0)
        one.later()
        one.comes(1)
        one.takeover()
        assert one.waits_with == 1
        if ends:
            assert one.ack(1) == DONE
            one.nothing_comes()
        else:
            assert one.nack(1) == DONE
            assert one.waits_with == 2


def test_k_with_a_clock_that_is_behind_it_is_not_due() -> None:
    one = handed_out()
    one.topic.now_ms -= 500
    one.takeover()
    assert one.nack(0) == "NOT_DUE"
    assert one.ack(0) == "NOT_DUE"
    one.topic.now_ms += 500
    one.comes(0)
    assert one.nack(0) == DONE


def test_added_again_with_another_time_it_comes_by_itself() -> None:
    one = handed_out()
    one.ack(0)
    one.add(time_ms=START_MS + 50)
    assert one.nack(0) == "OTHER_TIME", "it waits for another time"
    assert one.nack(0, time_ms=0) == "NOT_DUE"
    one.topic.now_ms += 50
    one.topic.pass_all()
    assert one.nack(0) == "OTHER_TIME"
    assert one.ack(0) == "OTHER_TIME"
    one.time_ms = START_MS + 50
    one.comes(0)


def test_added_again_with_its_time_a_late_nack_keeps_its_count() -> None:
    one = handed_out()
    one.nack(0)
    one.later()
    one.comes(1)
    one.ack(1)
    one.add()
    one.comes(0)
    assert one.nack(1) == DONE
    one.later()
    one.comes(2)


def test_while_it_is_being_added_again_with_its_time_a_late_nack_waits() -> None:
    one = handed_out()
    one.ack(0)
    one.topic.stage_add(batch_of([P], deliver_at_ms=[START_MS]))
    assert one.waits_for_what_is_staged()
    one.commit()
    assert not one.waits_for_what_is_staged()
    assert one.nack(0) == DONE
    one.later()
    one.comes(1)


def test_a_dead_letter_that_is_nacked_is_a_row_again_or_another_dead_letter() -> None:
    one = handed_out()
    assert one.nack(0, reject=True) == DONE
    assert len(one.state.dead_letters) == 1
    assert one.nack(0) == DONE
    one.later()
    one.comes(1)
    one.ack(1)
    one.max_count = 1
    assert one.nack(1) == DONE
    assert len(one.state.dead_letters) == 2, "the count of the request counts"
    one.nothing_comes()


def test_trimmed_and_nacked_it_is_a_row_again() -> None:
    one = handed_out()
    one.topic.trim_at_once()
    assert one.ack(0) == "NOT_THERE"
    assert one.nack(0) == DONE
    one.later()
    one.comes(1)


def test_entry_h_n_of_a_part_a_of_the_entry_the_part_stays() -> None:
    one = handed_out()
    assert one.nack(0, part=5) == DONE
    assert one.ack(0) == DONE
    one.later()
    assert one.handed_out() == [(part_of(1, P, 5)[1:], START_MS, 1)]
    assert one.ack(1, part=5) == DONE
    one.nothing_comes()


def test_entry_a_of_what_came_later_than_the_part_ends_the_part() -> None:
    one = handed_out()
    one.nack(0, part=5)
    one.nack(0)
    one.later()
    assert sorted(count for _, _, count in one.handed_out()) == [1, 1]
    assert one.ack(1) == DONE
    one.nothing_comes()


def test_entry_with_two_rows_n_of_a_part_of_one_a_of_the_other_the_part_stays() -> None:
    one, own_ms = handed_out(), START_MS + 50
    one.topic.add([P], own_ms, subscription_id=1)
    one.topic.now_ms = own_ms
    assert one.handed_out() == [(P, own_ms, 0)]
    assert one.nack(0, time_ms=own_ms) == DONE
    one.later()
    assert one.handed_out() == [(P, own_ms, 1)]
    assert one.nack(0, part=5) == DONE
    assert one.ack(0) == DONE
    assert one.ack(1, time_ms=own_ms) == DONE
    one.later()
    assert one.handed_out() == [(part_of(1, P, 5)[1:], START_MS, 2)]
    assert one.ack(2, part=5) == DONE
    one.nothing_comes()


def test_entry_and_a_part_are_out_again_n_of_the_part_a_of_the_entry_the_part_stays() -> None:
    one = handed_out()
    one.nack(0, part=5)
    for count in (0, 1):
        one.nack(count)
        one.later()
        one.handed_out()
    assert one.nack(1, part=5) == DONE
    assert one.ack(2) == DONE
    one.later()
    assert one.handed_out() == [(part_of(1, P, 5)[1:], START_MS, 3)]


def test_entry_h_a_of_the_entry_n_of_a_part_a_new_part() -> None:
    one = handed_out()
    one.ack(0)
    assert one.nack(0, part=5) == DONE
    one.later()
    assert one.handed_out() == [(part_of(1, P, 5)[1:], START_MS, 1)]


def test_without_forwarded_what_was_acknowledged_does_not_come_again() -> None:
    one = handed_out()
    one.ack(0)
    assert one.nack(0, forwarded=False) == "NOT_THERE"
    one.nothing_comes()


def test_without_a_count_any_hand_out_is_meant() -> None:
    one = handed_out()
    one.nack(None)
    one.later()
    one.comes(1)
    assert one.nack(None) == DONE
    one.later()
    one.comes(2)
    assert one.ack(None) == DONE
    assert one.nack(None) == DONE
    one.later()
    one.comes(1)


def test_a_row_that_a_late_nack_makes_is_never_due_in_the_future() -> None:
    one = OnePosition()
    assert one.nack(3, time_ms=START_MS + 10**6) == DONE
    one.later()
    one.time_ms = START_MS
    one.comes(4)
