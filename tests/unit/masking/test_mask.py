"""What a mask does to a module, without an engine: blocks that are lacking or frozen, and becoming dense."""

from __future__ import annotations

from copy import deepcopy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches, units_of_branches
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.part import MaskedPart
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.masked_modules import infos
from tests.helpers.models import family, llama, loss_of
from tests.helpers.rank_models import mask_of


def plan_of(model: nn.Module, regime: str = "forward") -> Plan:
    units = tuple(Unit(branch.name, branch.pieces) for branch in locate_branches(model))
    holders = tuple((index % 2,) for index in range(len(units)))
    return Plan(regime, "block", 2, 1, 0, units, holders, (0, 1))


def masked(model: nn.Module, plan: Plan, rank: int) -> Mask:
    return mask_of(model, locate_branches(model), infos(model), plan, rank)


def test_a_lacking_module_keeps_its_name_and_ancestry() -> None:
    model, whole = llama(num_layers=3), llama(num_layers=3)
    masked(model, plan_of(model), rank=1)
    for (name, module), other in zip(model.named_modules(), whole.modules(), strict=True):
        assert isinstance(module, type(other)), name
        assert type(module).__name__ == type(other).__name__


def fill(part: MaskedPart, dense: nn.Module) -> list[Piece]:
    """From a whole model; the pieces that were asked for."""
    tensors, asked = dict(dense.named_parameters()), []

    def fetch(targets: Any) -> None:
        for piece, target in targets.items():
            asked.append(piece)
            target.copy_(piece.narrow(tensors[piece.parameter].detach()))

    with torch.no_grad():
        part.fill(fetch)
    return asked


def test_fill_and_release() -> None:
    model, batch = llama(num_layers=3), torch.zeros(1, 4, dtype=torch.long)
    dense, plan = deepcopy(model), plan_of(model)
    mask = masked(model, plan, rank=0)
    subnetwork = loss_of(model, batch)
    assert [part.name for part in mask.parts] == [unit.name for unit in plan.units]
    for part, unit, holders in zip(mask.parts, plan.units, plan.holders, strict=True):
        assert part.whole == (0 in holders)
        assert part.dense == part.whole
        asked = fill(part, dense)
        assert asked == ([] if part.whole else list(unit.pieces))
        assert part.dense
    assert torch.equal(loss_of(model, batch), loss_of(dense, batch))
    for part in mask.parts:
        part.release()
        assert part.dense == part.whole
    assert torch.equal(loss_of(model, batch), subnetwork)
    assert not torch.equal(subnetwork, loss_of(dense, batch))


def test_frozen_blocks_have_no_parts() -> None:
    """Backward regime: nothing has to become dense; what is lacking is there and takes no gradients."""
    model, batch = llama(num_layers=3), torch.zeros(1, 4, dtype=torch.long)
    dense, plan = deepcopy(model), plan_of(model, "backward")
    mask = masked(model, plan, rank=0)
    assert mask.parts == []
    assert torch.equal(loss_of(model, batch), loss_of(dense, batch))
    lacking = {piece.parameter for index in plan.units_of(1) for piece in plan.units[index].pieces}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == lacking
    assert mask.stored().keys() == dict(dense.named_parameters()).keys() | dict(dense.named_buffers()).keys()


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_full_coverage_masks_nothing(regime: str) -> None:
    """Not even a class is changed, whatever the strategy."""
    model, whole = llama(num_layers=3), llama(num_layers=3)
    branch = next(branch for branch in locate_branches(model) if branch.description.name == "mlp")
    units = (Unit("block", locate_branches(model)[0].pieces), Unit("neurons", branch.pieces_of_cells(range(24))))
    plan = Plan(regime, "neuron", 2, 2, 0, units, ((0, 1), (0, 1)), (0, 1))
    mask = masked(model, plan, rank=0)
    assert mask.parts == []
    assert [type(module) for module in model.modules()] == [type(module) for module in whole.modules()]
    assert all(p.requires_grad and p.numel() for p in model.parameters())


