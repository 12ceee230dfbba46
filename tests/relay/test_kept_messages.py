"""What is kept of messages that were read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tarry_relay.kept_messages import Kept


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=60), st.integers(0, 100))
def test_what_is_kept_is_given_once_and_takes_no_more_than_it_may(
    calls: list[tuple[int, int, bool]], bytes_max: int
) -> None:
    kept: Kept[int] = Kept(bytes_max)
    model: dict[int, tuple[int, int]] = {}
    for number, (offset, size, is_taken) in enumerate(calls):
        if is_taken:
            assert kept.take((0, offset)) == model.pop(offset, (None, 0))[0]
            continue
        kept.keep((0, offset), number, size)
        model.pop(offset, None)
        if size <= bytes_max:
            model[offset] = number, size
        while sum(size for _, size in model.values()) > bytes_max:
            model.pop(next(iter(model)))
    assert {offset: kept.take((0, offset)) for offset in range(10)} == {
        offset: model.get(offset, (None, 0))[0] for offset in range(10)
    }
