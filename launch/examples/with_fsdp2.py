"""torchtitan's pattern, without DeepSpeed: `torchrun --nproc_per_node 4 launch/examples/with_fsdp2.py runs/own`, on an
even number of ranks.

Yours is the same loop but for `parallelize`, `param_groups`, `clip_grad_norm_` and `save_pretrained`. Started again
with more `--steps` it goes on from its last checkpoint, on as many ranks and with the same block: DCP keeps what ranks
hold as it is (checkpoints of `sdp_deepspeed.fsdp.CheckpointManager` fit any plan).
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import sdp_deepspeed
from sdp_deepspeed.fsdp import clip_grad_norm_, param_groups, save_pretrained

BLOCK = {"coverage": 0.5, "strategy": "neuron"}
BATCH, LENGTH = 8, 64
# The state of the optimizer by the names of parameters: ranks have different param groups.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """One call in place of `fully_shard` of each block and of the model; activation checkpointing comes before it."""
    on_gpu = mesh.device_type == "cuda"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    sdp_deepspeed.fully_shard(model, mesh, BLOCK, mp_policy=policy)


@torch.no_grad()
def init_weights(model: Any, device: torch.device) -> None:
    """Each element is stored on one rank, which draws it."""
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(device)  # its buffers are in no checkpoint
    torch.manual_seed(dist.get_rank())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):  # others are of units that this rank lacks
            shard = parameter.to_local()
            nn.init.ones_(shard) if "norm" in name else nn.init.normal_(shard, std=model.config.initializer_range)


class TrainState(Stateful):
    """What DCP saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=BY_NAME)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer, self.step = (state_dict[name] for name in ("model", "optimizer", "step"))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=BY_NAME)


def newest(folder: Path) -> Path | None:
    """DCP writes `.metadata` last."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(complete, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def train(state: TrainState, batch_of: Callable[[int], torch.Tensor], steps: int, folder: Path) -> None:
    state.model.train()
    while state.step < steps:
        batch = batch_of(state.step)
        loss = state.model(input_ids=batch, labels=batch).loss  # of this rank's subnetwork
        loss.backward()
        clip_grad_norm_(state.model.parameters(), 1.0)  # the norm of the dense model's averaged gradient
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        if state.step % 50 == 0 or state.step == steps:
            dcp.save({"train": state}, checkpoint_id=folder / f"step-{state.step}")


@torch.no_grad()
def evaluate(model: Any, batch: torch.Tensor) -> float:
    """Of the dense model, on all ranks together."""
    model.eval()
    loss = model(input_ids=batch, labels=batch).loss
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)  # shows the plan
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    parallelize(model, mesh)
    model.to_empty(device=device)
    init_weights(model, device)
    state = TrainState(model, torch.optim.AdamW(param_groups(model), lr=3e-3))
    if (last := newest(options.output)) is not None:
        dcp.load({"train": state}, checkpoint_id=last)
        if rank == 0:
            print(f"goes on from {last}")

    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # some text, byte by byte
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    def batch_of(step: int) -> torch.Tensor:
        numbers = torch.arange(BATCH) + (step * size + rank) * BATCH
        return rows[numbers % len(rows)].to(device)

    train(state, batch_of, options.steps, options.output)
    loss = evaluate(model, batch_of(options.steps))
    if rank == 0:
        print(f"loss of the dense model: {loss:.4f}")
    save_pretrained(model, options.output / "hf")  # on all ranks; rank 0 writes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
