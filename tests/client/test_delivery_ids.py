"""Hand-outs by name, as text."""

from __future__ import annotations

import pytest

import tarry

NAMES = ["0-0-0-0", "7-1-1000-3", f"{2**64 - 1}-{2**64 - 1}-{2**64 - 1}-{2**32 - 1}", "7-1.65535-1000-1", "7-1.0-0-2"]
LOG = tarry.DeliveryId.log_of("orders@1", "relay")


@pytest.mark.parametrize("text", NAMES)
def test_a_name_is_read_as_it_was_written(text: str) -> None:
    delivery = tarry.DeliveryId.parse(text)
    assert str(delivery) == text
    assert str(tarry.DeliveryId.parse(str(delivery))) == text
    positions = delivery.positions
    assert positions.rows == 1
    assert str(type(delivery).of(positions, 0)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7-1-1000",
        "7-1-1000-3-4",
        "07-1-1000-3",
        "7-1.-1000-3",
        "7-1-1000-x",
        "7-1-1000-٣",
        " 7-1-1000-3",
        "7-1-1000-3-0123456G",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match="is none; it has the form"):
        tarry.DeliveryId.parse(text)


@pytest.mark.parametrize(("text", "bits"), [(f"7-1-1000-{2**32}", 32), (f"{2**64}-1-1000-0", 64)])
def test_a_number_that_is_too_large_is_refused(text: str, bits: int) -> None:
    with pytest.raises(tarry.InvalidArgument, match=f"more than {bits} bits"):
        tarry.DeliveryId.parse(text)


def test_a_name_may_end_with_its_log_by_which_names_are_not_told_apart() -> None:
    text = f"7-1-1000-3-{LOG}"
    delivery = tarry.DeliveryId.parse(text)
    assert (delivery.log, str(delivery)) == (LOG, text)
    assert delivery == tarry.DeliveryId.parse("7-1-1000-3")
    assert len({delivery, tarry.DeliveryId.parse("7-1-1000-3")}) == 1


def test_a_log_is_named_by_topic_and_subscription() -> None:
    others = [tarry.DeliveryId.log_of(*each) for each in (("orders@2", "relay"), ("orders@1", "another"))]
    assert len({LOG, *others}) == 3
