"""Where the replicas of subnetworks go: on one node, or on different ones (`k` below `D`).

Pure: the nodes are handed in. Correctness does not depend on them, only how many bytes cross between nodes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sdp_deepspeed.distributed.agreement import Gatherer

Name = Literal["packed", "spread"]
Asked = Literal["auto"] | Name
Counts = NDArray[np.int64]

# The launcher's number of a node: torchrun's, and DeepSpeed's launcher's. MPI's and srun's processes have neither.
_NODE_NUMBERS = ("GROUP_RANK", "CROSS_RANK")


@dataclass(frozen=True)
class Network:
    """What decides which bytes cross between nodes.

    Args:
        nodes: the node of each of the D data-parallel ranks; equal labels are one node.
        gradient_bytes: bytes that one element costs on its way to its owner, per optimizer step.
        weight_bytes: bytes that one element costs on its way back.
    """

    nodes: tuple[Hashable, ...]
    gradient_bytes: int = 4
    weight_bytes: int = 4

    @classmethod
    def gather(
        cls, dp_group: Gatherer, *, tp_group: Gatherer | None = None, gradient_bytes: int, weight_bytes: int
    ) -> Network:
        """The network of the ranks that run; all of them call it, and all get the same.

        Args:
            dp_group: the data-parallel group.
            tp_group: the tensor-parallel group, whose ranks share a subnetwork and must place it alike: a worker's node
                is the list of its ranks' nodes. None if there is none.
        """
        node: Hashable = node_of_process(os.environ, socket.gethostname())
        if tp_group is not None:
            node = tuple(tp_group.gather_objects(node))
        return cls(tuple(dp_group.gather_objects(node)), gradient_bytes, weight_bytes)


def node_of_process(environment: Mapping[str, str], hostname: str) -> str:
    """A label of the node that a process runs on.

    The host's name alone joins machines that were cloned with one name, and namespaces of one machine that stand for
    nodes; the launcher's number alone is missing under MPI. LOCAL_WORLD_SIZE does not say which ranks are neighbors.
    A wrong label costs traffic, never correctness.
    """
    numbers = [environment[name] for name in _NODE_NUMBERS if name in environment]
    return "/".join([hostname, *numbers[:1]])


@dataclass(frozen=True)
class Load:
    """What is exchanged, as far as a placement matters.

    Args:
        num_subnetworks: k.
        holders: for each unit its subnetworks.
        elements: for each unit its trainable elements.
        num_shared: trainable elements of shared parameters; they cost the same wherever replicas are.
        all_receive_weights: whether owners send to all ranks (backward regime) or to the holders.
    """

    num_subnetworks: int
    holders: Sequence[Sequence[int]]
    elements: Sequence[int]
    num_shared: int = 0
    all_receive_weights: bool = False


@dataclass(frozen=True)
class Placement:
    """A placement, and what both would send between nodes in one optimizer step, all ranks together.

    Args:
        name: the one that was chosen.
        num_nodes: nodes that the ranks are on.
        packed_bytes, spread_bytes: bytes between nodes per step.
        by_config: whether the config asked for it.
        has_replicas: whether there was anything to choose (`k` below `D`).
    """

    name: Name
    num_nodes: int
    packed_bytes: int
    spread_bytes: int
    by_config: bool = False
    has_replicas: bool = True

    @property
    def sent_bytes(self) -> int:
        """Bytes between nodes per step as it is."""
        return self.packed_bytes if self.name == "packed" else self.spread_bytes

    def line(self) -> str:
        """Which and why, for people."""
        if not self.has_replicas:
            return f"traffic: {readable(self.packed_bytes)} between {self.num_nodes} nodes per step"
        words = f"placement: {self.name}{', as configured' if self.by_config else ''}"
        if self.num_nodes == 1:
            return f"{words}; all ranks are on one node"
        other, sent = ("spread", self.spread_bytes) if self.name == "packed" else ("packed", self.packed_bytes)
        would = "as much" if sent == self.sent_bytes else f"would send {readable(sent)}"
        return f"{words}; {readable(self.sent_bytes)} between {self.num_nodes} nodes per step, {other} {would}"


@dataclass(frozen=True)
class Weighed:
    """What `assignment: "auto"` did not take on several nodes.

    Args:
        balanced_gap: spectral gap of "balanced"; None if that was taken.
        balanced_bytes: bytes between nodes per step of it.
    """

    balanced_gap: float | None = None
    balanced_bytes: int = 0

    def line(self) -> str:
        """For people, beside the plan's own spectral gap and bytes."""
        if self.balanced_gap is None:
            return "assignment: balanced; no other keeps 3/4 of its spectral gap and sends less between nodes"
        balanced = f"spectral gap {self.balanced_gap:.4f}, {readable(self.balanced_bytes)} between nodes per step"
        return f"assignment: holders on few nodes; balanced has: {balanced}"


def readable(num_bytes: int) -> str:
    """In GB from 1 GB on, else in MB."""
    return f"{num_bytes / 1e9:.4g} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.4g} MB"


