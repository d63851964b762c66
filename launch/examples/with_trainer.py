"""Transformers' Trainer with subnetworks: `deepspeed --num_gpus 4 launch/examples/with_trainer.py runs/trainer`.

`torchrun` and `accelerate launch` work as well. Without `Init` and the block it is an ordinary script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sdp_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    # The block: half of the ranks hold each residual branch, and all hold the first and last layer.
    "subnetwork_data_parallel": {"coverage": [{"coverage": 0.5, "whole_ends": 1}]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher")
    options = parser.parse_args()
    if Path(options.output, "hf/model.safetensors").exists():
        parser.exit(message=f"{options.output}/hf is there already; to train again, choose another folder\n")
    tokens = torch.tensor(list(Path(argparse.__file__).read_bytes())).split(64)[:-1]  # some text, byte by byte
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        options.output,
        deepspeed=CONFIG,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=max(1, options.steps // 5),
        save_steps=options.steps,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    with sdp_deepspeed.Init():  # weights of this rank only, with output projections that start smaller
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    trainer = Trainer(model, arguments, train_dataset=rows[:-64], eval_dataset=rows[-64:])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]  # on all ranks; of the dense model, not of a subnetwork
    if trainer.is_world_process_zero():
        print(f"loss of the dense model: {loss:.4f}")
    trainer.save_model(f"{options.output}/hf")  # for LlamaForCausalLM.from_pretrained


if __name__ == "__main__":
    main()
