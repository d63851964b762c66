"""Units over tensor-parallel ranks too, by torch's `parallelize_module`: 2 x 2 ranks beside the reference; checkpoints
of the dense model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import sdp_deepspeed
from sdp_deepspeed.fsdp import clip_grad_norm_, full_state_dict, save_pretrained, sharded_model_of
from tests.helpers.models import SPECIMENS, TOKENS, VOCABULARY, llama, loss_of, scrambled
from tests.helpers.ranks import Rank
from tests.helpers.sharded import (
    Layer,
    ShardedRun,
    assert_same_run,
    check_against_reference,
    check_resumed,
    seen_buffers,
)
from tests.helpers.training import assert_identical, refusal

pytestmark = pytest.mark.world(4)

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
LLAMA = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"model.layers.*.self_attn.{name}_proj": COLUMNS for name in "qkv"},
    "model.layers.*.self_attn.o_proj": ROWS,
    **{f"model.layers.*.mlp.{name}_proj": COLUMNS for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": ROWS,
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
ONE = {"holders": 1}


class Tower(nn.Module):
    """Whose ranks have a part of the sequence each between branches, as a DTensor."""

    PLAN: dict[str, Any] = {  # noqa: RUF012
        "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for _number, _name in enumerate(("one", "two"), 1):
        PLAN[f"layers.*.norm_{_number}"] = SequenceParallel(use_local_output=False)
        PLAN[f"layers.*.{_name}"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        PLAN[f"layers.*.{_name}.0"] = COLUMNS
        PLAN[f"layers.*.{_name}.2"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Embedding(VOCABULARY, 4)
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(2))
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.first(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return SimpleNamespace(logits=logits, loss=logits.float().square().mean())


def parallelized(model: Any, plan: Mapping[str, Any] = LLAMA) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    parallelize_module(model, mesh["tp"], Tower.PLAN if isinstance(model, Tower) else dict(plan))
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return mesh["dp"]


def wrap_layers(model: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)


def test_agrees_with_the_reference(rank: Rank) -> None:
    """With biases that each tensor-parallel rank has; layers that are wrapped afterwards run again in backward."""
    dense = SPECIMENS["llama_biases"].build()
    num_elements = sum(value.numel() for value in dense.parameters())
    options: dict[str, Any] = {"parallelize": parallelized, "accumulation": 2, "prepare": wrap_layers}
    model = check_against_reference(rank, dense, ONE, **options)
    stored = sharded_model_of(model)
    held = sum(stored.shard(part).numel() for part in stored.held_parts())
    assert held < 0.3 * num_elements


def test_divides_the_sequence(rank: Rank) -> None:
    """Norms are DTensors as well, whose gradients tensor-parallel ranks add up."""
    check_against_reference(rank, Tower(), ONE, parallelize=parallelized)


def test_adds_up_what_runs_on_each_head(rank: Rank) -> None:
    """Norms of queries and keys, which are refused without a style."""
    style = SequenceParallel(sequence_dim=2, use_local_output=True)
    with_norms = LLAMA | {f"model.layers.*.self_attn.{name}_norm": style for name in "qk"}
    parallelize = partial(parallelized, plan=with_norms)
    check_against_reference(rank, SPECIMENS["qwen3"].build(), ONE, parallelize=parallelize)
    plain = SPECIMENS["qwen3"].build()
    mesh = parallelized(plain)
    words = "layers.0.self_attn.q_norm.weight", "sequence_dim=2"
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(plain, mesh, ONE), *words)


def test_is_exported(rank: Rank) -> None:
    """As in evaluation; with a tied head."""
    model: Any = llama(tied=True)
    model = sdp_deepspeed.fully_shard(model, parallelized(model), ONE)
    state = full_state_dict(model)
    with torch.no_grad():
        found = model.eval()(input_ids=TOKENS).logits
        if rank.rank == 0:
            whole = llama(tied=True)
            whole.load_state_dict(state)
            torch.testing.assert_close(found, whole(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-4)
            name = "model.layers.0.mlp.down_proj.weight"
            assert torch.equal(state[name], llama(tied=True).get_parameter(name))
    assert bool(state) == (rank.rank == 0)


def test_is_refused(rank: Rank) -> None:
    """What would train or save something else, by name; the model stays as it was given."""
    model: Any = llama()
    mesh = parallelized(model)
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ignored = [model.get_parameter("lm_head.weight")]
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, None, ONE), "DTensors", 'mesh["dp"]')
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, root, ONE), "2 axes")
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, root["tp"], ONE), "axes of one mesh")
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(llama(), mesh, ONE), "expected all 4")
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, mesh, ONE, ignored_params=ignored), "ignored_params")
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, mesh, ONE | {"strategy": "neuron"}), "DTensors")
    mlp = model.model.layers[0].mlp
    gate = mlp.gate_proj.weight
    hooks = len(mlp.gate_proj._forward_pre_hooks), len(mlp.gate_proj._forward_hooks)
    mlp.up_proj.weight = nn.Parameter(DTensor.from_local(gate.to_local().detach(), gate.device_mesh, gate.placements))
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, mesh, ONE), "share memory")
    assert hooks == (len(mlp.gate_proj._forward_pre_hooks), len(mlp.gate_proj._forward_hooks))
    part = torch.zeros(8 * (1 + root.get_local_rank("tp")), 16)
    uneven = DTensor.from_local(part, root["tp"], [Shard(0)], shape=torch.Size((24, 16)), stride=(16, 1))
    mlp.up_proj.weight = nn.Parameter(uneven)
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, mesh, ONE), "torch.chunk")
    mlp.up_proj.weight = nn.Parameter(gate.detach().clone())
    mlp.gate_proj.register_buffer("mean", distribute_tensor(torch.zeros(2), root["tp"], [Replicate()]))
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(model, mesh, ONE), "gate_proj.mean", "buffer")
    assert isinstance(model.get_parameter("lm_head.weight"), DTensor)
    model = llama()
    model = sdp_deepspeed.fully_shard(model, parallelized(model), {"holders": 2})
    loss_of(model, TOKENS).backward()
    parameters = list(model.parameters())
    refusal(ValueError, lambda: clip_grad_norm_(parameters, 1.0), "pass the model")
    refusal(RuntimeError, lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    state = get_model_state_dict(model)
    refusal(CheckpointException, lambda: dcp.save(state, checkpoint_id=rank.folder / "parts"), "the same name")
    with torch.device("meta"):
        empty = llama()
    mesh = parallelized(empty)
    refusal(ValueError, lambda: sdp_deepspeed.fully_shard(empty, mesh, ONE), "meta device")


tied = partial(llama, tied=True)  # its vocabulary is divided unevenly; its norms are no DTensors


def with_buffers() -> Any:
    """Norms and some biases are DTensors that each rank has, as is the head's buffer; those of units are none."""
    model: Any = Tower()
    for inner in (model.head, *(layer.one[1] for layer in model.layers)):
        inner.register_buffer("mean", torch.zeros(3))
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    return model


