"""Who holds what of a branch, as pieces."""

from __future__ import annotations

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.fsdp.piece_table import PieceTable, holder_sets, merged
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors
from tests.helpers.masked_modules import build
from tests.helpers.split_models import overlapping_plan


def test_neighbors_are_one_interval() -> None:
    assert merged([(0, 2), (2, 3), (6, 1), (7, 1)]) == ((0, 5), (6, 2))
    assert merged([]) == ()


def test_sets_have_numbers_and_names() -> None:
    """Of GPT-2: 4 heads, 29 neurons in 5 groups, of which the first and the fourth have the same holders."""
    dense = build("gpt2")
    plan = overlapping_plan(dense)
    assert holder_sets(plan) == [(0,), (0, 1), (0, 1, 2), (0, 2)]
    model = RankModel(plan, tuple(dense_tensors(dense)), PieceViews(named_tensors(dense)))
    attention, mlp = (PieceTable(model, branch) for branch in locate_branches(dense))
    assert attention.sets == {0: (0,), 1: (0, 1), 3: (0, 2)}
    assert mlp.sets == {0: (0,), 1: (0, 1), 2: (0, 1, 2), 3: (0, 2)}
    assert attention.cells(1) == (0, 3)
    assert attention.tensors(1)["c_attn.weight"].intervals == ((0, 4), (12, 8), (28, 8), (44, 4))
    tensor = mlp.tensors(1)["c_proj.weight"]
    assert tensor.name == "transformer.h.0.mlp.pieces.1.c_proj.weight"
    assert (tensor.dense_name, tensor.dim, tensor.holders) == ("transformer.h.0.mlp.c_proj.weight", 0, (0, 1))
