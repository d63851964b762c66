"""Which units a strategy makes of a model: neurons and heads as pieces, groups of them, and what cannot be cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers, LocatedBranch
from sdp_deepspeed.architectures.cut_tensors import CutTensor
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.strategies import units_of_branches
from sdp_deepspeed.units import Unit, check_pieces
from tests.helpers import models
from tests.helpers.core_masks import families
from tests.helpers.hand_written import Adds
from tests.helpers.mixtures import MIXTURES, mixture
from tests.helpers.more_models import ALL_SPECIMENS, UNCUT


def units_of(name: str, **choice: Any) -> dict[str, Unit]:
    """Neuron units of a model's first layer, by their names without the layer's."""
    found = proven_branches(models.llama() if name == "llama" else models.SPECIMENS[name].build(), "neuron")
    chosen: dict[str, Any] = {"strategy": "neuron", "neuron_groups": 2} | choice
    units = units_of_branches([branch for branch in found if branch.layer == found[0].layer], **chosen)
    return {unit.name.removeprefix(f"{found[0].layer}."): unit for unit in units}


@pytest.mark.parametrize("name", families([*models.SPECIMENS, *MIXTURES], ("llama", "gpt2", "gpt_oss", "qwen2_moe")))
def test_units_part_what_they_cut(name: str) -> None:
    """Each element is in exactly one; branches.json has the tensors that are cut."""
    model = mixture(name) if name in MIXTURES else models.SPECIMENS[name].build()
    tensors = dict(model.named_parameters())
    units = units_of_branches(proven_branches(model, "neuron"), strategy="neuron", neuron_groups=2)
    check_pieces(units, lambda piece: tuple(tensors[piece.parameter].shape))
    counts: dict[str, int] = {}
    for piece in (piece for unit in units for piece in unit.pieces):
        counts[piece.parameter] = counts.get(piece.parameter, 0) + piece.num_elements(tensors[piece.parameter].shape)
    assert counts == {key: tensors[key].numel() for key in counts}
    cut = [piece for unit in units for piece in unit.pieces if ".experts." in piece.parameter]
    if name != "llama4":  # which runs all experts, in another product
        assert all(piece.start % 4 == piece.length % 4 == 0 for piece in cut), "as grouped products of fp32 need"


@given(st.integers(1, 3000), st.integers(1, 200))
@example(3000, 7)
@example(628, 4)
@example(318, 4)
def test_groups_are_alike_and_begin_where_matrix_units_like_it(num_cells: int, count: int) -> None:
    cut = Cut("down", 1, is_output=True)
    description = Branch("mlp", "norm", "ff", inner=InnerLayers((cut,)))
    branch = LocatedBranch("layer", description, (), num_cells, (CutTensor(cut, "w", 1, num_cells),))
    units = units_of_branches([branch], strategy="neuron", num_subnetworks=count)
    (lengths, starts) = zip(*[(piece.length, piece.start) for unit in units for piece in unit.pieces], strict=True)
    assert starts == tuple(itertools.accumulate(lengths, initial=0))[:-1]
    assert sum(lengths) == num_cells
    assert len(units) == min(count, num_cells)
    mean = num_cells / len(units)
    step = max(power for power in (1, 2, 4, 8) if power == 1 or power * 20 * count <= num_cells)
    assert all(start % step == 0 for start in starts), "of which a group has at least 20"
    assert max(lengths) - min(lengths) <= 1 or max(abs(length - mean) for length in lengths) <= 0.05 * mean


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"strategy": {"mlps": "neuron"}}, r"strategy: 'mlps' is not a branch type of .* 'attention', 'mlp'"),
        ({"neuron_groups": 25}, r"neuron_groups: got 25, but a branch has 24 neurons; use fewer"),
        ({"strategy": {"attention": "neuron"}}, r"neuron_groups: got 2, but only heads are cut here; remove it"),
        ({"shared": (r"head_7",)}, r"shared: 'head_7' matches no parameter of any unit.*head_0"),
        ({"shared": (r"q_proj",)}, r"'q_proj' matches only a part of 'model\.layers\.0\.attention\.head_0'"),
        ({"shared": (r"head_\d", r"mlp")}, r"shared: \['head_.*', 'mlp'\] match all 4 units"),
        ({"strategy": "block", "neuron_groups": None, "shared": ("layers",)}, r"\['layers'\] match all 2 units"),
    ],
)
def test_what_a_strategy_cannot_be_asked_for(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        units_of("llama", **choice)


@pytest.mark.parametrize("name", UNCUT)
def test_heads_that_cannot_be_cut_are_refused_with_the_line_that_works(name: str) -> None:
    words = r'attention.* cannot be cut: .*"strategy": \{"attention": "block", "mlp": "neuron"\}'
    with pytest.raises(ValueError, match=words):
        units_of_branches(proven_branches(ALL_SPECIMENS[name].build(), "neuron"), strategy="neuron")


@pytest.mark.usefixtures("own_descriptions")
def test_descriptions_that_do_not_fit() -> None:
    layers = (Adds(norm=nn.LayerNorm(5), ff=nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))) for _ in range(2))
    model = nn.Sequential(*layers)
    architectures.register(Adds, Branch("mlp", norm="norm", body="ff"))
    words = r"'0\.mlp' cannot be cut: .* no neurons or heads .*InnerLayers.*block.*'mlp'"
    with pytest.raises(ValueError, match=words):
        units_of_branches(proven_branches(model, "neuron"), strategy="neuron")
    uneven = InnerLayers((Cut("0", dim=0, blocks=3), Cut("1", dim=1, is_output=True)))
    architectures.register(Adds, Branch("mlp", norm="norm", body="ff", inner=uneven))
    assert len(units_of_branches(proven_branches(model, "neuron"))) == 2, "no concern of blocks"
    words = r"0\.ff\.0\.weight has 7 indices along dim 0.* not divide into 3 blocks of 7.*block"
    with pytest.raises(ValueError, match=words):
        units_of_branches(proven_branches(model, "neuron"), strategy="neuron")
