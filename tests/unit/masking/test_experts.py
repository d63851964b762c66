"""Mixtures of experts: auxiliary losses of routers in all modes, kinds of products, and what is refused by name."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch

from sdp_deepspeed.config import MODES
from sdp_deepspeed.units import Regime
from tests.helpers.core_masks import (
    Gradients,
    assert_close,
    assert_gradients,
    assert_masked,
    expected_of,
    mask_of,
    masked,
    plan_of,
    run,
    tokens,
)
from tests.helpers.mixtures import mixture

LOUD: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
PADDED = torch.ones(2, 8, dtype=torch.long)
PADDED[0, :3] = 0


def loss_of_layers(model: Any, layers: list[int], **inputs: Any) -> tuple[torch.Tensor, Gradients]:
    """The model's loss with the auxiliary one of the routers of some layers, by the host's own function."""
    auxiliary = sys.modules[type(model).__module__].load_balancing_loss_func
    output = model(input_ids=tokens(), labels=tokens(), **inputs)
    logits = dict(zip(sparse_layers(model), output.router_logits, strict=True))
    arguments = model.num_experts, model.num_experts_per_tok, inputs.get("attention_mask")
    loss = output.loss - output.aux_loss + auxiliary(tuple(logits[index] for index in layers), *arguments)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sparse_layers(model: Any) -> list[int]:
    return [index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize(("name", "inputs"), [("mixtral", {"attention_mask": PADDED}), ("gpt_oss", {})])
def test_in_forward_blocks_the_auxiliary_loss_is_over_the_layers_that_ran(name: str, inputs: dict[str, Any]) -> None:
    dense = mixture(name, **LOUD)
    plan = plan_of(dense, "forward", "block", granularity="layer")
    model, mask = masked(dense, plan, 1)
    router = "router" if name == "gpt_oss" else "gate"
    held = [i for i in (0, 1, 2) if mask.is_held(mask.pieces[f"model.layers.{i}.mlp.{router}.weight"][0][0])]
    assert held == [1]
    zeroed = expected_of(dense, plan, 1)
    expected_loss, expected = loss_of_layers(deepcopy(zeroed), held, **inputs)
    loss, _, gradients = run(model, **inputs)
    assert_close(loss, expected_loss)
    assert_gradients(mask, gradients, expected)
    all_layers, _ = loss_of_layers(zeroed, [0, 1, 2], **inputs)
    assert abs(all_layers - expected_loss) > 1e-4, "routers of zeros would count as ones that tokens took"


@pytest.mark.parametrize(
    ("regime", "strategy"), [("forward", {"mlp": "neuron"}), ("backward", "neuron"), ("backward", "block")]
)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_where_all_routers_run_it_is_over_all_layers(name: str, regime: Regime, strategy: Any) -> None:
    """Each router runs once and is recorded once."""
    dense = mixture(name, **LOUD)
    plan = plan_of(dense, regime, strategy)
    expected_loss, expected = loss_of_layers(expected_of(dense, plan, 1), sparse_layers(dense), attention_mask=PADDED)
    model, mask = masked(dense, plan, 1)
    calls: list[int] = []
    for index in sparse_layers(dense):
        model.model.layers[index].mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    loss, _, gradients = run(model, attention_mask=PADDED)
    assert_close(loss, expected_loss)
    assert_gradients(mask, gradients, expected)
    assert len(calls) == len(sparse_layers(dense)) == len(model(tokens()).router_logits)


@pytest.mark.parametrize(("regime", "strategy"), [("forward", "block"), ("backward", "neuron")])
def test_checkpointed_activations_leave_the_auxiliary_loss_as_it_is(regime: Regime, strategy: str) -> None:
    """What runs again for the backward pass is not counted again. (With reentrant checkpointing plain Transformers
    records logits that have no gradient.)"""
    dense = mixture("mixtral", **LOUD)
    plan = plan_of(dense, regime, strategy, granularity="layer" if strategy == "block" else "sublayer")
    expected, model = run(masked(dense, plan, 0)[0].train()), masked(dense, plan, 0)[0].train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = run(model)
    assert torch.equal(found[0], expected[0])
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][key], expected[2][key]) for key in expected[2])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_every_kind_of_product_of_experts(name: str, implementation: str) -> None:
    dense = mixture(name)
    dense.set_experts_implementation(implementation)
    for regime in ("forward", "backward"):
        assert_masked(dense, plan_of(dense, regime, "neuron"), 1)


def test_a_router_with_as_many_experts_as_each_has_neurons() -> None:
    """Its vector of corrections is not one over the neurons."""
    dense = mixture("deepseek_v3", n_routed_experts=12)
    assert dense.model.layers[1].mlp.gate.e_score_correction_bias.shape == (12,)
    assert_masked(dense, plan_of(dense, "forward", "neuron"), 1)


def test_a_subnetwork_without_routers_is_refused() -> None:
    """Worker 0 holds all attention branches, worker 1 all mixtures: by config at start, by argument in training."""
    words = r'output_router_logits: subnetwork 0 has no router.*"shared": \["\^model\.layers\.0\.mlp\$"\]'
    dense = mixture("mixtral", **LOUD)
    plan = plan_of(dense, "forward", "block")
    with pytest.raises(ValueError, match=words):
        mask_of(dense, plan, 1)
    for rank in (0, 1):
        model, mask = masked(mixture("mixtral"), plan, rank)
        model(tokens())
        with pytest.raises(ValueError, match=words):
            model.train()(tokens(), output_router_logits=True)
        mask.undo()
        model(tokens(), output_router_logits=True)
    masked(dense, plan_of(dense, "backward", "block"), 0)
    masked(dense, plan_of(dense, "forward", "block", shared=[r"^model\.layers\.1\.mlp$"]), 0)


def test_neurons_whose_products_do_not_run_are_refused() -> None:
    """12 neurons in 6 groups; four of fp32 are 16 bytes, and eight of bf16. The product of 14 never runs."""
    words = r"layers\.0\.mlp': subnetwork 0 has 6 of 12 neurons; grouped_mm needs multiples of 4: .*batched_mm"
    for regime, _ in MODES[::2]:
        dense = mixture("mixtral")
        plan = plan_of(dense, regime, "neuron", neuron_groups=6)
        with pytest.raises(ValueError, match=words):
            mask_of(dense, plan, 1)
        dense.set_experts_implementation("batched_mm")
        masked(dense, plan, 1)[0](tokens())
        with pytest.raises(ValueError, match=r"mlp' cannot be cut: .* 16 bytes"):
            plan_of(mixture("mixtral", intermediate_size=14), regime, "neuron")
    with pytest.raises(ValueError, match="multiples of 8"):
        mask_of(mixture("mixtral").bfloat16(), plan_of(mixture("mixtral"), "forward", "neuron"), 0)