def choose_placement(load: Load, network: Network, asked: Asked = "auto") -> tuple[Placement, tuple[int, ...]]:
    """The placement, and the subnetwork of each data-parallel rank.

    Args:
        asked: what the config says; "auto" takes what sends fewer bytes between nodes, "packed" if both send as many.
    """
    k = load.num_subnetworks
    assert len(network.nodes) % k == 0, "plan.counts checks that k divides the number of ranks"
    ways: dict[Name, tuple[int, ...]] = {"packed": packed(network.nodes, k), "spread": spread(network.nodes, k)}
    sent = {name: bytes_between_nodes(load, network, ranks) for name, ranks in ways.items()}
    fewest: Name = "spread" if sent["spread"] < sent["packed"] else "packed"
    name = fewest if asked == "auto" else asked
    num_nodes = len(set(network.nodes))
    has_replicas = k < len(network.nodes)
    if not has_replicas:  # every rank trains its own: nothing to choose
        own = tuple(range(k))
        crossing = bytes_between_nodes(load, network, own)
        return Placement(name, num_nodes, crossing, crossing, asked != "auto", has_replicas), own
    return Placement(name, num_nodes, sent["packed"], sent["spread"], asked != "auto", has_replicas), ways[name]


def nodes_of_subnetworks(network: Network, num_subnetworks: int, asked: Asked) -> tuple[int, ...]:
    """A number for each subnetwork, the same for those on the same node or nodes, where replicas are packed unless
    the config asks for "spread"."""
    nodes, k = network.nodes, num_subnetworks
    if k == len(nodes):
        ranks: tuple[int, ...] = tuple(range(k))
    else:
        ranks = spread(nodes, k) if asked == "spread" else packed(nodes, k)
    homes: list[set[Hashable]] = [set() for _ in range(k)]
    for node, subnetwork in zip(nodes, ranks, strict=True):
        homes[subnetwork].add(node)
    numbers = {home: number for number, home in enumerate(dict.fromkeys(map(frozenset, homes)))}
    return tuple(numbers[frozenset(home)] for home in homes)


def packed(nodes: Sequence[Hashable], num_subnetworks: int) -> tuple[int, ...]:
    """Subnetwork of each rank, with as many subnetworks as possible whole on one node.

    What is left on nodes whose size the number of replicas does not divide is filled up from the next such nodes.
    """
    num_replicas = len(nodes) // num_subnetworks
    whole: list[int] = []
    rest: list[int] = []
    for ranks in _ranks_by_node(nodes):
        cut = len(ranks) - len(ranks) % num_replicas
        whole += ranks[:cut]
        rest += ranks[cut:]
    return _inverse(whole + rest, lambda position: position // num_replicas)


def spread(nodes: Sequence[Hashable], num_subnetworks: int) -> tuple[int, ...]:
    """Subnetwork of each rank, with the replicas of each on as many nodes as possible.

    A node of m ranks has m / k ranks of each subnetwork, rounded down or up.
    """
    order = [rank for ranks in _ranks_by_node(nodes) for rank in ranks]
    return _inverse(order, lambda position: position % num_subnetworks)


def _ranks_by_node(nodes: Sequence[Hashable]) -> list[list[int]]:
    """Ranks of each node, ascending; nodes in the order of their first rank."""
    result: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        result.setdefault(node, []).append(rank)
    return list(result.values())


def _inverse(order: Sequence[int], subnetwork_at: Callable[[int], int]) -> tuple[int, ...]:
    """Subnetwork of each rank when `subnetwork_at(i)` is that of rank `order[i]`."""
    result = [0] * len(order)
    for position, rank in enumerate(order):
        result[rank] = subnetwork_at(position)
    return tuple(result)


def bytes_between_nodes(load: Load, network: Network, subnetwork_of_rank: Sequence[int]) -> int:
    """Bytes that cross between nodes in one optimizer step, all ranks together (exchange/README.md has the bound).

    A unit of n elements with holders on m of M nodes crosses m - 1 times on its way there, and m - 1 or M - 1 times on
    its way back, however many holders a node has: they add up first.
    """
    is_on = _ranks_per_node(network.nodes, subnetwork_of_rank, load.num_subnetworks) > 0
    num_nodes = is_on.shape[1]

    def sent(holders: Sequence[int], elements: int) -> int:
        there = int(is_on[list(holders)].any(axis=0).sum()) - 1
        back = num_nodes - 1 if load.all_receive_weights else there
        return elements * (there * network.gradient_bytes + back * network.weight_bytes)

    units = sum(sent(holders, elements) for holders, elements in zip(load.holders, load.elements, strict=True))
    return units + sent(range(load.num_subnetworks), load.num_shared)


def _ranks_per_node(nodes: Sequence[Hashable], subnetwork_of_rank: Sequence[int], num_subnetworks: int) -> Counts:
    """How many ranks of each subnetwork are on each node: [k, nodes]."""
    columns = {node: column for column, node in enumerate(dict.fromkeys(nodes))}
    table = np.zeros((num_subnetworks, len(columns)), dtype=np.int64)
    for node, subnetwork in zip(nodes, subnetwork_of_rank, strict=True):
        table[subnetwork, columns[node]] += 1
    return table
