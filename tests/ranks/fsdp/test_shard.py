"""`fully_shard` against the reference, plain FSDP2 and the DeepSpeed host, on 2 to 4 ranks."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from transformers import BartConfig, BartForCausalLM

from sdp_deepspeed import fully_shard, trace
from sdp_deepspeed.fsdp import fsdp_groups, sharded_model_of
from sdp_deepspeed.parallel import call_barrier
from sdp_deepspeed.parallel.groups import default_store
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.collective_log import check_order, collectives_of_fsdp
from tests.helpers.hand_written import HAND_WRITTEN
from tests.helpers.mixtures import MIXTURES, mixture
from tests.helpers.models import SPECIMENS, VOCABULARY, batches, llama, loss_of
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.ranks import COLLECTIVE_TIMEOUT, Rank
from tests.helpers.sharded import (
    NUM_STEPS,
    check_against_reference,
    gathered_state,
    micro_steps,
    optimizer_of,
    sharded,
)
from tests.helpers.training import engine_of, gathered, refusal, sgd

pytestmark = [pytest.mark.gpu, pytest.mark.world(3)]
BY_RULES = {"holders": [{"units": "mlp", "holders": 1}, {"holders": 3}]}
NEURON: dict[str, Any] = {"strategy": "neuron", "coverage": 0.5}
TWO_OF_THREE: dict[str, Any] = {"strategy": "neuron", "holders": 2}
THREE_OF_FOUR: dict[str, Any] = {"strategy": "neuron", "holders": 3}
BY_DEPTH: dict[str, Any] = {"strategy": "neuron", "holders": [{"profile": "linear", "first": 4, "last": 2}]}
MIXED: dict[str, Any] = {"strategy": {"attention": "block", "mlp": "neuron"}, "coverage": 0.5}
SGD = {"optimizer": "SGD"}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize(
    ("rank", "name", "block", "options"),
    [
        (2, "llama", {"holders": 1}, {}),
        (2, "llama", {"holders": 1}, SGD | {"accumulation": 2}),
        slow(2, "resnet", {"holders": 1}, SGD),
        (2, "bloom", {"holders": 1}, SGD),  # which adds inside of its bodies
        slow(2, "llama_biases", NEURON, SGD | {"accumulation": 2}),
        slow(3, "llama", {"holders": 2}, {}),
        (3, "gpt2", {"holders": 2, "granularity": "layer"}, {}),
        slow(3, "resnet_bottleneck", {"holders": 2}, SGD),
        slow(3, "convnext", {"holders": 2}, {}),  # a layer's own parameter
        slow(3, "swin", {"holders": 2}, SGD),  # windows
        slow(3, "gpt2", TWO_OF_THREE | {"neuron_groups": 5}, {}),
        (3, "mixtral", TWO_OF_THREE, {}),
        slow(3, "resnet", TWO_OF_THREE, {}),
        slow(3, "qwen3_next", TWO_OF_THREE, SGD),
        (4, "llama", {"holders": 3, "branch_scale": "none"}, {}),
        slow(4, "gpt_neox_parallel", BY_RULES, {}),
        (4, "llama", {"holders": 1, "subnetworks": 2}, {}),
        (4, "llama_tied", {"coverage": 0.5}, {"reshard_after_forward": False}),
        (4, "qwen3", THREE_OF_FOUR, {"prepare": checkpointed}),
        (4, "gpt2", BY_DEPTH | {"branch_scale": "none"}, SGD),
        (4, "llama", NEURON | {"subnetworks": 2}, SGD),
        (4, "qwen3", MIXED, SGD | {"reshard_after_forward": False}),
    ],
)
def test_agrees_with_the_reference(rank: Rank, name: str, block: dict[str, Any], options: dict[str, Any]) -> None:
    """Losses, norms, evaluation and weights; and this rank stores its shards of its pieces and no more."""
    dense: Any = mixture(name) if name in MIXTURES else ALL_SPECIMENS[name].build()
    parameters = list(dense.parameters())
    num_elements = sum(parameter.numel() for parameter in parameters)
    model = check_against_reference(rank, dense, block, **options)
    stored: Any = sharded_model_of(model)
    sizes = {parameter.untyped_storage().nbytes() for parameter in parameters}
    allowed = {0}
    if name == "convnext":  # one zero stands for all of an absent layer's own vector, unless it was copied to a GPU
        allowed |= {4} if stored.device.type == "cpu" else {4 * n for n in dense.config.hidden_sizes}
    assert sizes <= allowed, f"shards are all that is left, not {sizes}"
    parts = {part.path: part for part in stored.held_parts()}
    assert parts.keys() == {key for key, p in model.named_parameters() if p.numel() and 0 not in p.stride()}
    for part in parts.values():
        whole, (start, stop) = stored.parameter(part), part.rows(rank.rank)
        assert whole.shape == part.shape
        assert whole.device_mesh.mesh.tolist() == list(part.holders)
        assert stored.shard(part).shape == (stop - start, *part.shape[1:])
    total = torch.tensor(sum(stored.shard(part).numel() for part in parts.values()))
    dist.all_reduce(total)
    assert total.item() == num_elements  # each element once, on one rank
    limits = {limit_of(stored.groups.of(part.holders).process_group) for part in parts.values()}
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
    barrier = call_barrier.CallBarrier()
    warnings: list[str] = []

    def record(message: str, *values: object) -> None:
        warnings.append(message % values)
        store.set("late is named", "")

    with mock.patch.multiple(call_barrier, PATIENCE=0.0), mock.patch.object(call_barrier.logger, "warning", record):
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


@pytest.mark.world(4)
def test_skips_layers(rank: Rank) -> None:
    """All ranks skip the same layers of some passes, each checkpointed: groups that span a skipped layer are as those
    of single layers."""
    losses, counts, gradients = [], [], []
    for slack in (0.0, fsdp_groups._SLACK):
        with mock.patch.object(fsdp_groups, "_SLACK", slack):
            model: Any = sharded(llama(6), MIXED | {"seed": 2})
        checkpointed(model)
        losses.append(list[float]())
        with collectives_of_fsdp() as log:
            for step, skipped in zip(batches(rank.size, 1), ((), (0, 4), ()), strict=False):
                with ExitStack() as stack:
                    for number in skipped:
                        stack.enter_context(mock.patch.object(model.model.layers[number], "forward", _same))
                    losses[-1] += micro_steps(model, step[rank.rank])
        check_order(gathered(log))
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


@pytest.mark.world(4)
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
