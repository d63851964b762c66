"""Backward masking, neuron strategy: the dense model to rounding, with the work and memory of what is held."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.neuron import NeuronPart
from transformers import DynamicCache, RobertaForCausalLM

from sdp_deepspeed.architectures import locate_branches
from tests.helpers import models
from tests.helpers.masked_modules import (
    NAMES,
    NUM_TOKENS,
    RANKS,
    assert_close,
    assert_held_gradients,
    build,
    counted_attention,
    cut_names,
    flops,
    held_pieces,
    infos,
    layer_of,
    linear_weights,
    loss_and_gradients,
    masked,
    plan_of,
    saved_of,
    tokens,
)
from tests.helpers.more_models import SPECIMENS
from tests.helpers.rank_models import mask_of

STRATEGIES: tuple[Any, ...] = (
    "neuron",
    {"attention": "neuron", "mlp": "block"},
    {"attention": "block", "mlp": "neuron"},
)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_exact_to_rounding(name: str, rank: int) -> None:
    """Loss, logits, and gradients of all that is held or shared (norms, per-head norms, output biases); no others."""
    dense: Any = build(name, num_layers=2)
    plan = plan_of(dense, "backward")
    model, mask = masked(dense, plan, rank)
    with torch.no_grad():
        assert_close(model.train()(tokens()).logits, dense.train()(tokens()).logits)
    expected_loss, expected = loss_and_gradients(dense, tokens())
    loss, gradients = loss_and_gradients(model, tokens())
    assert_close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert_held_gradients(mask, held_pieces(dense, plan, rank), gradients, expected)
    assert mask.model.views.lacking.keys() == cut_names(plan)
    trained = {id(p) for p in model.parameters()}
    twins = [twin for part in mask.parts if isinstance(part, NeuronPart) for twin in part.twins]
    assert len(twins) == 2 * 4
    frozen = [p for twin in twins for p in twin.parameters() if id(p) not in trained]
    assert all(
        tensor.grad is None and not tensor.requires_grad for tensor in (*frozen, *mask.model.views.lacking.values())
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "gpt_neox_parallel", "qwen3"])
def test_eager_attention_padding_and_mixed_strategies(name: str, strategy: Any) -> None:
    dense: Any = build(name, num_layers=2)
    dense.set_attn_implementation("eager")
    padded = torch.ones(2, models.LENGTH, dtype=torch.long)
    padded[0, :3] = 0
    plan = plan_of(dense, "backward", strategy)
    _, expected = loss_and_gradients(deepcopy(dense), tokens(), attention_mask=padded)
    model, mask = masked(dense, plan, 1)
    _, gradients = loss_and_gradients(model, tokens(), attention_mask=padded)
    assert_held_gradients(mask, held_pieces(dense, plan, 1), gradients, expected)


@pytest.mark.parametrize("name", NAMES)
def test_skip_weight_gradients_only(name: str) -> None:
    """Two products for each cut layer where the dense model has one; forward FLOPs are the dense model's."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward")
    forward, backward = flops(deepcopy(dense))
    num_cut = sum(len(branch.description.inner.cuts) for branch in locate_branches(dense) if branch.description.inner)
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
def test_keep_fewer_activations(name: str, rank: int) -> None:
    """At least the lacking neurons' inputs of the MLPs' output projections are not kept, and nothing else comes in."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward")
    model, mask = masked(dense, plan, rank)
    whole, saved = saved_of(dense), saved_of(model, extra=mask.model.views.lacking.values())
    lacking = 0
    for branch in locate_branches(dense):
        if branch.description.name == "mlp":
            pieces = [p for u, unit in enumerate(plan.units) if not plan.holds_rank(u, rank) for p in unit.pieces]
            lacking += sum(p.length for p in pieces if p.parameter == f"{layer_of(branch, -1)}.weight")
    assert whole.num_bytes - saved.num_bytes >= 4 * NUM_TOKENS * lacking > 0


def filled(mask: Mask) -> None:
    """Make the whole model dense; in the backward regime each rank has all that it takes."""
    for part in mask.parts:
        part.fill(lambda _: None)


def decoder_of(name: str) -> Any:
    """Also one whose attention is several modules of the layer, the first of which has the cache."""
    if name != "roberta":
        return build(name)
    specimen = SPECIMENS[name]
    return RobertaForCausalLM(specimen.config(**specimen.options, is_decoder=True))


@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "roberta"])
def test_a_cache_handed_in_while_training_is_ignored(name: str) -> None:
    dense = decoder_of(name)
    cache = DynamicCache()
    model, _ = masked(dense, plan_of(dense, "backward"), 0)
    expected = dense.train()(input_ids=tokens()).logits.detach()
    found = model.train()(input_ids=tokens(), past_key_values=cache, use_cache=True).logits
    assert_close(found, expected)
    assert cache.get_seq_length() == 0
    with pytest.raises(RuntimeError, match="runs in two parts"):  # it should hold tokens now
        model(input_ids=tokens(), past_key_values=cache, use_cache=True)


def test_modules_without_weights_are_the_bodys_own() -> None:
    """Another rate of dropout, or a hook, reaches both parts."""
    dense: Any = build("gpt2")
    mask = masked(dense, plan_of(dense, "backward"), 0)[1]
    for part in mask.parts:
        assert isinstance(part, NeuronPart)
        for twin in part.twins:
            assert twin is not part.modules[0]
            for name in ("attn_dropout", "act"):
                assert getattr(twin, name, None) is getattr(part.modules[0], name, None)


def test_a_cache_that_holds_tokens_is_refused() -> None:
    """In a subnetwork's forward pass; the dense view makes the part dense before (test_dense_view_modes.py)."""
    dense: Any = build("llama")
    model: Any = masked(dense, plan_of(dense, "backward"), 0)[0]
    cache = dense(tokens()[:, :4], use_cache=True).past_key_values
    with pytest.raises(RuntimeError, match=r"layers\.0\.attention runs in two parts.*engine\.dense\(resident=True\)"):
        model(tokens()[:, 4:], past_key_values=cache)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_a_cache_that_should_hold_tokens_is_refused(name: str, trains: bool) -> None:
    """A first call outside training steps leaves it empty, so the second would go on without the tokens before it."""
    model: Any = masked(build(name), plan_of(build(name), "backward"), 0)[0]
    model.train(trains)
    with torch.set_grad_enabled(not trains):
        cache = model(tokens()[:, :4], use_cache=True).past_key_values
        assert cache.get_seq_length() == 0
        with pytest.raises(RuntimeError, match=r"attention runs in two parts.*generate without gradients, or inside"):
            model(tokens()[:, 4:], past_key_values=cache)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_attention_are_not_those_of_the_held_heads(name: str) -> None:
    """Asked for while training they are missing; the dense model has them."""
    dense: Any = build(name)
    dense.set_attn_implementation("eager")
    model, mask = masked(dense, plan_of(dense, "backward"), 0)
    found, expected = (m.train()(tokens(), output_attentions=True) for m in (model, dense))
    assert_close(found.logits, expected.logits.detach())
    assert len(expected.attentions) == 1
    assert all(weights is None for weights in found.attentions or ())
    filled(mask)
    assert torch.equal(model(tokens(), output_attentions=True).attentions[0], expected.attentions[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("remains", ["loss", "gradients"])
@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_what_remains_of_the_dense_model_does_not_break_the_first_backward(
    regime: str, remains: str, dtype: torch.dtype
) -> None:
    """The graph of a loss that is kept, and gradients, have the dense shapes."""
    dense = build("llama").to(dtype)
    plan = plan_of(dense, regime)
    expected = loss_and_gradients(masked(dense, plan, 0)[0], tokens())[1]
    kept = models.loss_of(dense, tokens(4))
    if remains == "gradients":
        kept.backward()
    mask = mask_of(dense, locate_branches(dense), infos(dense), plan, 0)
    _, found = loss_and_gradients(dense, tokens())
    assert len(mask.parts) == 2
    assert kept.isfinite()  # still here
    for key in cut_names(plan):
        assert torch.equal(found[key], expected[key]), key


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
    again = models.loss_of(model, tokens())
    again.backward()
    torch.testing.assert_close(again, kept)  # the parts are added in another order
    for key in cut_names(plan_of(build("llama"), "backward")):
        gradient = model.get_parameter(key).grad
        assert gradient is not None, key
        assert gradient.any(), key


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
            part.take_over()
            part.release()


def test_dropout_at_the_end_of_a_body_drops_the_whole_sum() -> None:
    """Of the sum of both parts, as in the dense model: half of the elements are zero, not a quarter."""
    dense: Any = build("gpt2")
    dense.transformer.h[0].mlp.dropout.p = 0.5
    model, _ = masked(dense, plan_of(dense, "backward"), 0)
    torch.manual_seed(0)
    found = model.transformer.h[0].mlp.train()(torch.randn(64, 16))
    assert 0.4 < (found == 0).float().mean().item() < 0.6
