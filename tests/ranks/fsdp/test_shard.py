"""`fully_shard` against the reference, plain FSDP2 and the DeepSpeed host, on 2 to 4 ranks."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from transformers import BartConfig, BartForCausalLM

from sdp_deepspeed import fully_shard, trace
from sdp_deepspeed.fsdp import sharded_model_of
from sdp_deepspeed.parallel import consistency
from sdp_deepspeed.parallel.groups import default_store
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.hand_written import HAND_WRITTEN
from tests.helpers.models import VOCABULARY, batches, llama
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.ranks import COLLECTIVE_TIMEOUT, Rank
from tests.helpers.sharded import (
    NUM_STEPS,
    check_against_reference,
    micro_steps,
    optimizer_of,
    sharded,
)
from tests.helpers.training import engine_of, gathered, refusal, sgd

pytestmark = [pytest.mark.gpu, pytest.mark.world(3)]
BY_RULES = {"holders": [{"units": "mlp", "holders": 1}, {"holders": 3}]}
LAYERS = {"holders": 2, "granularity": "layer"}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("rank", "name", "block", "options"),
    [
        (2, "llama", {"holders": 1}, {}),
        (2, "llama", {"holders": 1}, {"optimizer": "SGD", "accumulation": 2}),
        slow(2, "resnet", {"holders": 1}, {"optimizer": "SGD"}),
        (2, "bloom", {"holders": 1}, {"optimizer": "SGD"}),  # which adds inside of its bodies
        slow(3, "llama", {"holders": 2}, {}),
        (3, "gpt2", LAYERS, {}),
        slow(3, "resnet_bottleneck", {"holders": 2}, {"optimizer": "SGD"}),
        slow(3, "convnext", {"holders": 2}, {}),  # a layer's own parameter
        slow(3, "swin", {"holders": 2}, {"optimizer": "SGD"}),  # windows
        (4, "llama", {"holders": 3, "branch_scale": "none"}, {}),
        slow(4, "gpt_neox_parallel", BY_RULES, {}),
        (4, "llama", {"holders": 1, "subnetworks": 2}, {}),
        (4, "llama_tied", {"coverage": 0.5}, {"reshard_after_forward": False}),
    ],
)
def test_agrees_with_the_reference(rank: Rank, name: str, block: dict[str, Any], options: dict[str, Any]) -> None:
    whole: Any = ALL_SPECIMENS[name].build()
    parameters = list(whole.parameters())
    model = check_against_reference(rank, whole, block, **options)
    sizes = {parameter.untyped_storage().nbytes() for parameter in parameters}
    allowed = {0}
    if name == "convnext":  # one zero stands for all of an absent layer's own vector, unless it was copied to a GPU
        allowed |= {4} if sharded_model_of(model).device.type == "cpu" else {4 * n for n in whole.config.hidden_sizes}
    assert sizes <= allowed, f"shards are all that is left, not {sizes}"
    stored: Any = sharded_model_of(model)
    for part in stored.held_parts():
        start, stop = part.rows(rank.rank)
        assert stored.shard(part).shape == (stop - start, *part.shape[1:])
    limits = {limit_of(stored.groups.of(part.holders).process_group) for part in stored.held_parts()}
    assert limits <= {COLLECTIVE_TIMEOUT, None}, "of waiting, as the run's own"


def limit_of(group: Any) -> Any:
    """None of a single rank."""
    return None if group is None else group._get_backend(group._device_types[0]).options._timeout


def test_all_ranks_create_as_many_groups(rank: Rank) -> None:
    """Though one of them holds no unit alone. PyTorch 2.14 names groups by how many a rank has created, so that ranks
    that differ in it wait for each other for ever. Before other tests: a group of one rank is created once."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        fully_shard(llama(), None, BY_RULES)
    assert len(set(gathered(new_group.call_count))) == 1


