"""A plain DeepSpeed loop: `deepspeed --num_gpus 4 launch/examples/with_deepspeed.py runs/deepspeed`.

`torchrun` works as well. Without `Init` and the block it is an ordinary script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "subnetwork_data_parallel": {"coverage": [{"coverage": 0.5, "whole_ends": 1}]},  # the block
}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher")
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with sdp_deepspeed.Init():  # weights of this rank only, with output projections that start smaller
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE))
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    rank, size = dist.get_rank(), dist.get_world_size()
    resumed, _ = engine.load_checkpoint(str(options.output))
    if rank == 0 and resumed:
        print(f"resumed from {resumed}")
    rows = torch.tensor(list(Path(argparse.__file__).read_bytes())).split(64)[:-1]  # some text, byte by byte
    rows, held_out = rows[:-8], torch.stack(rows[-8:]).to(engine.device)
    while engine.global_steps < options.steps:
        first = (engine.global_steps * size + rank) * 8
        batch = torch.stack([rows[i % len(rows)] for i in range(first, first + 8)]).to(engine.device)
        engine.backward(engine(input_ids=batch, labels=batch).loss)  # the loss of this rank's subnetwork
        engine.step()
    engine.save_checkpoint(str(options.output))
    engine.eval()
    with torch.no_grad():  # the dense model
        loss = engine(input_ids=held_out, labels=held_out).loss
    if rank == 0:
        print(f"loss of the dense model: {loss.item():.4f}")
    engine.save_pretrained(options.output / "hf")  # all ranks; rank 0 writes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
