"""Backward masking: the dense model's loss and gradients, with fewer weight gradients and fewer saved activations."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import models
import pytest
import torch
from neurons import (
    NAMES,
    RANKS,
    Products,
    Saved,
    build,
    counted_attention,
    cut_names,
    held_pieces,
    linear_weights,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from torch import nn
from transformers import DynamicCache

from sdp_deepspeed.architectures import Site, find_sites
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.neuron import NeuronPart
from sdp_deepspeed.plan import Plan

# Two sums where the dense layer has one: at most 61 terms in another order, each partial sum rounded by 2**-24 of
# itself, so 2**-18 of the largest term; layers and the loss make a few such products one after the other.
ROUNDING = 2.0**-16
NUM_TOKENS = 2 * models.LENGTH


def saved_of(model: Any, *, extra: tuple[torch.Tensor, ...] = ()) -> Saved:
    """Of a forward pass without a key/value cache, which would copy values."""
    with Saved([*model.parameters(), *extra]) as saved:
        model(input_ids=tokens(), labels=tokens(), use_cache=False)
    return saved


def lacking_sites(model: nn.Module, plan: Plan, rank: int) -> list[Site]:
    names = {unit.name for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)}
    return [site for site in find_sites(model) if site.name in names]


def flops(model: nn.Module) -> tuple[Products, Products]:
    """Of the forward pass, and of the backward pass."""
    with Products() as forward:
        loss = models.loss_of(model, tokens())
    with Products() as backward:
        loss.backward()
    return forward, backward


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_exact(name: str, granularity: str, rank: int) -> None:
    """The same operations in the same order: the same bits."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward", "block", granularity=granularity)
    expected_loss, expected = loss_and_gradients(deepcopy(dense), tokens())
    model, _ = masked(dense, plan, rank)
    loss, gradients = loss_and_gradients(model, tokens())
    pieces = held_pieces(dense, plan, rank)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == {key for key, held in pieces.items() if held}
    assert len(gradients) < len(expected)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_blocks_skip_weight_gradients_only(name: str) -> None:
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward", "block")
    forward, backward = flops(deepcopy(dense))
    for rank in RANKS:
        own_forward, own_backward = flops(masked(dense, plan, rank)[0])
        lacking = linear_weights(dense) - linear_weights(dense, held_pieces(dense, plan, rank))
        assert lacking > 0
        assert own_forward.flops == forward.flops == 2 * NUM_TOKENS * linear_weights(dense)
        assert backward.flops - own_backward.flops == 2 * NUM_TOKENS * lacking


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_keep_no_activations_for_lacking_weights(name: str, rank: int) -> None:
    """Inputs of a lacking branch's linear layers are not kept; an MLP's output projection is the only reader of its."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward", "block")
    model, _ = masked(dense, plan, rank)
    inputs = inputs_of(model)
    saved, whole = saved_of(model), saved_of(dense)
    lacking = lacking_sites(dense, plan, rank)
    fewer = 0
    for site in find_sites(dense):
        first, last = inputs[layer_of(site, 0)], inputs[layer_of(site, -1)]
        assert whole.has(first)
        assert whole.has(last)
        assert saved.has(first) == (site not in lacking)
        if site.branch.name == "mlp":
            assert saved.has(last) == (site not in lacking)
        fewer += first.nbytes * (site in lacking) + last.nbytes * (site in lacking and site.branch.name == "mlp")
    assert whole.num_bytes - saved.num_bytes >= fewer > 0


def layer_of(site: Site, index: int) -> str:
    assert site.branch.inner is not None
    return f"{site.body}.{site.branch.inner.cuts[index].module}"


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Filled by the next forward pass: the input of each module that has weights."""
    found: dict[str, torch.Tensor] = {}
    for key, module in model.named_modules():
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(lambda _, args, key=key: found.update({key: args[0].detach()}))
    return found