def divided(model: Any) -> ShardedRun:
    """A run under tensor parallelism."""
    return ShardedRun(model, parallelized(model))


def test_goes_on_as_uninterrupted(rank: Rank) -> None:
    builds: tuple[Callable[[], Any], ...] = (tied, with_buffers)
    for number, build in enumerate(builds):
        run = divided(build())
        for buffer in seen_buffers(run).values():
            buffer.add_(rank.rank + 1)
        check_resumed(rank, rank.folder / f"resumed{number}", run, divided(scrambled(build())))


def test_goes_on_elsewhere(rank: Rank) -> None:
    """Without tensor parallelism, as blocks and as neurons, and back; and from what is exported."""
    run, folder = divided(tied()), rank.folder / "elsewhere"
    run.train(rank, 2)
    run.checkpoints.save_checkpoint(folder / "divided")
    plain, back = ShardedRun(tied(seed=5)), divided(tied(seed=5))
    neurons = ShardedRun(tied(seed=5), strategy="neuron", holders=3)
    plain.train(rank, 1, seed=7)
    carry(rank, folder / "divided", plain, folder / "plain")
    carry(rank, folder / "divided", neurons, folder / "neurons")
    plain.train(rank, 1, first=2)
    plain.checkpoints.save_checkpoint(folder / "further")
    carry(rank, folder / "further", back, folder / "back")
    save_pretrained(run.model, folder / "hf")
    back.checkpoints.load_pretrained(folder / "hf")
    assert_identical(full_state_dict(back.model), full_state_dict(run.model))


def carry(rank: Rank, source: Path, run: ShardedRun, target: Path) -> None:
    """Load a checkpoint, and save it again: it is the same."""
    path, _ = run.checkpoints.load_checkpoint(source)
    assert path is not None
    run.checkpoints.save_checkpoint(target, Path(path).name)
    if rank.rank == 0:
        assert_same_run(Path(path), target / Path(path).name)
