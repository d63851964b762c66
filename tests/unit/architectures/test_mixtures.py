"""Mixtures of experts in all four modes: a masked module computes what the dense model with zeroed pieces computes, or
the dense model's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp_deepspeed.checkpoint.interop.transformers_names import FileNames
from torch import nn

from sdp_deepspeed.architectures import locate_branches, unit_costs, units_of_branches
from sdp_deepspeed.architectures.active_experts import active_shares
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.units import Piece, check_pieces
from tests.helpers.masked_modules import (
    RANKS,
    assert_close,
    assert_held_gradients,
    assert_same_as_zeroed,
    held_pieces,
    infos,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from tests.helpers.mixtures import CUT_EVERYWHERE, MIXTURES, mixture, neurons_of
from tests.helpers.rank_models import mask_of


@pytest.mark.parametrize(("granularity", "rank"), [("sublayer", 0), ("sublayer", 1), ("layer", 1)])
@pytest.mark.parametrize("name", MIXTURES)
def test_forward_blocks_are_zeroed_pieces(name: str, granularity: str, rank: int) -> None:
    model = mixture(name)
    assert_same_as_zeroed(model, plan_of(model, strategy="block", granularity=granularity), rank)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", MIXTURES)
def test_forward_neurons_are_zeroed_pieces(name: str, rank: int) -> None:
    model = mixture(name)
    assert_same_as_zeroed(model, plan_of(model, strategy=neurons_of(name)), rank)


@pytest.mark.parametrize(("strategy", "rank"), [("block", 0), ("neuron", 0), ("neuron", 1)])
@pytest.mark.parametrize("name", MIXTURES)
def test_backward_has_the_dense_gradients(name: str, strategy: str, rank: int) -> None:
    """Of the router too, which runs once with each half of the neurons, and of output biases of experts."""
    model = mixture(name)
    plan = plan_of(model, "backward", neurons_of(name) if strategy == "neuron" else strategy)
    expected_loss, expected = loss_and_gradients(deepcopy(model), tokens())
    module, mask = masked(model, plan, rank)
    loss, gradients = loss_and_gradients(module, tokens())
    assert_close(loss, expected_loss)
    assert_held_gradients(mask, held_pieces(model, plan, rank), gradients, expected)
    routers = [key for key in gradients if key.endswith(("gate.weight", "router.weight"))]
    assert strategy == "block" or len(routers) >= 2
    assert all(gradients[key].any() for key in routers)


def routes(model: Any) -> list[torch.Tensor]:
    """The experts that tokens take, of each time that a router runs."""
    found: list[torch.Tensor] = []
    for key, module in model.named_modules():
        if key.endswith(("mlp.gate", "mlp.router")):
            module.register_forward_hook(lambda _, args, output: found.append(output[2]))
    model(tokens())
    return found


@pytest.mark.parametrize("name", CUT_EVERYWHERE)
def test_both_halves_route_as_the_dense_model(name: str) -> None:
    model = mixture(name)
    expected = routes(deepcopy(model))
    found = routes(masked(model, plan_of(model, "backward"), 0)[0])
    assert len(found) == len(expected) > 0, "one router for both halves"
    assert len({tuple(row) for route in expected for row in route.sort(-1).values.tolist()}) > 1, "experts differ"
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_every_kind_of_product_of_experts(name: str, regime: str, implementation: str) -> None:
    model = mixture(name)
    model.set_experts_implementation(implementation)
    plan = plan_of(model, regime)
    if regime == "forward":
        assert_same_as_zeroed(model, plan, 1)
        return
    _, expected = loss_and_gradients(deepcopy(model), tokens())
    module, mask = masked(model, plan, 1)
    assert_held_gradients(mask, held_pieces(model, plan, 1), loss_and_gradients(module, tokens())[1], expected)


@pytest.mark.parametrize(("regime", "strategy"), [("forward", "block"), ("backward", "neuron")])
@pytest.mark.slow
def test_compilers_follow(regime: str, strategy: str) -> None:
    """A router that runs once for two halves too, in one graph."""
    model = mixture("mixtral")
    plan = plan_of(model, regime, strategy)
    expected_loss, expected = loss_and_gradients(masked(model, plan, 0)[0].train(), tokens(), use_cache=False)
    module = masked(model, plan, 0)[0].train()
    module.compile(backend="eager", fullgraph=True)
    loss, gradients = loss_and_gradients(module, tokens(), use_cache=False)
    assert_close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert_close(gradient, expected[key])


@pytest.mark.parametrize("name", CUT_EVERYWHERE)
def test_units_part_experts_and_leave_routers_shared(name: str) -> None:
    model = mixture(name)
    tensors = dict(model.named_parameters())
    units = units_of_branches(locate_branches(model), strategy="neuron", neuron_groups=2)
    check_pieces(units, lambda piece: tuple(tensors[piece.parameter].shape))
    counts: dict[str, int] = {}
    for piece in (piece for unit in units for piece in unit.pieces):
        counts[piece.parameter] = counts.get(piece.parameter, 0) + piece.num_elements(tensors[piece.parameter].shape)
    assert counts == {key: tensors[key].numel() for key in counts}
    layers = {key for key in tensors if ".layers." in key}
    shared = {key.split(".layers.")[1].split(".", 1)[1] for key in layers - counts.keys()}
    latent = {f"self_attn.{key}.{kind}" for key in ("kv_a_proj_with_mqa", "q_a_proj") for kind in ("weight", "bias")}
    latent |= {f"self_attn.{key}_a_layernorm.weight" for key in ("q", "kv")}
    known = {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.bias"}
    known |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.shared_expert_gate.weight"}
    known |= {"mlp.gate.weight", "mlp.router.weight", "mlp.router.bias", "mlp.experts.down_proj_bias"}
    assert shared <= known | (latent if "deepseek" in name else set())
    assert any(key.endswith(("gate.weight", "router.weight")) for key in shared)


def test_neurons_of_all_experts_are_cut_alike() -> None:
    """Mixtral: 12 neurons of each of 4 experts, in groups of 8 and 4 (16 bytes are 4 in fp32); Qwen2-MoE: 2 of them for
    3 of the shared expert's 18; GPT-OSS: a gate and an up of each lie side by side."""

    def pieces(name: str, layer: int, unit: str) -> dict[str, list[tuple[int | None, int, int]]]:
        units = units_of_branches(locate_branches(mixture(name)), strategy="neuron", neuron_groups=2)
        found: dict[str, list[tuple[int | None, int, int]]] = {}
        for piece in next(u for u in units if u.name == f"model.layers.{layer}.{unit}").pieces:
            key = piece.parameter.split(".", 4)[4]
            found.setdefault(key, []).append((piece.dim, piece.start, piece.length))
        return found

    assert pieces("mixtral", 0, "mlp.group_1") == {
        "experts.gate_up_proj": [(1, 8, 4), (1, 20, 4)],
        "experts.down_proj": [(2, 8, 4)],
    }
    assert pieces("qwen2_moe", 1, "mlp.group_1") == {
        "experts.gate_up_proj": [(1, 8, 4), (1, 20, 4)],
        "experts.down_proj": [(2, 8, 4)],
        "shared_expert.gate_proj.weight": [(0, 12, 6)],
        "shared_expert.up_proj.weight": [(0, 12, 6)],
        "shared_expert.down_proj.weight": [(1, 12, 6)],
    }
    assert pieces("qwen2_moe", 0, "mlp.group_0").keys() == {f"{key}_proj.weight" for key in ("gate", "up", "down")}
    assert pieces("gpt_oss", 0, "mlp.group_1") == {
        "experts.gate_up_proj": [(2, 16, 8)],
        "experts.gate_up_proj_bias": [(1, 16, 8)],
        "experts.down_proj": [(1, 8, 4)],
    }
    assert pieces("gpt_oss", 0, "attention.head_1")["sinks"] == [(0, 2, 2)]