def test_a_lacking_mlp_in_bytes() -> None:
    """Llama: its norm keeps the normalised input for its weight, gate and up share their input, down has its own."""
    dense: Any = build("llama", num_layers=1)
    plan = plan_of(dense, "backward", "block")
    hidden, inner = dense.config.hidden_size, dense.config.intermediate_size
    found = []
    for rank in RANKS:
        site = lacking_sites(dense, plan, rank)[0]
        less = saved_of(deepcopy(dense)).num_bytes - saved_of(masked(dense, plan, rank)[0]).num_bytes
        assert less == 4 * NUM_TOKENS * (2 * hidden + (inner if site.branch.name == "mlp" else 0))
        found.append(site.branch.name)
    assert sorted(found) == ["attention", "mlp"]


def assert_pieces_equal(dense: nn.Module, plan: Plan, rank: int, **inputs: Any) -> tuple[Any, Mask]:
    """Loss and logits are the dense model's to rounding, and so is the gradient of all that is held."""
    expected_loss, expected = loss_and_gradients(deepcopy(dense), tokens(), **inputs)
    whole: Any = deepcopy(dense)
    model, mask = masked(dense, plan, rank)
    loss, gradients = loss_and_gradients(model, tokens(), **inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=ROUNDING, atol=0)
    pieces = held_pieces(dense, plan, rank)
    for key, parameter in dense.named_parameters():
        atol = ROUNDING * float(expected[key].abs().max())
        held = sum(piece.num_elements(parameter.shape) for piece in pieces[key])
        assert gradients[key].numel() == held
        for piece in pieces[key]:
            found, wanted = mask.places.of(piece, gradients[key]), piece.narrow(expected[key])
            torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=atol)
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in mask.places.lacking.values())
    with torch.no_grad():
        found, wanted = model.train()(tokens(), **inputs).logits, whole.train()(tokens(), **inputs).logits
    torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=ROUNDING * float(wanted.abs().max()))
    return model, mask


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_neurons_are_exact_to_rounding(name: str, rank: int) -> None:
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward")
    model, mask = assert_pieces_equal(dense, plan, rank)
    assert mask.places.lacking.keys() == cut_names(plan)
    twins = [part.twin for part in mask.parts if isinstance(part, NeuronPart)]
    assert len(twins) == 4
    for twin in twins:
        assert twin is not None
        shared = {id(p) for p in model.parameters()}
        own = [p for p in twin.parameters() if id(p) not in shared]
        assert all(p.grad is None and not p.requires_grad for p in own)


@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "gpt_neox_parallel", "qwen3"])
def test_neurons_with_eager_attention_padding_and_mixed_strategies(name: str) -> None:
    dense: Any = build(name, num_layers=2)
    dense.set_attn_implementation("eager")
    padded = torch.ones(2, models.LENGTH, dtype=torch.long)
    padded[0, :3] = 0
    for strategy in ("neuron", {"attention": "neuron", "mlp": "block"}, {"attention": "block", "mlp": "neuron"}):
        plan = plan_of(dense, "backward", strategy)
        _, expected = loss_and_gradients(deepcopy(dense), tokens(), attention_mask=padded)
        model, mask = masked(dense, plan, 1)
        _, gradients = loss_and_gradients(model, tokens(), attention_mask=padded)
        pieces = held_pieces(dense, plan, 1)
        assert gradients.keys() == {key for key, held in pieces.items() if held}
        for key, gradient in gradients.items():
            for piece in pieces[key]:
                found, wanted = mask.places.of(piece, gradient), piece.narrow(expected[key])
                torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=ROUNDING * float(expected[key].abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_neurons_skip_weight_gradients_only(name: str) -> None:
    """Two products for each cut layer where the dense model has one; forward FLOPs are the dense model's."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward")
    forward, backward = flops(deepcopy(dense))
    num_cut = sum(len(site.branch.inner.cuts) for site in find_sites(dense) if site.branch.inner)
    for rank in RANKS:
        model = masked(dense, plan, rank)[0]
        with counted_attention() as calls:
            own_forward, own_backward = flops(model)
        lacking = linear_weights(dense) - linear_weights(dense, held_pieces(dense, plan, rank))
        assert own_forward.flops == forward.flops
        assert backward.flops - own_backward.flops == 2 * NUM_TOKENS * lacking > 0
        assert own_forward.num_calls == forward.num_calls + num_cut
        assert own_backward.num_calls == backward.num_calls + num_cut, "input gradients of both, weights' of one"
        assert len(calls) == 2 * 2


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_neurons_keep_fewer_activations(name: str, rank: int) -> None:
    """At least the lacking neurons' inputs of the MLPs' output projections are not kept, and nothing else comes in."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward")
    model, mask = masked(dense, plan, rank)
    whole, saved = saved_of(dense), saved_of(model, extra=tuple(mask.places.lacking.values()))
    lacking = 0
    for site in find_sites(dense):
        if site.branch.name == "mlp":
            pieces = [p for u, unit in enumerate(plan.units) if not plan.holds_rank(u, rank) for p in unit.pieces]
            lacking += sum(p.length for p in pieces if p.parameter == f"{layer_of(site, -1)}.weight")
    assert whole.num_bytes - saved.num_bytes >= 4 * NUM_TOKENS * lacking > 0


