"""What a run will take, against real tensors of the same subnetwork, and against products that a person can count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sdp_deepspeed.config import KEY, MODES, parse
from sdp_deepspeed.estimate.forecast import Forecast, forecast
from sdp_deepspeed.estimate.per_rank import estimate
from sdp_deepspeed.estimate.settings import setup_of
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors
from tests.helpers.measured import Saved, matrices

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
MICRO, ACCUMULATION, RANKS, LENGTH = 2, 3, 2, 8
BATCH = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUMULATION}


def llama() -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))


def of(config: dict[str, Any], **options: Any) -> Forecast:
    return forecast(SHAPE, BATCH | config, num_ranks=RANKS, sequence_length=LENGTH, **options)


def attention_flops(num_heads: int, *, products: int) -> int:
    """Of `products` products of [T, d] by [d, T] for each head, multiply and add counted as two."""
    return 2 * products * MICRO * num_heads * LENGTH * LENGTH * 4


def test_flops_of_the_dense_model_are_those_of_its_matrices() -> None:
    """Forward once, backward twice; attention has two products forward, and five backward in a flash kernel."""
    figures = of({"zero_optimization": {"stage": 1}})
    model = llama()
    linear = 3 * 2 * MICRO * LENGTH * sum(weight.numel() for weight in matrices(model).values())
    assert figures.flops == ACCUMULATION * (linear + 4 * attention_flops(4, products=7))
    assert figures.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert figures.tokens_per_step == MICRO * ACCUMULATION * RANKS * LENGTH


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_subnetwork_keeps_and_holds_what_real_tensors_do(mode: Any) -> None:
    block = {"regime": mode.regime, "strategy": mode.strategy, "coverage": 0.5}
    config = BATCH | {KEY: block, "zero_optimization": {"stage": 1}}
    figures = of(config)
    model, parsed = llama(), parse(config)
    assert parsed is not None
    plan, _ = plan_model(model, parsed, RANKS)
    found = []
    for rank in range(RANKS):
        real, tokens = llama(), torch.zeros((MICRO, LENGTH), dtype=torch.long)
        Mask(real, plan, rank).apply()
        buffers = [*real.buffers(), *(tensor for tensor in vars(real).values() if isinstance(tensor, torch.Tensor))]
        with Saved([*real.parameters(), *buffers]) as saved:
            real(input_ids=tokens, labels=tokens, use_cache=False)
        found.append(saved.num_bytes)
    expected = [each.weights for each in estimate(plan, dense_tensors(model), setup_of(config, ACCUMULATION))]
    outputs = SHAPE["num_hidden_layers"] * MICRO * LENGTH * SHAPE["hidden_size"] * 4  # the kernel's layout has no copy
    assert min(found) <= figures.activations <= max(found) + outputs
    assert figures.rank.weights in expected
    dense = of({"zero_optimization": {"stage": 1}})
    assert figures.flops < dense.flops
    assert figures.rank.state < dense.rank.state


def test_checkpointing_keeps_less_and_computes_more() -> None:
    plain, checkpointed = of({}), of({}, gradient_checkpointing=True)
    assert checkpointed.activations < plain.activations
    assert checkpointed.flops > plain.flops


def test_nothing_is_allocated() -> None:
    """400 GB of weights."""
    giant = SHAPE | {"vocab_size": 1_000_000, "hidden_size": 51_200, "num_hidden_layers": 1}
    figures = forecast(giant, BATCH, num_ranks=RANKS, sequence_length=LENGTH)
    assert figures.num_parameters > 10**11


def test_the_peak_is_in_backward_or_in_the_step() -> None:
    figures = of({KEY: {"coverage": 0.5}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    assert figures.activations > figures.rank.buffers + figures.rank.step_gradients
    assert figures.peak == figures.rank.state + figures.activations
    short = forecast(SHAPE, {"train_micro_batch_size_per_gpu": 1}, num_ranks=1, sequence_length=1)
    assert short.peak == short.rank.state + max(short.activations, short.rank.step_gradients)


def test_whole_tensors_have_one_owner_each() -> None:
    """In the units that a rank holds alone everything is its own; Adam's shards of what is shared are halves."""
    config = {KEY: {"coverage": 0.5}, "optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 1}}
    figures = of(config)
    held = figures.rank.weights // 4
    shared = SHAPE["vocab_size"] * SHAPE["hidden_size"]  # the embedding, and as much the head
    final, norms = SHAPE["hidden_size"], SHAPE["num_hidden_layers"] * SHAPE["hidden_size"]
    matrices = held - 2 * shared - final - norms
    assert figures.rank.optimizer // 4 == matrices + 2 * (norms + shared + final // 2)
    with pytest.raises(ValueError, match=r"'muon' updates whole matrices, and .* are cut"):
        of(config | {KEY: {"coverage": 0.5, "strategy": "neuron"}})