@pytest.mark.parametrize("strategy", ["block", "neuron"])
@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_what_every_worker_holds_is_left_as_it_is(regime: str, strategy: str) -> None:
    """Beside MLPs that are cut: no part is made of attentions, and their modules are the family's own."""
    model, whole = llama(num_layers=2), llama(num_layers=2)
    units = units_of_branches(locate_branches(model), strategy=strategy, num_subnetworks=2)
    turns = cycle([(0,), (1,)])
    holders = tuple((0, 1) if ".attention" in unit.name else next(turns) for unit in units)
    plan = Plan(regime, strategy, 2, None, 0, tuple(units), holders, (0, 1))
    mask = masked(model, plan, rank=0)
    touched = {plan.units[index].name for part in mask.parts for index in part.units}
    assert not any(".attention" in name for name in touched)
    assert bool(touched) == (regime == "forward" or strategy == "neuron")
    for (name, module), other in zip(model.named_modules(), whole.modules(), strict=True):
        assert "self_attn" not in name or type(module) is type(other), name


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (
            Piece("model.layers.0.mlp.up_proj.weight", None, 0, 24 * 16),
            r"neither made of whole residual .*: '.*up_proj",
        ),
        (Piece("model.layers.0.mlp.up_proj.weight", 0, 0, 12), r"does not take the same .*: '.*up_proj"),
        (Piece("model.layers.0.input_layernorm.weight", 0, 0, 8), r"neither made of whole residual .*: '.*layernorm"),
        (Piece("lm_head.weight", None, 0, 61 * 16), r"neither made of whole residual .*: 'lm_head"),
    ],
)
def test_units_that_are_neither_branches_nor_neurons_are_refused(piece: Piece, words: str) -> None:
    model = llama(num_layers=3)
    other = Unit("other", locate_branches(model)[2].pieces)
    plan = Plan("forward", "block", 2, 1, 0, (Unit("u", (piece,)), other), ((0,), (1,)), (0, 1))
    with pytest.raises(ValueError, match=rf"unit 'u' .*{words}"):
        masked(model, plan, rank=0)


def llama_plan(*holders: tuple[int, ...], change: Any = None) -> tuple[nn.Module, Plan]:
    """A layer's two heads, and its MLP in two groups, with one piece changed."""
    model = family("llama", num_layers=1)
    units = units_of_branches(locate_branches(model), strategy="neuron", neuron_groups=2)
    if change is not None:
        *pieces, last = units[2].pieces
        units[2] = Unit(units[2].name, (*pieces, change(last)))
    return model, Plan("forward", "neuron", 2, 1, 0, tuple(units), holders, (0, 1))


def test_plans_that_cut_no_whole_neurons_are_refused() -> None:
    even = ((0,), (1,), (0,), (1,))
    model, plan = llama_plan(*even, change=lambda last: Piece(last.parameter, 1, 0, 11))
    with pytest.raises(
        ValueError, match=r"'model\.layers\.0\.mlp\.group_0' does not take the same whole neurons .*gate"
    ):
        mask_of(model, locate_branches(model), infos(model), plan, 0)
    model, plan = llama_plan(*even, change=lambda last: Piece("model.norm.weight", None, 0, 16))
    with pytest.raises(ValueError, match=r"group_0' does not take the same .*model\.norm\.weight"):
        mask_of(model, locate_branches(model), infos(model), plan, 0)


def test_a_worker_without_a_neuron_of_a_branch_is_refused() -> None:
    model, plan = llama_plan((0,), (1,), (0,), (0,))
    with pytest.raises(ValueError, match=r"subnetwork 1 has no unit of 'model\.layers\.0\.mlp': .*at least one group"):
        mask_of(model, locate_branches(model), infos(model), plan, 0)
