"""What asks for each row of FSDP2's support table, and how to start it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import sdp_deepspeed
from sdp_deepspeed.config import KEY
from sdp_deepspeed.fsdp import param_groups
from sdp_deepspeed.support.fsdp2 import FSDP2_TABLE
from sdp_deepspeed.support.rows import Row
from tests.helpers.models import batches, llama, loss_of
from tests.helpers.support_examples import BESIDE

OF_A_UNIT = "model.layers.0.mlp.up_proj.weight"
REFUSED = [row for row in FSDP2_TABLE if row.state == "refused"]
WORKS = [row for row in FSDP2_TABLE if row.state == "works"]


@dataclass(frozen=True)
class Example:
    """A start of FSDP2's host on two ranks.

    Args:
        build: the model.
        options: of `fully_shard`, given the model.
        around: entered for each forward pass.
        block: beside a number of holders.
    """

    build: Callable[[], nn.Module] = llama
    options: Callable[[Any], dict[str, Any]] = lambda model: {}
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    block: Mapping[str, Any] = field(default_factory=dict)


def _policy(dtype: torch.dtype) -> Example:
    return Example(options=lambda model: {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)})


def _mesh(*shape: int) -> Example:
    return Example(options=lambda model: {"mesh": init_device_mesh("cpu", shape)})


def _parallelized() -> nn.Module:
    model: Any = llama()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model.model.layers[0].mlp, mesh, {"up_proj": ColwiseParallel()})
    return model


def _parallelized_without_storage() -> nn.Module:
    with torch.device("meta"):
        return _parallelized()


def _with_a_scalar() -> nn.Module:
    model = llama()
    model.scale = nn.Parameter(torch.ones(()))
    return model


_FP16 = _policy(torch.float16)
# By a row's name; the block's rows have their example in the table.
_EXAMPLES: Mapping[str, Example] = {
    "fp16, dynamic loss scale": _FP16,
    "fp16, static loss scale": _FP16,
    "torch autocast in bf16": Example(around=lambda: torch.autocast("cpu", torch.bfloat16)),
    "weights resharded over fewer ranks after the forward pass": Example(
        options=lambda model: {"reshard_after_forward": 2}
    ),
    "ignored parameters, of units": Example(options=lambda model: {"ignored_params": [model.get_parameter(OF_A_UNIT)]}),
    "a mesh of several axes (HSDP, sequence or expert parallelism)": _mesh(2, 1),
    "a mesh of some of the ranks (pipeline stages)": Example(
        options=lambda model: {"mesh": DeviceMesh("cpu", [dist.get_rank()])}
    ),
    "tensor parallelism of neurons and heads": Example(_parallelized, block={"strategy": "neuron"}),
    "tensor parallelism of a model without storage": Example(_parallelized_without_storage),
    "parameters without a dim": Example(_with_a_scalar),
}
_OPTIONS = "ranks/fsdp/test_options.py"
_REFERENCE = "ranks/fsdp/test_shard.py", "agrees_with_the_reference"
# What works and is started already: the file and the check in it.
ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "forward regime": _REFERENCE,
    "block strategy": _REFERENCE,
    "coverage over depth and by name": _REFERENCE,
    "one subnetwork for each data-parallel rank": _REFERENCE,
    "replicas of subnetworks": _REFERENCE,
    "ZeRO stage 3": _REFERENCE,
    "fp32": _REFERENCE,
    "gradient accumulation by the caller": _REFERENCE,
    "optimizers of single elements": _REFERENCE,
    "scaled dense branches, forward regime": ("ranks/fsdp/test_shard.py", "agrees_with_the_deepspeed_host"),
    "neuron strategy": ("ranks/fsdp/test_neuron.py", "agrees_with_the_reference"),
    "bf16": (_OPTIONS, "mixed_precision"),
    "tensor parallelism (`parallelize_module` first)": (
        "ranks/fsdp/test_tensor_parallel.py",
        "agrees_with_the_reference",
    ),
    "dtype of gradients on the wire": (_OPTIONS, "mixed_precision"),
    "weights that stay gathered after the forward pass": (_OPTIONS, "stays_gathered"),
    "offload of parameters": (_OPTIONS, "offloaded"),
    "optimizer in host memory, stages 1 and 2": (_OPTIONS, "offloaded"),
    "ignored parameters, of what is shared": (_OPTIONS, "leaves_out_what_is_ignored"),
    "clipping by the dense gradient's norm": (_OPTIONS, "steps_with_multi_tensor_kernels"),
    "activation checkpointing (Transformers', DeepSpeed's)": (_OPTIONS, "checkpointed"),
    "torch.compile of the model, its layers, or by engine.compile()": (_OPTIONS, "compiled"),
    "model without storage (`sdp_deepspeed.Init`, or the meta device)": (_OPTIONS, "starts_on_the_meta_device"),
    "synchronized batch norm (`SyncBatchNorm`), over the holders of a unit": (
        "ranks/masking/test_synchronized.py",
        "with_fsdp2",
    ),
    "checkpoints that the other host resumes": ("ranks/fsdp/test_checkpoints.py", "deepspeed_goes_on"),
    "checkpoints in the background": ("ranks/fsdp/test_checkpoints.py", "in_the_background_and_pruned"),
}


def example_of(row: Row) -> Example:
    """How to ask for a row."""
    if not row.path.startswith(f"{KEY}."):
        return _EXAMPLES[row.what]
    beside = BESIDE.get(row.what, {}).get(KEY, {})
    return Example(block={**beside, row.path.removeprefix(f"{KEY}."): row.example})


def start(row: Row) -> Any:
    """The sharded model; each unit is on one of the ranks."""
    example = example_of(row)
    model = example.build()
    options = {"mesh": None} | example.options(model)
    return sdp_deepspeed.fully_shard(model, block={"holders": 1, **example.block}, **options)


def train(row: Row, model: Any) -> list[float]:
    """Losses of two steps, and of an evaluation."""
    example = example_of(row)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    losses = []
    for step, _ in zip(batches(dist.get_world_size(), 1), range(2), strict=False):
        with example.around():
            loss = loss_of(model, step[dist.get_rank()][0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, loss_of(model.eval(), step[0][0]).item()]
