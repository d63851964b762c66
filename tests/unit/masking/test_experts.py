"""Auxiliary losses of routers in all four modes, and what of experts is refused by name."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from sdp_deepspeed.masking.experts import check_grouped_products

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from tests.helpers.masked_modules import (
    RANKS,
    assert_close,
    assert_held_gradients,
    held_pieces,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from tests.helpers.mixtures import WITH_AUXILIARY_LOSS, mixture, neurons_of

LOUD: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
PADDED = torch.ones(2, 8, dtype=torch.long)
PADDED[0, :3] = 0


def lacking_layers(model: Any, plan: Plan, rank: int) -> list[int]:
    """Layers whose routers a rank lacks."""
    units = [unit for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)]
    names = {piece.parameter for unit in units for piece in unit.pieces if piece.dim is None}
    found = [name for name in names if name.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    return sorted(int(name.split(".layers.")[1].split(".")[0]) for name in found)


def loss_of_layers(model: Any, left_out: list[int], **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The model's loss with the auxiliary one of some of its routers, by the host's own function."""
    auxiliary = sys.modules[type(model).__module__].load_balancing_loss_func
    sparse = [index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    output = model(input_ids=tokens(), labels=tokens(), **inputs)
    logits = dict(zip(sparse, output.router_logits, strict=True))
    held = tuple(logits[index] for index in sparse if index not in left_out)
    arguments = model.num_experts, model.num_experts_per_tok, inputs.get("attention_mask")
    loss = output.loss - output.aux_loss + auxiliary(held, *arguments)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("rank", "inputs"), [(0, {}), (1, {"attention_mask": PADDED})], ids=["", "padded"])
@pytest.mark.parametrize("name", WITH_AUXILIARY_LOSS)
def test_in_forward_blocks_it_is_over_the_layers_that_ran(name: str, rank: int, inputs: dict[str, Any]) -> None:
    model = mixture(name, **LOUD)
    plan = plan_of(model, strategy="block", granularity="layer")
    left_out, zeroed = lacking_layers(model, plan, rank), deepcopy(model)
    assert left_out
    zero_lacking(zeroed, plan, rank)
    expected_loss, expected = loss_of_layers(deepcopy(zeroed), left_out, **inputs)
    module, mask = masked(model, plan, rank)
    loss, gradients = loss_and_gradients(module, tokens(), **inputs)
    assert_close(loss, expected_loss)
    assert_held_gradients(mask, held_pieces(model, plan, rank), gradients, expected)
    all_layers, _ = loss_of_layers(zeroed, [], **inputs)
    assert abs(all_layers - expected_loss) > 1e-4, "routers of zeros would count as ones that tokens took"


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("name", WITH_AUXILIARY_LOSS)
def test_where_all_routers_run_it_is_over_all_layers(name: str, regime: str) -> None:
    """Also where they run with each half of the neurons: its gradient on the routers is there once."""
    model, rank = mixture(name, **LOUD), 1
    strategies = [{"mlp": "neuron"}] if regime == "forward" else [neurons_of(name), "block"]
    for strategy in strategies:
        plan = plan_of(model, regime, strategy)
        dense = deepcopy(model)
        if regime == "forward":
            zero_lacking(dense, plan, rank)
        expected_loss, expected = loss_of_layers(dense, [], attention_mask=PADDED)
        module, mask = masked(model, plan, rank)
        loss, gradients = loss_and_gradients(module, tokens(), attention_mask=PADDED)
        assert_close(loss, expected_loss)
        assert_held_gradients(mask, held_pieces(model, plan, rank), gradients, expected)


