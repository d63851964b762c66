"""A hand-written GPT in a DeepSpeed loop: `deepspeed --num_gpus 4 launch/examples/with_own_model.py runs/own_model`.

`trace` gives an example of the model's inputs, on which its residual branches, heads and neurons are found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import sdp_deepspeed


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.output = num_heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.output(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 64, num_layers: int = 4, num_heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(self.layers(self.tokens(x) + self.positions.weight[: x.shape[1]])))
        return logits, functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "subnetwork_data_parallel": {"coverage": [{"coverage": 0.5, "whole_ends": 1}], "strategy": "neuron"},  # the block
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher")
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT()
    sdp_deepspeed.trace(model, torch.zeros(2, 8, dtype=torch.long))
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
        _, loss = engine(batch)  # of this rank's subnetwork
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(options.output))
    engine.eval()
    with torch.no_grad():  # the dense model
        _, loss = engine(held_out)
    if rank == 0:
        print(f"loss of the dense model: {loss.item():.4f}")
    engine.save_pretrained(options.output / "hf")  # all ranks; rank 0 writes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
