"""Which targets a client takes."""

from __future__ import annotations

import pytest

import tarry
from tarry import credentials


@pytest.mark.parametrize("target", ["h:65536", "[::1]:70000", "127.0.0.1:99999", "dns:///h:65536"])
def test_a_port_that_there_is_not_is_refused_by_name(target: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match="no port; it must be at most 65535") as refused:
        tarry.Client(target)
    assert f"target is {target!r}" in str(refused.value)


@pytest.mark.parametrize("target", ["h:65535", "[::1]:7461", "::1", "h", "unix:/run/a:99999", "vsock:3:70000"])
def test_every_other_target_is_left_to_grpc(target: str) -> None:
    credentials.check_target(target)


@pytest.mark.parametrize(
    ("target", "addresses"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,a:1", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        ("ipv4:10.0.0.1:1,10.0.0.2:2", ("ipv4:10.0.0.1:1", "ipv4:10.0.0.2:2")),
        ("ipv4:10.0.0.1:1,ipv4:10.0.0.2:2", ("ipv4:10.0.0.1:1", "ipv4:10.0.0.2:2")),
        ("unix:/run/a,[::1]:2", ("unix:/run/a", "[::1]:2")),
        (["unix:/run/a,b"], ("unix:/run/a,b",)),
    ],
)
def test_a_target_is_one_address_or_several(target: str | list[str], addresses: tuple[str, ...]) -> None:
    assert credentials.addresses_of(target) == addresses


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("a:1,", "an address of it is empty"),
        ("", "an address of it is empty"),
        ([], "it must have an address"),
        ("a:1,b:65536", "65536 is no port"),
    ],
)
def test_every_address_of_a_target_is_checked(target: str | list[str], says: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match=says):
        tarry.Client(target)


def test_a_token_is_refused_where_others_could_read_it_at_any_of_the_addresses() -> None:
    with pytest.raises(tarry.InvalidArgument, match=r"not sent to tarry.example:1 without TLS"):
        tarry.Client("127.0.0.1:1,tarry.example:1", token="t")
