"""What weights cost, against counts by hand and PyTorch's own counter."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import sdp_deepspeed
from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.architectures.derivation import flops_per_element
from sdp_deepspeed.architectures.examples import image_shape
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.strategies import unit_costs, units_of_branches
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.core_masks import families
from tests.helpers.hand_written import HAND_WRITTEN, WIDTH
from tests.helpers.mixtures import MIXTURES, mixture
from tests.helpers.more_models import ALL_SPECIMENS


class Convolutions(nn.Module):
    """Images of 4 channels and 12 x 10: a strided convolution, a depthwise one, a 1 x 1 and a head."""

    image_size = (12, 10)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 5, padding=2, groups=6)
        self.wide = nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.depthwise(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


SMALL: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
TINY = {"num_labels": 5, "hidden_sizes": [8, 16], "depths": [2, 1]}
SWIN = {"image_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
BUILT: dict[str, Any] = {
    "basic": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**TINY, embedding_size=8, layer_type="basic")),
    "bottleneck": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**TINY, embedding_size=8)),
    "convnext": lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(**TINY, num_stages=2, image_size=32)),
    "swin": lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN, num_labels=5)),
    "vit": lambda: ALL_SPECIMENS["vit"].build(),
}


@pytest.mark.parametrize("name", BUILT)
def test_all_weights_together_cost_what_pytorch_counts(name: str) -> None:
    """Attention runs in one kernel, which that counter does not know on a CPU."""
    model = BUILT[name]().eval()
    found = flops_per_element(model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *image_shape(model)))
    assert sum(found[name] * p.numel() for name, p in model.named_parameters()) == counter.get_total_flops()


def test_units_cost_what_their_weights_do() -> None:
    """Of a unit that has some channels of a kernel, those channels."""
    pieces = (Piece("stem.weight", 0, 2, 3), Piece("stem.bias", 0, 2, 3), Piece("wide.weight"))
    cost = unit_costs(Convolutions(), [Unit("some", pieces)])[0]
    assert cost.flops == 2 * 30 * (3 * 4 * 9 + 6 * 8)
    assert cost.num_parameters == 3 * 4 * 9 + 3 + 6 * 8
    assert cost.num_bytes == 4 * cost.num_parameters


def test_the_size_of_images() -> None:
    assert image_shape(Convolutions()) == (4, 12, 10)
    assert image_shape(nn.Sequential(nn.Conv2d(2, 3, 3))) == (2, 224, 224)
    assert image_shape(ALL_SPECIMENS["vit"].build()) == (3, 8, 8)


def test_a_token_costs_the_experts_that_it_uses() -> None:
    """Two of four in a list, whichever they are, and one that all tokens use. The example has 2 rows of 5 tokens."""
    model = HAND_WRITTEN["mixture"].build()
    sdp_deepspeed.trace(model, torch.randn(2, 5, WIDTH))
    expert = sum(p.numel() for p in model.get_submodule("h.0.mlp.shared_expert").parameters() if p.dim() > 1)
    units = units_of_branches(locate_branches(model))
    found = {unit.name: cost.flops for unit, cost in zip(units, unit_costs(model, units), strict=True)}
    assert found["h.0.mlp"] == 5 * 2 * (4 * WIDTH + 3 * expert)
    of_experts = {p for name, p in flops_per_element(model).items() if ".experts." in name and "weight" in name}
    assert of_experts == {5}


@pytest.mark.parametrize("name", families(MIXTURES, ("qwen2_moe", "llama4", "gpt_oss")))
def test_costs_count_the_experts_that_a_token_uses(name: str) -> None:
    """Of routed experts half of the FLOPs (2 of 4), and all of the bytes. Llama 4 runs them all."""
    model = mixture(name)
    tensors = dict(model.named_parameters())
    units = units_of_branches(proven_branches(model, "neuron"), granularity="sublayer")
    for unit, cost in zip(units, unit_costs(model, units), strict=True):
        own = {piece.parameter: tensors[piece.parameter] for piece in unit.pieces if piece.kind == "parameter"}
        routed = {key: tensor for key, tensor in own.items() if ".experts." in key}
        matrices = sum(t.numel() for key, t in own.items() if t.dim() >= 2 and key not in routed)
        num_used = 2 if name == "llama4" else 1
        assert cost.flops == 2 * matrices + num_used * sum(t.numel() for t in routed.values() if t.dim() == 3)
        assert cost.num_parameters == sum(t.numel() for t in own.values())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_costs_do_not_depend_on_how_experts_are_computed(implementation: str) -> None:
    costs = []
    for name in ("grouped_mm", implementation):
        model = mixture("mixtral")
        model.set_experts_implementation(name)
        costs.append(unit_costs(model, units_of_branches(proven_branches(model))))
    assert costs[0] == costs[1]


def test_an_image_and_its_caption_cost_the_same_per_position() -> None:
    """Their lengths in the example, 17 patches and 8 tokens, say nothing about those in training."""
    encoder = hf.ViTConfig(**SMALL, image_size=16, patch_size=4)
    decoder = hf.BertConfig(**SMALL, vocab_size=9, is_decoder=True, add_cross_attention=True)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    found = flops_per_element(hf.VisionEncoderDecoderModel(config))
    assert [found[name] for name in found if name.endswith(("fc1.weight", "intermediate.dense.weight"))] == [2, 2]


def test_weights_that_are_used_twice_or_changed_first() -> None:
    """A weight in two places, a cast one, one of which parts are used, one with zero mean, and one of two factors."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1)
            self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
            self.again.weight = self.first.weight
            self.cast, self.centered = nn.Linear(8, 8).double(), nn.Linear(8, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.left, self.position = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(1, 16, 8))

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            x = self.stem(pixel_values).flatten(2).mT + self.position
            x = self.again(self.first(x))
            x = F.linear(x, self.cast.weight.to(x.dtype))
            weight = self.centered.weight
            x = x @ (weight - weight.mean(1, keepdim=True))
            x = self.attention(x, x, x)[0]
            return x[:, 0] @ self.left

    model = Uses()
    model.image_size = 4  # type: ignore[assignment]
    found = flops_per_element(model)
    uses = {name: found[name] / 2 for name, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1}
    assert uses == {
        **{"stem.weight": 16, "first.weight": 32, "again.weight": 32, "cast.weight": 16, "centered.weight": 16},
        **{"attention.in_proj_weight": 16, "attention.out_proj.weight": 16, "left": 1, "position": 0},
    }


class Collective(Convolutions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.ops._c10d_functional.all_reduce(x, "sum", "nobody"))


def test_a_model_that_cannot_be_run_costs_as_if_positions_were_equal() -> None:
    model = Collective()
    units = [Unit("a", (Piece("wide.weight"),)), Unit("b", (Piece("depthwise.weight"),))]
    with pytest.warns(UserWarning, match="could not be counted .*a collective.*units are balanced by weights"):
        costs = unit_costs(model, units)
    assert [cost.flops for cost in costs] == [2 * 6 * 8, 2 * 6 * 25]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unit_costs(model, units) == costs, "one warning"
