"""The dense model of a sharded model: state dict, export, batch norms."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.batch_norm import estimate_on_all_ranks, tracking_norms
from sdp_deepspeed.checkpoint import hf_folder
from sdp_deepspeed.checkpoint.atomic_folder import output_folder
from sdp_deepspeed.checkpoint.export_and_import import dense_state_dict
from sdp_deepspeed.checkpoint.random_state import unchanged_random_state
from sdp_deepspeed.fsdp.checkpoint_manager import state_of
from sdp_deepspeed.fsdp.sharded_model import sharded_model_of
from sdp_deepspeed.parallel.boxes import local_of
from sdp_deepspeed.parallel.consistency import run_on_all_ranks

logger = logging.getLogger("sdp_deepspeed")


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the dense state dict on rank 0, in host memory; other ranks get an empty dict. Collective.

    Shared buffers and `ignored_params` are those of rank 0, except running statistics of batch norms, which are
    averaged.

    Args:
        module: a model that `fully_shard` returned.

    Raises:
        RuntimeError: on all ranks, if rank 0 runs out of memory; on the waiting ranks, if a rank does not call it.
    """
    sharded = sharded_model_of(module)
    sharded.begin_evaluation("full_state_dict")
    values = dense_state_dict(state_of(sharded), sharded.device)
    buffers = sharded.dense.current_buffers()
    if dist.get_rank() != 0:
        return {}
    # Tied weights stay one tensor.
    state: dict[str, torch.Tensor] = {}
    for key, name in sharded.state_names.items():
        state[key] = values[name] if name in values else local_of(buffers[name]).cpu()
    return state


def save_pretrained(module: nn.Module, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
    """Export the dense model in Hugging Face format. Collective; rank 0 writes.

    Args:
        module: a model that `fully_shard` returned. Without `save_pretrained`, its state dict is written.
        folder: output folder. An older export in it is replaced: at any moment its weights are complete or absent.
        options: passed to the model's `save_pretrained`, such as `max_shard_size`.

    Raises:
        RuntimeError, ValueError: on all ranks, if rank 0 cannot write, or there is no folder.
    """
    state = full_state_dict(module)
    sharded = sharded_model_of(module)

    def write() -> None:
        if dist.get_rank() == 0:
            model: Any = sharded.dense.module  # of the original class, which the config names
            to = output_folder(folder, "folder")
            save = partial(hf_folder.save_pretrained, model, to, tokenizer, **options)
            of_model = getattr(model, "save_pretrained", None)
            try:
                if of_model is None or "state_dict" in signature(of_model).parameters:
                    save(state_dict=state)
                else:
                    with sharded.dense.holding(state):
                        save()
            except Exception as error:
                raise RuntimeError(f"save_pretrained: cannot write {folder}: {error}") from error

    run_on_all_ranks(write, sharded.groups.control)


def reestimate_batch_norm(module: nn.Module, batches: Iterable[Any], *, num_batches: int) -> int:
    """See `sdp_deepspeed.reestimate_batch_norm`."""
    sharded = sharded_model_of(module)
    copied = sharded.dense.module
    if not (norms := tracking_norms(copied)):
        return 0
    with unchanged_random_state():  # batches and models may draw random numbers
        was_training = module.training
        module.training = False
        sharded.begin_evaluation("reestimate_batch_norm")
        try:
            with sharded.dense.estimating():
                estimate_on_all_ranks(copied, batches, num_batches, sharded.groups, run=module)
                sharded.dense.return_buffers()
        finally:
            module.training = was_training
    return len(norms)
