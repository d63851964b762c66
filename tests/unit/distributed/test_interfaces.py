"""Which interface gloo gets, on machines whose names and interfaces are pretended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sdp_deepspeed.distributed import interfaces
from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.distributed.interfaces import WayToFirstNode, gloo_uses, interface_for_gloo

HERE = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth1": ["fe80::1%eth1", "10.0.0.1"]}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: [SimpleNamespace(address=a) for a in addresses] for name, addresses in HERE.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node0")


def interface(*ways: WayToFirstNode | None) -> str | None:
    """Of rank 0."""
    return interfaces._interface(ways, 0)


OTHER = WayToFirstNode("10.0.0.1", "10.0.0.2")  # of the second node


def test_the_one_on_the_way_to_the_first_node() -> None:
    assert interface(WayToFirstNode("10.0.0.9", "10.0.0.1"), OTHER) == "eth1"
    assert interface(WayToFirstNode("10.0.0.1", "10.0.0.1"), OTHER) == "eth1"  # the first node itself


def test_an_address_of_one_link_may_name_its_interface() -> None:
    assert interface(WayToFirstNode("fe80::9%eth1", "fe80::1%eth1"), OTHER) == "eth1"


def test_a_first_node_whose_name_is_127_0_1_1_there_is_found_by_what_others_call_it() -> None:
    assert interface(WayToFirstNode("127.0.1.1", "127.0.0.1"), OTHER) == "eth1"


@pytest.mark.parametrize("ways", [[WayToFirstNode("127.0.0.1", "127.0.0.1")] * 2, [None, None], [None, OTHER]])
def test_one_node_and_one_that_has_been_told_are_left_alone(ways: Sequence[WayToFirstNode | None]) -> None:
    assert interface(*ways) is None


def test_what_to_set_where_there_is_none() -> None:
    with pytest.raises(RuntimeError) as caught:
        interface(WayToFirstNode("127.0.1.1", "127.0.0.1"), WayToFirstNode("192.168.7.7", "192.168.7.8"))
    words = str(caught.value)
    assert "There MASTER_ADDR 'node0' is 127.0.1.1 (see /etc/hosts), for others it is 192.168.7.7" in words
    assert "eth1 (fe80::1, 10.0.0.1)" in words
    assert "Set GLOO_SOCKET_IFNAME on this host" in words


def test_ways_are_found_without_sending_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert interfaces._way() == WayToFirstNode("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert interfaces._way() is None
    monkeypatch.delenv("MASTER_ADDR")
    assert interfaces._way() is None


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_way", pytest.fail)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interface_for_gloo(OneRank()) is None
    with gloo_uses(None):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_variable_is_set_for_the_group_alone_and_named_where_it_fails() -> None:
    def fail() -> Any:
        with gloo_uses("eth1"):
            assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
            raise RuntimeError("connectFullMesh failed")

    with pytest.raises(RuntimeError, match=r"eth1\): connectFullMesh failed. Set GLOO_SOCKET_IFNAME .* 127.0.1.1"):
        fail()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