def filled(mask: Mask) -> None:
    """Make the whole model dense; in the backward regime each rank has all that it takes."""
    for part in mask.parts:
        part.fill(lambda _: None)


@pytest.mark.parametrize("name", ["llama_odd", "gpt2"])
def test_a_cache_handed_in_while_training_is_ignored(name: str) -> None:
    dense: Any = build(name)
    cache = DynamicCache()
    model, _ = masked(dense, plan_of(dense, "backward"), 0)
    found = model.train()(input_ids=tokens(), past_key_values=cache, use_cache=True).logits
    expected = dense.train()(input_ids=tokens()).logits.detach()
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING * float(expected.abs().max()))
    assert cache.get_seq_length() == 0


@pytest.mark.xfail(strict=True, reason="the split body drops a cache that holds tokens without a word")
def test_a_cache_that_holds_tokens_is_used_or_refused() -> None:
    """An inner module in evaluation, as a wrapper's generate() calls it: no forward of the whole model streams."""
    dense: Any = build("llama")
    model, _ = masked(dense, plan_of(dense, "backward"), 0)
    results = []
    with torch.no_grad():
        for one in (dense.eval(), model.eval()):
            first = one.model(tokens()[:, :4], use_cache=True)
            try:
                results.append(one.model(tokens()[:, 4:], past_key_values=first.past_key_values).last_hidden_state)
            except RuntimeError:
                return
    torch.testing.assert_close(*results, rtol=ROUNDING, atol=1e-4)


@pytest.mark.xfail(strict=True, reason="autograd remembers the earlier shape as long as an earlier loss is kept")
@pytest.mark.parametrize("dense_first", [False, True])
def test_a_loss_that_is_kept_does_not_break_the_next_backward(dense_first: bool) -> None:
    model, mask = masked(build("llama"), plan_of(build("llama"), "backward"), 0)
    if dense_first:
        filled(mask)
    kept = models.loss_of(model, tokens())
    kept.backward()
    for part in mask.parts:
        if dense_first:
            part.release()
        else:
            part.fill(lambda _: None)
    models.loss_of(model, tokens()).backward()


@pytest.mark.xfail(strict=True, reason="only changes that autograd's version counter sees are taken over")
def test_weights_changed_through_data_in_the_dense_model_are_kept() -> None:
    dense = build("llama")
    model, mask = masked(dense, plan_of(dense, "backward"), 0)
    for _ in range(2):
        filled(mask)
        for key, parameter in dense.named_parameters():
            assert torch.equal(model.get_parameter(key), parameter)
            parameter.data.add_(1)
            model.get_parameter(key).data.add_(1)
        for part in mask.parts:
            part.release()


@pytest.mark.xfail(strict=True, reason="GPT-2 drops out at the end of the body, which runs twice with two random masks")
def test_dropout_at_the_end_of_a_body_drops_the_whole_sum() -> None:
    """Of the sum of both parts, as in the dense model: half of the elements are zero, not a quarter."""
    dense: Any = build("gpt2")
    dense.transformer.h[0].mlp.dropout.p = 0.5
    model, _ = masked(dense, plan_of(dense, "backward"), 0)
    torch.manual_seed(0)
    found = model.transformer.h[0].mlp.train()(torch.randn(64, 16))
    assert 0.4 < (found == 0).float().mean().item() < 0.6
