"""Neurons and heads under FSDP2 against the reference, plain FSDP2 and the DeepSpeed host, on 2 to 4 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from sdp_deepspeed.fsdp import fsdp_groups, sharded_model_of
from tests.helpers.collective_log import Issued, check_order, collectives_of_fsdp
from tests.helpers.mixtures import MIXTURES, mixture
from tests.helpers.models import SPECIMENS, batches, llama, loss_of
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.ranks import Rank
from tests.helpers.sharded import (
    NUM_STEPS,
    check_against_reference,
    gathered_state,
    micro_steps,
    optimizer_of,
    sharded,
)

pytestmark = [pytest.mark.gpu, pytest.mark.world(4)]
NEURON: dict[str, Any] = {"strategy": "neuron", "coverage": 0.5}
TWO_OF_THREE: dict[str, Any] = {"strategy": "neuron", "holders": 2}
THREE_OF_FOUR: dict[str, Any] = {"strategy": "neuron", "holders": 3}
BY_DEPTH: dict[str, Any] = {"strategy": "neuron", "holders": [{"profile": "linear", "first": 4, "last": 2}]}


SGD = {"optimizer": "SGD"}
MIXED = {"strategy": {"attention": "block", "mlp": "neuron"}, "coverage": 0.5}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize(
    ("rank", "name", "block", "options"),
    [
        slow(2, "llama_biases", NEURON, SGD | {"accumulation": 2}),
        slow(3, "gpt2", TWO_OF_THREE | {"neuron_groups": 5}, {}),
        (3, "mixtral", TWO_OF_THREE, {}),
        slow(3, "resnet", TWO_OF_THREE, {}),
        slow(3, "qwen3_next", TWO_OF_THREE, SGD),
        (4, "qwen3", THREE_OF_FOUR, {"prepare": checkpointed}),
        (4, "gpt2", BY_DEPTH | {"branch_scale": "none"}, SGD),
        (4, "llama", NEURON | {"subnetworks": 2}, SGD),
        (4, "qwen3", MIXED, SGD | {"reshard_after_forward": False}),
    ],
)
def test_agrees_with_the_reference(rank: Rank, name: str, block: dict[str, Any], options: dict[str, Any]) -> None:
    """Losses, norms, evaluation and weights; and this rank stores its shards of its pieces and no more."""
    dense = mixture(name) if name in MIXTURES else ALL_SPECIMENS[name].build()
    shapes = {key: parameter.shape for key, parameter in dense.named_parameters()}
    model = check_against_reference(rank, dense, block, **options)
    stored = sharded_model_of(model)
    parts = {part.path: part for part in stored.held_parts()}
    assert parts.keys() == {key for key, parameter in model.named_parameters() if parameter.numel()}
    for part in parts.values():
        whole = stored.parameter(part)
        assert whole.shape == part.shape
        assert whole.device_mesh.mesh.tolist() == list(part.holders)
    total = torch.tensor(sum(stored.shard(part).numel() for part in parts.values()))
    dist.all_reduce(total)
    assert total.item() == sum(shape.numel() for shape in shapes.values())  # each element once, on one rank


def test_skips_layers(rank: Rank) -> None:
    """All ranks skip the same layers of some passes, each checkpointed: groups that span a skipped layer are as those
    of single layers."""
    block = {"strategy": {"attention": "block", "mlp": "neuron"}, "coverage": 0.5, "seed": 2}
    losses, counts, gradients = [], [], []
    for slack in (0.0, fsdp_groups._SLACK):
        with mock.patch.object(fsdp_groups, "_SLACK", slack):
            model: Any = sharded(llama(6), block)
        checkpointed(model)
        losses.append(list[float]())
        with collectives_of_fsdp() as log:
            for step, skipped in zip(batches(rank.size, 1), ((), (0, 4), ()), strict=False):
                with ExitStack() as stack:
                    for number in skipped:
                        stack.enter_context(mock.patch.object(model.model.layers[number], "forward", _same))
                    losses[-1] += micro_steps(model, step[rank.rank])
        logs: list[Sequence[Issued]] = [[] for _ in range(rank.size)]
        dist.all_gather_object(logs, log)
        check_order(logs)
        counts.append(len(log))
        gradients.append({name: p.grad.to_local() for name, p in model.named_parameters() if p.numel()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert counts[1] < counts[0]
    torch.testing.assert_close(gradients[0], gradients[1])


def _same(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    return hidden_states


@pytest.mark.world(2)
def test_starts_on_the_meta_device(rank: Rank) -> None:
    """And stays there, until the user gives it values."""
    attention_joins_its_sinks = mixture("gpt_oss")
    for stock, block in ((llama(), {"holders": 1}), (attention_joins_its_sinks, NEURON)):
        with torch.device("meta"):
            model: Any = type(stock)(stock.config)
        model = sharded(model, block)
        assert all(parameter.is_meta for parameter in model.parameters() if parameter.numel())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        model.apply(model._init_weights)
        assert all(value.isfinite().all() for value in gathered_state(model).values())


def test_mixed_precision(rank: Rank) -> None:
    """The dense model is gathered, and computes, in the policy's dtype; outputs are cast, and state stays in fp32.
    Ranks share several holder sets, which a cast between nested parts would make them gather in different orders."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    dense = SPECIMENS["llama_biases"].build()
    model = sharded(deepcopy(dense), THREE_OF_FOUR, mp_policy=policy)
    model.model.norm.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    outputs: list[Any] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, output: outputs.append(output.dtype))
    own = optimizer_of(model)
    for step in itertools.islice(batches(rank.size, 1), NUM_STEPS):
        losses = micro_steps(model, step[rank.rank])
        own.step()
        own.zero_grad()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    dense.load_state_dict(gathered_state(model))
    model.eval()
    with torch.no_grad():
        found, expected = loss_of(model, step[rank.rank][0]), loss_of(dense.bfloat16(), step[rank.rank][0])
    assert set(outputs) == {torch.float32}
    assert abs(found - expected) <= 2.0**-6 * expected, (found, expected, losses)
