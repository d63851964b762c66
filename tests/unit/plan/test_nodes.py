"""Ranks per node, from what each rank says about itself."""

from __future__ import annotations

import pytest

from sdp_deepspeed.plan.nodes import Location, ranks_per_node


def nodes(*sizes: int | None, local_size: int | None = None) -> list[Location]:
    """Ranks of nodes with these sizes, numbered node by node."""
    return [Location(f"host{node}", local_size or size) for node, size in enumerate(sizes) for _ in range(size or 1)]


def test_ranks_per_node() -> None:
    assert ranks_per_node(nodes(8, 8, 8), range(24), "k") == 8
    assert ranks_per_node(nodes(1, 1), range(2), "k") == 1
    assert ranks_per_node(nodes(8, local_size=4), range(8), "k") == 4, "of one machine that plays two nodes"
    for column in (0, 1):
        assert ranks_per_node(nodes(4, 4), range(column, 8, 2), "k") == 2, "tensor parallelism"


@pytest.mark.parametrize(
    ("locations", "members", "message"),
    [
        (nodes(8), range(8), "all 8 ranks are on one node"),
        (nodes(1), range(1), "all 1 ranks are on one node"),
        (nodes(8, 4), range(12), "nodes have 4 and 8 of the 12 ranks"),
        (nodes(4, 2, local_size=4), range(6), "nodes have 4 of the 6 ranks"),
        (nodes(None, None), range(2), "the number of ranks per node is unknown on rank 0, 1; set LOCAL_WORLD_SIZE"),
        (nodes(2, 2)[::2] + nodes(2, 2)[1::2], range(4), "ranks 0 and 1 of a node with 2 ranks are on different hosts"),
        (nodes(4, 4, 4), range(0, 12, 3), "a tensor-parallel group has ranks of two nodes"),
        (nodes(2, 2), range(2), "a tensor-parallel group has ranks of two nodes"),
    ],
)
def test_nodes_that_are_no_subnetworks(locations: list[Location], members: range, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ranks_per_node(locations, members, "k")
    assert str(caught.value).endswith("or give the number of subnetworks")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, 4),
        ({"LOCAL_SIZE": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"LOCAL_SIZE": "two"}, None),
        ({}, None),
    ],
)
def test_what_launchers_set(variables: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Location.here().local_size == expected
