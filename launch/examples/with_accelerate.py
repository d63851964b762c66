"""A loop with Accelerate: `accelerate launch --use_deepspeed --num_processes 4 launch/examples/with_accelerate.py hf/`.

`torchrun` and `deepspeed` work as well. Without `Init` and the block it is an ordinary script.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "subnetwork_data_parallel": {"coverage": [{"coverage": 0.5, "whole_ends": 1}]},  # the block
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="folder for the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher")
    options = parser.parse_args()
    if Path(options.output, "model.safetensors").exists():
        parser.exit(message=f"{options.output} has a model already; to train again, choose another folder\n")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    tokens = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # some text, byte by byte
    rows = TensorDataset(tokens[: len(tokens) // 64 * 64].view(-1, 64))
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    with sdp_deepspeed.Init():  # weights of this rank only, with output projections that start smaller
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8, shuffle=True))
    for (batch,) in islice(cycle(loader), options.steps):
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        loss = accelerator.gather(model(input_ids=batch, labels=batch).loss).mean()
    accelerator.print(f"loss of the dense model: {loss.item():.4f}")  # not of a subnetwork
    module = accelerator.unwrap_model(model)  # on all ranks; the main process writes the dense model
    module.save_pretrained(options.output, is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main()
