"""Branches of families, and their neurons and heads: those of branches.json, or there are none, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import InnerLayers
from sdp_deepspeed.architectures.cells import propose_cells
from sdp_deepspeed.masking import cell_proof
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.masking.scale import starts_smaller
from sdp_deepspeed.plan.strategies import units_of_branches
from tests.helpers.hand_written import HAND_WRITTEN, WIDTH, Layer, traced
from tests.helpers.mixtures import MIXTURES, Mixture
from tests.helpers.oracle_grid import ARCHITECTURES
from tests.helpers.oracle_grid import MODELS as OF_ORACLE

MODELS = {name: Mixture.of(name) for name in MIXTURES} | OF_ORACLE
# Layouts that the others do not have: interleaved queries, keys and values, by head or by group, or in one matrix;
# tables and norms by head; latent heads; gates in one matrix with ups, one by one or not, beside shared experts or not;
# more counts; uncut heads. Of the others only the branches are read from the code in another way.
WITH_CELLS = {*ARCHITECTURES, "cohere", "deberta_v2", "deepseek_v3", "falcon_grouped", "gpt_oss", "olmo2", "phi3"}
WITH_CELLS |= {"swinv2"}
# Names that rules, plans and checkpoints have: of each branch with its parameters, and with what neurons cut.
BRANCHES = json.loads((Path(__file__).parent / "branches.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.usefixtures("nothing_is_known")


def derived(model: nn.Module) -> dict[str, LocatedBranch]:
    return {branch.name: branch for branch in proven_branches(model, "neuron")}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_of_families(name: str, pytestconfig: pytest.Config) -> None:
    """With cells of a few, unless in full."""
    is_cut = name in WITH_CELLS or pytestconfig.getoption("--full")
    found = {branch.name: branch for branch in proven_branches(MODELS[name].build(), "neuron" if is_cut else "block")}
    expected = {branch: entry for entry in BRANCHES[name] for branch in entry["branches"]}
    assert found.keys() == expected.keys()
    for key, branch in found.items():
        entry, prefix = expected[key], f"{branch.layer}."
        parameters = [piece.parameter.removeprefix(prefix) for piece in branch.pieces if piece.kind == "parameter"]
        assert {*parameters} == {*entry["cut"], *entry["whole"]}
        if is_cut:
            cut = [t.parameter.removeprefix(prefix) for t in branch.cut_tensors if t.kind == "parameter"]
            assert (branch.num_cells, sorted(cut)) == (entry["cells"], entry["cut"])


OUTPUTS = {
    "gemma2": set(),  # norms follow
    "convnext": {"pwconv2.weight"},
    "qwen2_moe": {
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
        "mlp.experts.down_proj",
        "mlp.shared_expert.down_proj.weight",
    },
    "resnet": set(),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_init_makes_output_projections_smaller(name: str) -> None:
    model = MODELS[name].build()
    smaller = [branch for branch in proven_branches(model) if starts_smaller(model, branch)]
    assert {output.removeprefix(f"{b.layer}.") for b in smaller for output in b.outputs} == OUTPUTS[name]


class Heads(nn.Module):
    """Attention with one key/value head for two query heads, in one matrix; the forward reads a number of heads."""

    def __init__(self, num_heads: int = 4, head_dim: int = 3) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.qkv, self.out = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.num_heads * self.head_dim
        parts = self.qkv(x).split([width, width // 2, width // 2], -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).reshape(*x.shape[:2], width))


def test_counts_that_a_forward_reads_are_found() -> None:
    """In each layer by itself."""
    found = derived(traced(Layer(Heads()), Layer(Heads(2, 6))))
    assert found["h.1.attention"].num_cells == 0
    branch = found["h.0.attention"]
    assert branch.description.inner is not None
    assert branch.description.inner.scaled == ("num_heads",)
    assert branch.num_cells == 2
    found_tensors = {(t.parameter, t.kind, t.dim, t.size, t.shares, t.cut.is_output) for t in branch.cut_tensors}
    assert found_tensors == {
        ("h.0.attn.out.weight", "parameter", 1, 12, (1,), True),
        ("h.0.attn.qkv.bias", "parameter", 0, 24, (6, 3, 3), False),
        ("h.0.attn.qkv.weight", "parameter", 0, 24, (6, 3, 3), False),
    }


def test_experts_that_no_token_used_are_cut_like_the_others() -> None:
    branch = derived(HAND_WRITTEN["mixture"].traced())["h.0.mlp"]
    outputs = [tensor.parameter for tensor in branch.cut_tensors if tensor.cut.is_output]
    names = [*(f"experts.{index}" for index in range(4)), "shared_expert"]
    assert sorted(outputs) == [f"h.0.mlp.{name}.c_proj.weight" for name in names]


def with_norm(norm: nn.Module) -> Layer:
    """Over the neurons: each depends on all rows before."""
    return Layer(mlp=nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Linear(8, WIDTH)))


class Reversed(nn.Module):
    """Its first neuron reads the last row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).flip(-1).tanh())


@pytest.mark.parametrize(
    ("layer", "kind", "reason"),
    [
        (lambda: Layer(mlp=Reversed()), "mlp", "indices of up.weight are not in blocks"),
        (lambda: with_norm(nn.LayerNorm(8, elementwise_affine=False)), "mlp", "the inputs of 2 depend on each other"),
        (lambda: with_norm(nn.RMSNorm(8)), "mlp", "with fewer neurons or heads its forward fails"),
        (Layer, "attention", "with fewer neurons or heads its forward fails"),  # its number of heads is a constant
    ],
)
def test_what_cannot_be_proven_is_refused_with_the_reason(layer: Callable[[], Layer], kind: str, reason: str) -> None:
    model = traced(layer(), layer())
    branches = proven_branches(model, {kind: "neuron"})
    with pytest.raises(ValueError, match=rf"'h\.0\.{kind}' cannot be cut: {reason}.*Use \"block\""):
        units_of_branches(branches, strategy={kind: "neuron"})


@pytest.mark.parametrize(("name", "blocks"), [("phi3", 1), ("gpt_oss", 2)])
def test_a_wrong_layout_of_gates_and_ups_is_refused(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 has blocks of gates and of ups, in GPT-OSS they alternate."""

    def propose(*given: Any) -> tuple[InnerLayers, int]:
        inner, number = propose_cells(*given)
        cuts = [replace(cut, blocks=blocks) if "gate_up" in cut.module else cut for cut in inner.cuts]
        return replace(inner, cuts=tuple(cuts)), number

    monkeypatch.setattr(cell_proof, "propose_cells", propose)
    model = MODELS[name].build()
    (branch, *_) = (b for b in proven_branches(model, {"mlp": "neuron"}) if b.name.endswith(".mlp"))
    assert "with some of its" in branch.uncuttable_reason


class Rounded(nn.Module):
    """An MLP whose gradient, but not its output, depends on the number of neurons, in some dtypes."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.dtypes = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), dtypes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).sigmoid()
        if hidden.requires_grad and hidden.dtype in self.dtypes:
            hidden.register_hook(lambda gradient: gradient * (1 + 0.01 * hidden.shape[-1]))
        return self.down(hidden)


def test_gradients_that_differ_in_single_precision_only() -> None:
    for dtypes, is_cut in (((torch.float32,), True), ((torch.float32, torch.float64), False)):
        assert bool(derived(traced(Layer(mlp=Rounded(*dtypes))))["h.0.mlp"].cut_tensors) == is_cut
