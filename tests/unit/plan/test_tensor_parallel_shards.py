"""Dense coordinates and those of a tensor-parallel rank: units, plans, branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.architectures import Branch, Cut, InnerLayers, LocatedBranch
from sdp_deepspeed.architectures.cut_tensors import CutTensor
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import units_of_branches
from sdp_deepspeed.plan.tensor_parallel_shards import Division, TensorParallelShards
from sdp_deepspeed.planner import plan_model
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.models import llama, parsed

UP = Division((12, 4), 0, (6, 6))
DOWN = Division((4, 12), 1, (6, 6))


def shards(index: int = 0) -> TensorParallelShards:
    return TensorParallelShards(index, 2, {"up": UP, "down": DOWN})


def plan_of(*units: Unit) -> Plan:
    return Plan("forward", "neuron", 1, 0, units, ((0,),) * len(units), (0,))


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece("up", 0, 0, 6)],  # the first shard only: what a plan without tensor parallelism has
        [Piece("up", 0, 0, 2), Piece("up", 0, 7, 2)],
        [Piece("up", 0, 4, 4)],  # over an edge, [4, 6) and [0, 2)
        [Piece("up", 0, 0, 2), Piece("up", 0, 6, 3)],
    ],
)
def test_pieces_must_be_equal_in_all_shards(pieces: list[Piece]) -> None:
    with pytest.raises(
        ValueError, match=r"unit 'u' takes different pieces of 'up' in the 2 .*: \[.*made with 2 tensor"
    ):
        shards().local_plan(plan_of(Unit("u", tuple(pieces))))


def branch(*, blocks: int = 1, dim: int = 0) -> LocatedBranch:
    inner = InnerLayers((Cut("up", dim, blocks), Cut("down", 1, is_output=True)))
    tensors = (CutTensor(inner.cuts[0], "up", dim, 12, (1,) * blocks), CutTensor(inner.cuts[1], "down", 1, 12))
    pieces = (Piece("norm", None, 0, 4), Piece("up", None, 0, 48), Piece("down", None, 0, 48))
    return LocatedBranch("layer", Branch("mlp", norm="norm", body="ff", inner=inner), pieces, 12, tensors)


def test_layers_that_are_divided_otherwise_cannot_be_cut() -> None:
    """Stacked blocks, another dim, or only some of the layers."""
    for wrong in (branch(blocks=3), branch(dim=1)):
        assert "does not divide up along its neurons or heads" in shards().local_branch(wrong).uncuttable_reason
    assert "does not divide down" in TensorParallelShards(0, 2, {"up": UP}).local_branch(branch()).uncuttable_reason


def divided_llama(index: int) -> tuple[list[LocatedBranch], TensorParallelShards]:
    """A Llama's branches and shards, as AutoTP divides it among two ranks."""
    model = llama()
    divisions = {}
    for found in proven_branches(model, "neuron"):
        for tensor in found.cut_tensors:
            shape = tuple(model.get_parameter(tensor.parameter).shape)
            divisions[tensor.parameter] = Division(shape, tensor.dim, (shape[tensor.dim] // 2,) * 2)
    own = TensorParallelShards(index, 2, divisions)
    return [own.local_branch(found) for found in proven_branches(model, "neuron")], own


def block(**keys: object) -> SubnetworkConfig:
    return parsed(**{"holders": 1, "strategy": {"mlp": "neuron"}, **keys})


def divided_plan(index: int, config: SubnetworkConfig) -> tuple[Plan, Plan]:
    """The dense plan, and this rank's."""
    model = llama()
    branches, own = divided_llama(index)
    for name, division in own.divisions.items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.narrow(division.dim, index * division.lengths[0], division.lengths[0]).clone()
    plan, _ = plan_model(model, config, 2, branches=branches, shards=own)
    return plan, own.local_plan(plan)


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    plan, local = divided_plan(0, block())
    plan.save(path)
    assert divided_plan(1, block(assignment=path)) == (plan, local)


def test_a_plan_of_blocks_fits_any_division(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    whole = plan_model(llama(), block(strategy="block"), 2)[0]
    whole.save(path)
    plan, local = divided_plan(0, block(strategy="block", assignment=path))
    assert plan == whole
    expected = units_of_branches(divided_llama(0)[0])
    assert list(local.units) == expected
