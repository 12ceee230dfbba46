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
