"""torchtitan's debug Llama, by its own trainer: `torchrun --nproc-per-node 4 launch/examples/with_torchtitan.py
--hf_assets_path TOKENIZER --dataloader.dataset_path TEXT`. All of torchtitan's options follow.

    pip install --no-deps torchtitan==0.3.0    # its requirements exclude the version of datasets that is needed here
    pip install torchdata torch_checkpointing spmd_types==0.2.3 tyro einops tensorboard    # and triton, without a GPU

`parallelize` takes the place of torchtitan's function; `Optimizers` has one param group for each mesh, and the gradient
norm is `sdp_deepspeed.fsdp.clip_grad_norm_`. torchtitan sums gradients and divides losses by the tokens of all ranks;
here gradients are means over holders, so they are multiplied by the number of ranks. Validation runs the dense model,
which is also exported. Use `CrossEntropyLoss`: the chunked loss runs the head outside the model's forward pass.
torchtitan's checkpoints are refused, since a rank's state dict is partial: use `CheckpointManager`.

Run on two CPU ranks, with `scaled_dot_product_attention` in place of FlexAttention, never on a GPU. At C = 1 in fp32
losses and gradient norms of the first steps are those of torchtitan's own FSDP (`partial_dtensor`). Tensor, context and
pipeline parallelism, and `--compile.enable`, were not tried.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.llama3 import config_registry
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.train import main
from torchtitan.trainer import Trainer

import sdp_deepspeed
from sdp_deepspeed.architectures import Branch, register
from sdp_deepspeed.fsdp import clip_grad_norm_, param_groups, save_pretrained

BLOCK = {"coverage": [{"coverage": 0.5, "whole_ends": 1}]}
register(
    Llama3TransformerBlock,
    Branch("attention", norm="attention_norm", body="attention"),
    Branch("mlp", norm="ffn_norm", body="feed_forward"),
)


def parallelize(model: Any, *, training: Any, ac_config: Any, dump_folder: str, **_: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, FusedQKVLinear):  # which writes wqkv as wq, wk and wv, whole ones only
            module._state_dict_hooks.clear()
            module._load_state_dict_pre_hooks.clear()
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    dtypes = TORCH_DTYPE_MAP[training.mixed_precision_param], TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    sdp_deepspeed.fully_shard(model, block=BLOCK, mp_policy=MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False))
    model.register_forward_hook(undo_division)
    model.init_weights = partial(initialize, model)
    utils.clip_grad_norm_ = lambda parameters, max_norm, **_: clip_grad_norm_(model, max_norm)
    return model


def undo_division(_: nn.Module, inputs: Any, logits: Tensor) -> None:
    """torchtitan divides losses by the tokens of all ranks, and sums gradients. Here gradients are averaged."""
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient * dist.get_world_size())


def initialize(model: Any, **_: Any) -> None:
    """Give the model its shards of a dense one. All ranks draw with the same seed."""
    dense = model.config.build()
    dense.init_weights()
    wrapper = "_checkpoint_wrapped_module."  # of activation checkpointing
    for name, buffer in model.named_buffers():
        if buffer.numel():
            buffer.copy_(dense.get_buffer(name.replace(wrapper, "")))
    for name, shard in model.named_parameters():
        if shard.numel():  # this rank holds it
            whole = dense.get_parameter(name.replace(wrapper, ""))
            shard.copy_(distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None))


class Optimizers(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _build_param_groups(*arguments: Any) -> Any:
        groups, patterns = OptimizersContainer._build_param_groups(*arguments)
        for name, given in groups.items():
            for group in given:
                group["params"] = list(zip(group.pop("param_names"), group["params"], strict=True))
            groups[name] = param_groups(given)
        return groups, patterns


def llama3_debugmodel() -> Trainer.Config:
    config = config_registry.llama3_debugmodel_ce_loss()
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
    config.optimizer = Optimizers.Config(param_groups=config.optimizer.param_groups)
    return config


def train_and_export(trainer: Trainer) -> None:
    if trainer.config.checkpoint.enable:
        raise ValueError("--checkpoint.enable: torchtitan needs whole state dicts; use sdp_deepspeed.fsdp's")
    train(trainer)
    save_pretrained(trainer.model_parts[0], Path(trainer.config.dump_folder, "dense"))  # all ranks; rank 0 writes


if __name__ == "__main__":
    train, Trainer.train = Trainer.train, train_and_export
    sys.argv += ["--module", "__main__", "--config", "llama3_debugmodel"]
    main()
