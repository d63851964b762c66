"""Pieces as FSDP2 takes them: the same list on all ranks, each unit of the plan in one of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.fsdp.block_units import block_units
from sdp_deepspeed.fsdp.neuron_units import in_model_order, neuron_units
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors
from tests.helpers.masked_modules import build
from tests.helpers.split_models import overlapping_plan, split

RANKS = (0, 1, 2)


@pytest.mark.parametrize("name", ["llama_odd", "gpt2"])
def test_all_ranks_have_the_same_pieces(name: str) -> None:
    dense = build(name, num_layers=2)
    plan, branches = overlapping_plan(dense), locate_branches(dense)
    tensors = tuple(dense_tensors(dense))
    lists = []
    for rank in RANKS:
        module, splits = split(dense, plan, rank)
        model = RankModel(plan, tensors, PieceViews(named_tensors(dense)), rank)
        units = neuron_units(module, model, branches, splits)
        assert [*units] == [branch.name for branch in branches]
        lists.append([unit for of_branch in units.values() for unit in of_branch])
        for unit in lists[-1]:
            assert unit.is_held == (rank in unit.holders)
            assert all(module.get_parameter(tensor.name) in {*unit.fsdp.parameters()} for tensor in unit.tensors)
            assert all(tensor.holders == unit.holders for tensor in unit.tensors)
            assert module.get_submodule(unit.ends[0]) is module.get_submodule(unit.ends[1])
    for one, other in pairwise(lists):
        assert [(u.name, u.holders, u.ends) for u in one] == [(u.name, u.holders, u.ends) for u in other]
    assert all(a.holders < b.holders for a, b in pairwise(lists[0]) if a.ends == b.ends)


def test_each_element_is_held_by_its_holders_once() -> None:
    dense = build("gpt2")
    plan = overlapping_plan(dense)
    found: dict[tuple[str, int], set[int]] = {}
    for rank in RANKS:
        module, splits = split(dense, plan, rank)
        model = RankModel(plan, tuple(dense_tensors(dense)), PieceViews(named_tensors(dense)), rank)
        for units in neuron_units(module, model, locate_branches(dense), splits).values():
            for tensor in (tensor for unit in units for tensor in unit.tensors):
                for index in (i for start, length in tensor.intervals for i in range(start, start + length)):
                    assert rank not in found.setdefault((tensor.dense_name, index), set())
                    found[tensor.dense_name, index].add(rank)
    for index, unit in enumerate(plan.units):
        for piece in unit.pieces:
            for i in range(piece.start, piece.start + piece.length):
                assert found.pop((piece.parameter, i)) == {*plan.ranks_of(index)}
    assert not found


def test_what_everybody_holds_is_one_unit() -> None:
    dense = build("gpt2")
    plan = overlapping_plan(dense)
    plan = replace(plan, holders=((0, 1, 2),) * len(plan.units), num_holders=3)
    module, splits = split(dense, plan, 1)
    assert not splits
    model = RankModel(plan, tuple(dense_tensors(dense)), PieceViews(named_tensors(dense)), 1)
    units = neuron_units(module, model, locate_branches(dense), splits)
    assert [unit.modules for (unit,) in units.values()] == [
        (module.transformer.h[0].attn,),
        (module.transformer.h[0].mlp,),
    ]
    assert all(tensor.is_whole for (unit,) in units.values() for tensor in unit.tensors)


def test_units_are_in_the_order_of_the_model() -> None:
    dense = build("gpt2", num_layers=2)
    plan = overlapping_plan(dense, {"attention": "block", "mlp": "neuron"})
    branches = locate_branches(dense)
    model = RankModel(plan, tuple(dense_tensors(dense)), PieceViews(named_tensors(dense)), 1)
    blocks = list(block_units(dense, model, branches))[::-1]
    module, splits = split(dense, plan, 1)
    units = in_model_order(branches, blocks, neuron_units(module, model, branches, splits))
    assert [unit.name.partition(".pieces")[0] for unit in units if not unit.name.endswith((".1", ".2", ".3"))] == [
        "transformer.h.0.attention",
        "transformer.h.0.mlp",
        "transformer.h.1.attention",
        "transformer.h.1.mlp",
    ]
    assert len(units) == 2 * (1 + 4)
