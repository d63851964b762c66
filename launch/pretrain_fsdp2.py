"""Pre-train a causal language model with FSDP2 and subnetwork data parallelism, in a loop like torchtitan's.

    torchrun --nproc-per-node 4 launch/pretrain_fsdp2.py configs/recipes/quickstart_fsdp2.yaml
    torchrun --nproc-per-node 4 launch/pretrain_fsdp2.py configs/recipes/quickstart_fsdp2.yaml sdp=off    # C = 1

DeepSpeed is not needed. The same command resumes a stopped run, and exports a finished one again. Output is written to
`training.output_dir`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import get_scheduler, set_seed

import sdp_deepspeed
from callbacks import StopSignal
from data import Data, collate
from output_folder import hold
from pretrain import build_model, prepare
from recipe import fail, read_recipe, section_of
from sdp_deepspeed.config import KEY
from sdp_deepspeed.fsdp import CheckpointManager, clip_grad_norm_, param_groups, save_pretrained, sharded_model_of


@dataclass
class Training:
    """The section `training`: the subset of the Trainer's arguments that this loop supports."""

    output_dir: str
    max_steps: int
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    bf16: bool = False
    logging_steps: int = 10
    eval_steps: int = 500
    save_steps: int = 500
    report_to: list[str] = field(default_factory=list)
    seed: int = 42


def batches(blocks: Dataset, args: Training, step: int, ranks: Accelerator) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's micro-batches from a step on, forever. A step has the same blocks on any number of ranks."""
    shape = (args.gradient_accumulation_steps, ranks.num_processes, args.per_device_train_batch_size)
    steps = len(blocks) // math.prod(shape)  # of an epoch
    if steps == 0:
        fail(f"data: {len(blocks)} blocks, but a step needs {math.prod(shape)}; use more text or smaller batches")
    first, skipped = divmod(step, steps)
    for epoch in count(first):
        order = np.random.default_rng((args.seed, epoch)).permutation(len(blocks))[: steps * math.prod(shape)]
        for chosen in order.reshape(steps, *shape)[skipped:, :, ranks.process_index].reshape(-1, shape[-1]).tolist():
            yield {name: tensor.to(ranks.device) for name, tensor in collate([blocks[i] for i in chosen]).items()}
        skipped = 0


def train_step(model: Any, micro_batches: Iterator[Any], optimizer: Any, args: Training) -> list[torch.Tensor]:
    """Run one optimizer step. Returns the loss of this rank's subnetwork and the gradient norm of the dense model."""
    losses = []
    for _ in range(args.gradient_accumulation_steps):
        losses.append(model(**next(micro_batches)).loss / args.gradient_accumulation_steps)
        losses[-1].backward()
    norm = clip_grad_norm_(model, args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return [torch.stack(losses).detach().sum(), norm]


@torch.no_grad()
def evaluate(model: Any, blocks: list[dict[str, list[int]]], size: int, ranks: Accelerator) -> float:
    """Loss of the dense model over all ranks. In evaluation mode, forward passes are collective."""
    model.eval()
    sums = torch.zeros(2, device=ranks.device)
    for start in range(0, len(blocks), size * ranks.num_processes):
        mine = blocks[start:][ranks.process_index * size :][:size]
        inputs = {name: tensor.to(ranks.device) for name, tensor in collate(mine or blocks[:1]).items()}
        sums += torch.stack([model(**inputs).loss.float(), sums.new_ones(())]) * len(mine)
    model.train()
    return float(torch.div(*ranks.reduce(sums)))


def main() -> None:
    recipe = read_recipe(str(__doc__), ("model", "data", "training", KEY))
    args, data = section_of(Training, recipe.training, "training"), section_of(Data, recipe.data, "data")
    folder = Path(args.output_dir)
    if recipe.prepare_only:
        prepare(data, args.seed, folder)
        return
    # Accelerate starts the process group and the trackers; the model is not prepared by it.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), log_with=args.report_to or None, project_dir=folder)
    hold(folder)
    accelerator.init_trackers("pretrain_fsdp2")
    with accelerator.main_process_first():
        blocks = prepare(data, args.seed, folder)
    set_seed(args.seed)
    with sdp_deepspeed.Init():  # no rank holds the whole model
        model: Any = build_model(recipe, blocks, data)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    block = recipe.block if recipe.block.get("enabled", True) else {"coverage": 1.0, "granularity": "layer"}
    sharded = sharded_model_of(sdp_deepspeed.fully_shard(model, None, block, mp_policy=policy))
    optimizer = torch.optim.AdamW(param_groups(model), args.learning_rate, (0.9, 0.95), weight_decay=args.weight_decay)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps)
    checkpoints = CheckpointManager(model, optimizer, scheduler)
    checkpoints.load_checkpoint(folder / "checkpoints")  # the newest, if there is one
    step, stop = checkpoints.global_steps, StopSignal(accelerator.device)
    if step >= args.max_steps:
        accelerator.print(f"the run had finished at step {step}; exporting the same model again")

    def log(**values: Any) -> None:
        accelerator.log(values, step)
        if accelerator.is_main_process:
            print(json.dumps({"step": step} | values), flush=True)

    name = "subnetwork_loss" if sharded.plan.trains_subnetworks else "loss"
    micro_batches, steps = batches(blocks.train, args, step, accelerator), range(step + 1, args.max_steps + 1)
    for step in tqdm(steps, disable=not accelerator.is_main_process or None):
        loss, norm = train_step(model, micro_batches, optimizer, args)
        scheduler.step()
        if step % args.logging_steps == 0:
            values = {name: accelerator.reduce(loss, "mean").item(), "learning_rate": scheduler.get_last_lr()[0]}
            log(**values, grad_norm=norm.item(), coverage=sharded.coverage)
        stopped, is_last = stop.on_any_rank(), step == args.max_steps
        if (step % args.eval_steps == 0 and not stopped) or is_last:
            log(eval_loss=evaluate(model, blocks.validation, args.per_device_train_batch_size, accelerator))
        if step % args.save_steps == 0 or is_last or stopped:
            checkpoints.save_checkpoint(folder / "checkpoints")
        if stopped:
            break
    if step >= args.max_steps:
        save_pretrained(model, folder / "hf", blocks.tokenizer)
    else:
        accelerator.print(f"stopped after step {step}; the same command resumes the run")
    checkpoints.wait_for_checkpoint()
    accelerator.end_training()


if __name__ == "__main__":
    main()
