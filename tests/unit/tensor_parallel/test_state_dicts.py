"""State dicts of a divided model: whole tensors inside, a rank's own outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.plan.shards import Division, Shards
from sdp_deepspeed.tensor_parallel.state_dicts import StateDicts
from sdp_deepspeed.units import Piece, Unit


class Tied(nn.Module):
    """Rank 1's half of two tied layers, and a bias that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
        self.two.weight = self.one.weight


class OtherRankHas(Communicator):
    """A group of two in which rank 0's half is all fives."""

    def __init__(self) -> None:
        self.rank, self.size, self.num_sums = 1, 2, 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        assert not tensor[:3].any(), "nothing where the other rank's half goes"
        tensor[:3] = 5
        return tensor


def installed(model: Tied, group: OtherRankHas, shards: Shards) -> StateDicts:
    result = StateDicts(group, shards)
    result.install(model)
    return result


def test_state_dicts_are_gathered_inside_only() -> None:
    model, group = Tied(), OtherRankHas()
    dicts = installed(model, group, Shards(1, 2, {"one.weight": Division((6, 2), 0, (3, 3))}))
    own = model.one.weight.detach().clone()
    assert model.state_dict()["one.weight"].shape == (3, 2)
    with dicts.whole():
        state = model.state_dict()
        inner = model.two.state_dict()
    whole = torch.cat([torch.full((3, 2), 5.0), own])
    assert torch.equal(state["one.weight"], whole)
    assert torch.equal(inner["weight"], whole)
    assert state["two.weight"] is state["one.weight"], "tied as in the dense model"
    assert group.num_sums == 2
    assert model.state_dict()["one.weight"].shape == (3, 2)


def test_state_dicts_are_narrowed_inside_only() -> None:
    model = Tied()
    dicts = installed(model, OtherRankHas(), Shards(1, 2, {"one.weight": Division((6, 2), 0, (3, 3))}))
    whole = {"one.weight": torch.arange(12.0).view(6, 2), "one.bias": torch.ones(3)}
    whole["two.weight"] = whole["one.weight"]
    with dicts.whole():
        model.load_state_dict(whole)
    assert torch.equal(model.two.weight, whole["one.weight"][3:])
    assert whole["one.weight"].shape == (6, 2), "the caller's is as it was"
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(whole)


def test_nobody_says_along_which_dim() -> None:
    model = Tied()
    unknown = Division((12,), 0, (6, 6), is_known=False)
    dicts = installed(model, OtherRankHas(), Shards(1, 2, {"one.weight": unknown}))
    with dicts.whole(), pytest.raises(RuntimeError, match=r"one\.weight .*set its attribute partition_dim"):
        model.state_dict()
    local = Shards(1, 2, {"one.weight": unknown}).dense_unit(Unit("u", (Piece("one.weight", None, 0, 6),)))
    assert local.pieces[0].length == 12, "held or lacked as a whole it can be"