def test_a_router_with_as_many_experts_as_each_has_neurons() -> None:
    """Its vector of corrections is not one over the neurons."""
    model = mixture("deepseek_v3", n_routed_experts=12)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.shape == (12,)
    assert_same_as_zeroed(model, plan_of(model), 1)


def test_a_norm_over_all_heads_leaves_attention_to_blocks() -> None:
    model = mixture("olmoe")
    with pytest.raises(ValueError, match=r"layers\.0\.attention' cannot be cut.*\"block\" for the part 'attention'"):
        units_of_branches(locate_branches(model), strategy="neuron", neuron_groups=2)


@pytest.mark.parametrize("name", MIXTURES)
def test_costs_count_the_experts_that_a_token_uses(name: str) -> None:
    """Of routed experts half of the FLOPs (2 of 4), and all of the bytes."""
    model = mixture(name)
    tensors = dict(model.named_parameters())
    units = units_of_branches(locate_branches(model), granularity="sublayer")
    for unit, cost in zip(units, unit_costs(model, units), strict=True):
        own = {piece.parameter: tensors[piece.parameter] for piece in unit.pieces if piece.kind == "parameter"}
        routed = {key: tensor for key, tensor in own.items() if ".experts." in key}
        matrices = sum(t.numel() for key, t in own.items() if t.dim() == 2 and key not in routed)
        assert cost.flops == 2 * matrices + sum(t.numel() for t in routed.values() if t.dim() == 3)
        assert cost.num_parameters == sum(t.numel() for t in own.values())
    assert set(active_shares(model).values()) <= {Fraction(1, 2), Fraction(0)}


