"""Which targets a client takes."""

from __future__ import annotations

import pytest

import tarry
from tarry import credentials


@pytest.mark.parametrize(
    "target", ["h:65536", "h:0", "h:", "h:grpc", "[::1]:70000", "127.0.0.1:99999", "dns:///h:65536"]
)
def test_a_port_that_there_is_not_is_refused_by_name(target: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match="is no port; it must be from 1 to 65535") as refused:
        tarry.Client(target)
    assert f"target is {target!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://localhost:7461", "must be host:port without http://, such as localhost:7461"),
        ("https://a@h:1/x?y", "must be host:port without https://, such as h:1; TLS is a setting of its own"),
        ("grpc://", "without grpc://, such as 127.0.0.1:7461"),
        ("::1", "an IPv6 address stands in brackets: [::1]:7461"),
        ("", "it must be host:port, such as 127.0.0.1:7461"),
        (":7461", "it must be host:port"),
        ("a b:7461", "it must be host:port"),
        ("me@h:7461", "it must be host:port"),
    ],
)
def test_a_target_that_leads_nowhere_is_refused_with_what_to_write(target: str, says: str) -> None:
    # The token would not be sent there either, but that is not what is wrong.
    with pytest.raises(tarry.InvalidArgument) as refused:
        tarry.Client(target, token="secret")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("target", "whole"),
    [
        ("localhost", "localhost:7461"),
        ("10.0.0.5", "10.0.0.5:7461"),
        ("[::1]", "[::1]:7461"),
        (" h:1\n", "h:1"),
        ("dns:h", "dns:h:7461"),
        ("dns://ns/h", "dns://ns/h:7461"),
        ("ipv4:10.0.0.1,10.0.0.2:80", "ipv4:10.0.0.1:7461,10.0.0.2:80"),
    ],
)
def test_a_target_without_a_port_means_that_of_a_daemon(target: str, whole: str) -> None:
    assert credentials.check_target(target) == whole


@pytest.mark.parametrize("target", ["h:65535", "[::1]:7461", "unix:/run/a:99999", "vsock:3:70000"])
def test_every_other_target_is_left_to_grpc(target: str) -> None:
    assert credentials.check_target(target) == target


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
        ("a:1,b:65536", "'65536' is no port"),
    ],
)
def test_every_address_of_a_target_is_checked(target: str | list[str], says: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match=says):
        tarry.Client(target)


def test_a_token_is_refused_where_others_could_read_it_at_any_of_the_addresses() -> None:
    with pytest.raises(tarry.InvalidArgument, match=r"not sent to tarry.example:1 without TLS"):
        tarry.Client("127.0.0.1:1,tarry.example:1", token="t")