@pytest.mark.parametrize("name", WITH_AUXILIARY_LOSS)
def test_layers_that_run_in_halves_have_one_router_each(name: str) -> None:
    """Beside a layer that is shared, and so runs once: each is recorded once, and hooks on it run once."""
    model = mixture(name, **LOUD)
    sparse = [index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    shared = [rf"^model\.layers\.{sparse[0]}\.mlp"]
    plan = plan_of(model, "backward", {"attention": "block", "mlp": "neuron"}, shared=shared)
    expected_loss, expected = loss_of_layers(deepcopy(model), [])
    module, mask = masked(model, plan, 0)
    layer, calls = module.model.layers[sparse[-1]].mlp, []
    router = layer.router if hasattr(layer, "router") else layer.gate
    router.register_forward_hook(lambda *_: calls.append(1))
    loss, gradients = loss_and_gradients(module, tokens())
    assert len(calls) == 1
    assert_close(loss, expected_loss)
    assert_held_gradients(mask, held_pieces(model, plan, 0), gradients, expected)
    assert len(module(tokens()).router_logits) == len(sparse)


def test_a_subnetwork_without_routers_is_refused() -> None:
    """Worker 0 holds all attention branches, worker 1 all mixtures: by config at start, by argument in training."""
    words = r"output_router_logits: .*1 of 2 subnetworks \(first 0\) have none of 'model\.layers\.0\.mlp'.*granularity"
    model = mixture("mixtral", **LOUD)
    plan = plan_of(model, strategy="block")
    with pytest.raises(ValueError, match=words):
        masked(model, plan, 1)
    for rank in RANKS:
        module, mask = masked(mixture("mixtral"), plan, rank)
        module(tokens())
        with pytest.raises(ValueError, match=words):
            module.train()(tokens(), output_router_logits=True)
        for part in mask.parts:
            part.fill(lambda targets: None)
        module(tokens(), output_router_logits=True)
    masked(model, plan_of(model, "backward", "block"), 0)
    masked(model, plan_of(model, strategy="block", shared=[r"^model\.layers\.1\.mlp$"]), 0)


def test_a_copy_of_a_subnetwork_has_no_refusal_of_its_own() -> None:
    model = mixture("mixtral")
    module, _ = masked(model, plan_of(model, strategy="block"), 1)
    with pytest.raises(ValueError, match="output_router_logits"):
        module.train()(tokens(), output_router_logits=True)
    assert deepcopy(module).train()(tokens(), output_router_logits=True).aux_loss.isfinite()


def test_noise_that_would_be_drawn_twice_is_refused() -> None:
    model = mixture("mixtral", router_jitter_noise=0.1)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp': jitter_noise is 0\.1.*two halves.*\"block\" for the part"):
        masked(model, plan_of(model, "backward"), 0)
    for regime, strategy in (("forward", "neuron"), ("backward", "block")):
        masked(model, plan_of(model, regime, strategy), 0)[0].train()(tokens())


def test_neurons_whose_products_do_not_run_are_refused() -> None:
    """12 neurons in 6 groups; four of fp32 are 16 bytes, and eight of bf16."""
    words = (
        r"layers\.0\.mlp': of 12 neurons of each expert subnetwork 0 has 6 and lacks 6, .*multiples of 4.*batched_mm"
    )
    for regime in ("forward", "backward"):
        model = mixture("mixtral")
        plan = plan_of(model, regime, neuron_groups=6)
        with pytest.raises(ValueError, match=words):
            masked(model, plan, 1)
        model.set_experts_implementation("batched_mm")
        masked(model, plan, 1)[0](tokens())
    with pytest.raises(ValueError, match="multiples of 8"):
        masked(mixture("mixtral").bfloat16(), plan_of(mixture("mixtral")), 0)


def test_what_a_subnetwork_lacks_must_run_too() -> None:
    """14 neurons in groups of 2, one of them shared: all subnetworks have 8, and the other half runs beside it, or in
    evaluation with it."""
    model = mixture("mixtral", intermediate_size=14)
    for regime in ("forward", "backward"):
        plan = plan_of(model, regime, neuron_groups=7, shared=[r"mlp\.group_6$"])
        with pytest.raises(ValueError, match=r"of 14 neurons of each expert subnetwork 0 has 8 and lacks 6"):
            masked(model, plan, 0)


def test_checkpointed_activations_leave_the_auxiliary_loss_as_it_is() -> None:
    """What runs again for the backward pass is not counted again. (With reentrant checkpointing plain Transformers
    records logits that have no gradient.)"""
    for regime, strategy in (("forward", "block"), ("backward", "neuron")):
        model = mixture("mixtral", **LOUD)
        choice = {"granularity": "layer"} if strategy == "block" else {}
        plan = plan_of(model, regime, strategy, **choice)
        expected_loss, expected = loss_and_gradients(masked(model, plan, 0)[0], tokens())
        module = masked(model, plan, 0)[0]
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loss, gradients = loss_and_gradients(module.train(), tokens())
        assert torch.equal(loss, expected_loss)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[key], expected[key]) for key in expected)


def test_lengths_of_products_are_found_in_one_pass_over_the_pieces() -> None:
    """Not in one for each layer and subnetwork: large models have many of each."""
    model = mixture("mixtral")
    plan, reads = plan_of(model), []

    class Units(tuple[Any, ...]):
        def __iter__(self) -> Any:
            reads.append(1)
            return super().__iter__()

    counted = replace(plan, units=Units(plan.units))
    reads.clear()
    branches = locate_branches(model)
    check_grouped_products(model, counted, branches, [branch.name for branch in branches])
    assert len(reads) == 1