def test_workers_of_mixed_layers_are_balanced_by_what_they_compute() -> None:
    """DeepSeek's dense layers cost as much as its sparse ones with five times the weights."""
    model = mixture("deepseek_v3", first_k_dense_replace=2, num_hidden_layers=4, num_experts_per_tok=1, topk_group=1)
    config = parse({KEY: {"holders": 1}})
    assert config is not None
    plan, _ = plan_model(model, config, 2)
    costs = unit_costs(model, plan.units)
    loads = [sum(costs[unit].flops for unit in plan.units_of(subnetwork)) for subnetwork in (0, 1)]
    assert max(loads) <= 1.05 * sum(loads) / 2


@pytest.mark.parametrize("name", MIXTURES)
def test_the_dense_model_loads_with_from_pretrained(name: str, tmp_path: Path) -> None:
    """Transformers stores experts one by one for most families, and puts them together again."""
    model = mixture(name)
    module, mask = masked(model, plan_of(model, "backward", neurons_of(name)), 0)
    for part in mask.parts:
        part.fill(lambda _: None)
    module.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    expected, found = (dict(m.named_parameters()) for m in (model, loaded))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert torch.equal(loaded.eval()(tokens()).logits, model.eval()(tokens()).logits)


def test_dropped_experts_have_no_storage() -> None:
    model = mixture("mixtral")
    module = masked(model, plan_of(model, strategy="block"), 0)[0]
    lacking = [p for key, p in module.named_parameters() if ".experts." in key and not p.requires_grad]
    assert lacking
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in lacking)
    narrow = masked(model, plan_of(model), 0)[0]
    experts: list[nn.Parameter] = [p for key, p in narrow.named_parameters() if ".experts." in key]
    whole = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
    assert sum(p.untyped_storage().nbytes() for p in experts) == 4 * sum(p.numel() for p in experts) < 4 * whole


def fetch_from(model: nn.Module, targets: Mapping[Piece, torch.Tensor]) -> None:
    tensors = dict(model.named_parameters())
    for piece, target in targets.items():
        target.copy_(piece.narrow(tensors[piece.parameter].detach()))


@pytest.mark.parametrize(("name", "strategy"), [("gpt_oss", "block"), ("gpt_oss", "neuron"), ("qwen2_moe", "neuron")])
def test_scaled_branches_scale_what_experts_put_out(name: str, strategy: str) -> None:
    """Of blocks the output projections of all experts, with biases; of neurons their columns, not the shared bias."""
    model = mixture(name)
    dense = dict(model.named_parameters())
    module = deepcopy(model)
    plan = plan_of(model, strategy=strategy)
    for part in mask_of(module, locate_branches(module), infos(module), plan, 0, scales=True).parts:
        part.fill(partial(fetch_from, model))
    biases = (".o_proj.bias", ".down_proj_bias") if strategy == "block" else ()
    outputs = (".o_proj.weight", ".down_proj", ".down_proj.weight", *biases)
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter, dense[key] * (0.5 if key.endswith(outputs) else 1.0)), key


def test_export_without_a_model_names_what_it_cannot_convert() -> None:
    """`sdp checkpoint export` writes tensors as they are."""
    names = FileNames.of_model("MixtralForCausalLM", "mixtral")
    with pytest.raises(
        ValueError, match=r"stores 'model\.layers\.0\.mlp\.experts\.gate_up_proj' converted; export with"
    ):
        names.to_file(["model.layers.0.mlp.experts.gate_up_proj"])
    stored = ["model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.norm.weight"]
    assert names.converted(stored) == stored[:1]