@pytest.mark.parametrize("block", [{}, {"granularity": "layer"}, {"strategy": "neuron"}], ids=str)
def test_covers_everything(rank: Rank, block: dict[str, Any]) -> None:
    """C = 1 is plain FSDP2, whose groups are the same modules, to the last bit."""
    model: Any = ALL_SPECIMENS["gpt2"].build()
    plain: Any = deepcopy(model)
    model = sharded(model, {"holders": rank.size} | block)
    for layer in plain.transformer.h:
        parts = {"granularity": [layer], "strategy": [layer.attn, layer.mlp]}
        modules = next((parts[key] for key in block), [[layer.ln_1, layer.attn, layer.ln_2, layer.mlp]])
        for module in modules:
            torch_fully_shard(module)
    torch_fully_shard(plain)
    optimizers = [optimizer_of(each) for each in (model, plain)]
    for step in itertools.islice(batches(rank.size, 1), NUM_STEPS):
        losses = [micro_steps(each, step[rank.rank]) for each in (model, plain)]
        assert losses[0] == losses[1]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_late_ranks_are_named(rank: Rank) -> None:
    """Once, by the first waiting rank."""
    store: Any = default_store()
    barrier = consistency.CallBarrier()
    warnings: list[str] = []

    def record(message: str, *values: object) -> None:
        warnings.append(message % values)
        store.set("late is named", "")

    with mock.patch.multiple(consistency, PATIENCE=0.0), mock.patch.object(consistency.logger, "warning", record):
        if rank.rank > 0:
            store.wait(["late is named"])
        barrier.wait("save")
    assert gathered(warnings) == [["save: waiting for rank 1, 2; call it on all ranks"], [], []]


def test_layers_that_hand_tensors_on(rank: Rank) -> None:
    """Are cut into heads, or refused: their gradients would come in other orders on each rank."""
    refusal(ValueError, lambda: sharded(ALL_SPECIMENS["t5"].build(), {"holders": 2}), "passes tensors to later layers")
    block = {"strategy": {"attention": "neuron", "cross_attention": "neuron", "mlp": "block"}, "holders": 2}
    check_against_reference(rank, ALL_SPECIMENS["t5"].build(), block, optimizer="SGD")


@pytest.mark.world(2)
def test_parameters_of_a_layer_with_several_branches(rank: Rank) -> None:
    """Are the branches', except here: FSDP2 shards the parameters of one module together."""

    def scales(plan: Plan) -> list[str]:
        return [piece.parameter for unit in plan.units for piece in unit.pieces if "gamma" in piece.parameter]

    written = HAND_WRITTEN["layer_scale"]
    models = [written.build(), written.build()]
    for model in models:
        trace(model, *written.example())
    assert len(scales(engine_of(sgd(holders=1), models[0]).plan)) == 6
    model = sharded(models[1], {"holders": 1})
    assert not scales(sharded_model_of(model).plan)
    model(*written.example()).square().mean().backward()
    assert all(p.grad.to_local().isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_decoder_without_encoder(rank: Rank) -> None:
    """Skips its cross-attention, and frees each layer all the same."""
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    config = BartConfig(vocab_size=VOCABULARY, is_decoder=True, use_cache=False, **sizes)
    model: Any = sharded(BartForCausalLM(config), {"holders": 2})
    gathered: list[str] = []

    def note(*_: Any) -> None:
        units = sharded_model_of(model).fsdp_groups
        gathered.extend(
            n for group in units for m in group for n, p in m.named_parameters() if not isinstance(p, DTensor)
        )

    model.lm_head.register_forward_pre_hook(note)
    micro_steps(model, next(iter(batches(rank.size, 1)))[rank.rank])
    assert not gathered


def test_encoders_that_no_loss_reaches(rank: Rank) -> None:
    """Are refused: their gradients would come in another order on such a rank. Two cross-attentions with one holder
    each are too few for three ranks."""
    refusal(ValueError, lambda: sharded(ALL_SPECIMENS["bart"].build(), {"holders": 1}), "holds no cross-attention")
    for block in ({"holders": 2}, {"holders": 1, "shared": ["decoder.layers.0.cross_attention"]}):
        check_against_reference(rank, ALL_SPECIMENS["bart"].build(), block, optimizer="SGD")
