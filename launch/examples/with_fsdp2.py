"""FSDP2 without DeepSpeed: `torchrun --nproc_per_node 4 launch/examples/with_fsdp2.py runs/fsdp2`.

Only `fully_shard`, `param_groups`, `clip_grad_norm_` and `save_pretrained` differ from a loop over PyTorch's FSDP2.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed
from sdp_deepspeed.fsdp import CheckpointManager, clip_grad_norm_, param_groups, save_pretrained

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with sdp_deepspeed.Init():  # weights of this rank only, with output projections that start smaller
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE))
    block = {"coverage": [{"coverage": 0.5, "whole_ends": 1}]}
    sdp_deepspeed.fully_shard(model, init_device_mesh(device.type, (size,)), block)
    optimizer = torch.optim.AdamW(param_groups(model), lr=3e-3)
    checkpoints = CheckpointManager(model, optimizer)
    resumed, _ = checkpoints.load_checkpoint(options.output)  # on any number of ranks
    if rank == 0 and resumed:
        print(f"resumed from {resumed}")
    rows = torch.tensor(list(Path(argparse.__file__).read_bytes())).split(64)[:-1]  # some text, byte by byte
    rows, held_out = rows[:-8], torch.stack(rows[-8:]).to(device)
    model.train()
    while checkpoints.global_steps < options.steps:
        first = (checkpoints.global_steps * size + rank) * 8
        batch = torch.stack([rows[i % len(rows)] for i in range(first, first + 8)]).to(device)
        model(input_ids=batch, labels=batch).loss.backward()  # the loss of this rank's subnetwork
        clip_grad_norm_(model, 1.0)  # the norm of the averaged gradient of the dense model
        optimizer.step()
        optimizer.zero_grad()
    checkpoints.save_checkpoint(options.output)
    model.eval()
    with torch.no_grad():  # all ranks together, the dense model
        loss = model(input_ids=held_out, labels=held_out).loss
    if rank == 0:
        print(f"loss of the dense model: {loss.item():.4f}")
    save_pretrained(model, options.output / "hf")  # all ranks; rank 0 writes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
