"""Which network interface gloo is to use: the one that reaches the first node.

By itself gloo takes the address that the host's own name stands for. In many installations that is 127.0.1.1 by
/etc/hosts, where no other node can reach it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from sdp_deepspeed.distributed.agreement import Gatherer, run_on_all_ranks
from sdp_deepspeed.messages import listed

_VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class WayToFirstNode:
    """From one rank to the first node.

    Args:
        first: address of the first node, as this host knows it.
        own: address of this host on the way there.
    """

    first: str
    own: str


def interface_for_gloo(ranks: Gatherer) -> str | None:
    """Name of an interface; None where gloo can do without, on one node, or has been told. Every rank calls it.

    Raises:
        RuntimeError: on all ranks: no interface of one of the hosts has an address by which others know it.
    """
    ways = ranks.gather_objects(None if os.environ.get(_VARIABLE) else _way())
    return run_on_all_ranks(ranks, lambda: _interface(ways, ranks.rank))


def _way() -> WayToFirstNode | None:
    """None without a first node, as where ranks meet in a file."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "29500")
    if not host:
        return None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port) or 29500, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return WayToFirstNode(str(address[0]), str(probe.getsockname()[0]))
    except (OSError, ValueError):
        return None


def _interface(ways: Sequence[WayToFirstNode | None], rank: int) -> str | None:
    """Of this rank, by the ways of all."""
    own = ways[rank]
    known = sorted({way.first for way in ways if way is not None and not _is_loopback(way.first)})
    if own is None or not known:
        return None
    # The first node may know itself by an address of its own alone: then by those under which others know it.
    wanted = known if _is_loopback(own.own) else [own.own]
    addresses = {name: [_bare(address.address) for address in there] for name, there in psutil.net_if_addrs().items()}
    for name, there in addresses.items():
        if not {_bare(address) for address in wanted}.isdisjoint(there):
            return name
    names = (f"{name} ({', '.join(there)})" for name, there in addresses.items())
    master, host = os.environ.get("MASTER_ADDR"), socket.gethostname()
    raise RuntimeError(
        f"which interface of host {host} reaches the other nodes? There MASTER_ADDR {master!r} is {own.first} (see "
        f"/etc/hosts), for others it is {listed(known)}, which no interface here has: {listed(names, separator='; ')}. "
        f"Set {_VARIABLE} on this host to the right one, such as {_VARIABLE}=eth0, or MASTER_ADDR to an address that "
        "all nodes reach"
    )


def _bare(address: str) -> str:
    """Without the interface that an IPv6 address of one link may name."""
    return address.partition("%")[0]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(_bare(address)).is_loopback
    except ValueError:
        return False


@contextmanager
def gloo_uses(interface: str | None) -> Iterator[None]:
    """Groups that are made in this block use an interface; None leaves it to gloo.

    Raises:
        RuntimeError: gloo's, with what to set.
    """
    if interface is not None:
        os.environ[_VARIABLE] = interface
    try:
        yield
    except RuntimeError as error:
        chosen = os.environ.get(_VARIABLE, "the one of the host's own name")
        raise RuntimeError(
            f"gloo cannot connect all ranks (interface: {chosen}): {error}. Set {_VARIABLE} on each node to the "
            "interface that reaches the others; host names that stand for 127.0.1.1 in /etc/hosts mislead gloo"
        ) from error
    finally:
        if interface is not None:
            del os.environ[_VARIABLE]
