"""Convert DeepSpeed's ZeRO checkpoints (stages 1 to 3, Adam) to ours, in one process.

A rank's file has flat fp32 weights and moments of its share of each param group (in stage 3, of each sub-group). The
fragments of a tensor in ascending order of ranks are its elements in row-major order. Requires DeepSpeed, for the
classes in its pickles.
"""

from __future__ import annotations

import math
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from sdp_deepspeed.checkpoint import atomic_folder, files
from sdp_deepspeed.checkpoint.planners import SavePlanner, State, add_box
from sdp_deepspeed.checkpoint.rank_state import WEIGHT
from sdp_deepspeed.checkpoint.save_and_load import COMMON, COUNTERS, add_bytes, plain_bytes
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.boxes import row_major_boxes

_OPTIMIZERS, _MODELS = "*zero_pp_rank_*_optim_states.pt", "*mp_rank_00_model_states.pt"
_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), "step"
_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay")  # no options of an implementation
# Keys of DeepSpeed's engine in the model file; other keys are client state.
_OF_DEEPSPEED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info"),
    *("folding", "expert_parallel"),
}


def convert(source: Path, out: Path, *, tag: str | None = None) -> Path:
    """Convert a ZeRO checkpoint to `out / tag`, atomically.

    Args:
        source: folder of a checkpoint, or its parent with a file `latest`.
        out: a new folder.

    Raises:
        ValueError: `source` is not a ZeRO checkpoint with Adam, is incomplete or damaged, or could execute code; `out`
            exists.
    """
    folder = source if tag is None and any(source.glob(_OPTIMIZERS)) else source / (tag or _latest(source))
    optimizer_files, model_files = (sorted(folder.glob(pattern), key=_rank) for pattern in (_OPTIMIZERS, _MODELS))
    if not optimizer_files or not model_files:
        raise ValueError(f"{folder} has no files {_OPTIMIZERS} and {_MODELS}; pass the folder of a ZeRO checkpoint")
    if others := [file.name for file in optimizer_files if "mp_rank_00" not in file.name]:
        raise ValueError(f"{folder} has {quoted(others)}; runs with tensor or pipeline parallelism are not converted")
    try:
        models = [_read(file) for file in model_files]
        optimizers = [_read(file)["optimizer_state_dict"] for file in optimizer_files]
        state = _weights_and_moments(models, optimizers)
        facts = _facts(models[0], optimizers[0])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{folder} is incomplete or damaged, or of another version of DeepSpeed: {error!r}") from None
    add_bytes(state, COMMON, plain_bytes(facts))
    with atomic_folder.new_folder(out) as written:
        writer = files.Writer(atomic_folder.create_unfinished(written, folder.name))
        with warnings.catch_warnings(action="ignore"):  # that there is only one process
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), no_dist=True)
        atomic_folder.publish(written, folder.name, writer.checksums, latest=True, keep_last=None)
    return out / folder.name


def _latest(source: Path) -> str:
    try:
        return (source / atomic_folder.LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        raise ValueError(
            f"{source} has no ZeRO checkpoint and no file {atomic_folder.LATEST}; pass its folder"
        ) from None


def _rank(file: Path) -> int:
    number = re.search(r"pp_rank_(\d+)", file.name)
    return int(number[1]) if number else 0


def _member(kind: Any, name: str) -> ZeroStageEnum:
    """Replacement of `getattr`, with which Python 3.11.0 to 3.11.3 pickle enum members."""
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"getattr of {kind!r} and {name!r}")
    return ZeroStageEnum[name]


_KNOWN: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, SubparamShape]


def _read(file: Path) -> dict[str, Any]:
    """Load a file with memory-mapped tensors.

    Raises:
        ValueError: the file is damaged, or contains objects that could execute code.
    """
    try:
        with torch.serialization.safe_globals([*_KNOWN, (_member, "builtins.getattr")]):
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(f"{file} was not loaded: {name[1] if name else 'it'} could run code") from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {str(error).splitlines()[0]}") from None
    return content


def _base(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """State dict of the wrapped optimizer, which steps flat tensors."""
    base: dict[str, Any] = optimizer["optimizer_state_dict" if _is_stage_3(optimizer) else "base_optimizer_state"]
    return base


def _is_stage_3(optimizer: Mapping[str, Any]) -> bool:
    return "fp32_flat_groups" in optimizer


def _weights_and_moments(models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]) -> State:
    """Boxes of all tensors.

    Args:
        models: content of the model files: one, or in stage 3 one of each rank.
    """
    state: State = {}
    first_model = models[0]
    is_stage_3 = _is_stage_3(optimizers[0])
    frozen = (first_model["frozen_param_shapes"] or {}) if is_stage_3 else {}
    shapes = {name: shape for group in (*first_model["param_shapes"], frozen) for name, shape in group.items()}
    ends = dict.fromkeys(shapes, 0)  # number of elements of each tensor so far

    def add(name: str, flat: Mapping[str, torch.Tensor], first: int, count: int) -> None:
        start, ends[name] = ends[name], ends[name] + count
        for offsets, sizes in row_major_boxes(shapes[name], start, start + count):
            last = first + math.prod(sizes)
            for kind, values in flat.items():
                add_box(state, f"{kind}/{name}", shapes[name], offsets, values[first:last].view(sizes))
            first = last

    for rank, optimizer in enumerate(optimizers):
        weights = optimizer["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
        for index, moments in _base(optimizer)["state"].items():
            if not moments.keys() >= {*_MOMENTS}:
                raise ValueError(f"expected the state of Adam, got {quoted(sorted(moments))}; use zero_to_fp32.py")
            flat = {WEIGHT: weights[index], **{kind: moments[kind] for kind in _MOMENTS}}
            if is_stage_3:
                fragments = _fragments(first_model["param_shapes"][index], rank, optimizer["partition_count"])
            else:
                fragments = optimizer["param_slice_mappings"][index]
            for name, fragment in fragments.items():
                add(name, flat, fragment.start, fragment.numel)
    for model in models if frozen else ():
        for name, values in model["frozen_param_fragments"].items():
            add(name, {WEIGHT: values.view(-1)}, 0, min(values.numel(), shapes[name].numel() - ends[name]))
    for name, tensor in first_model["module"].items():  # buffers; frozen parameters in stages 1 and 2
        if name not in shapes and name not in (first_model["shared_params"] or {}):
            add_box(state, f"{WEIGHT}/{name}", tensor.shape, [0] * tensor.dim(), tensor)
    if short := [name for name, end in ends.items() if end != shapes[name].numel()]:
        raise ValueError(f"{quoted(short)}: elements are missing; copy the files of all ranks")
    return state


def _fragments(shapes: Mapping[str, torch.Size], rank: int, size: int) -> dict[str, fragment_address]:
    """Where a rank's elements of each tensor are in its flat sub-group of stage 3, as stages 1 and 2 record it."""
    result, first = {}, 0
    for name, shape in shapes.items():
        share = -(-shape.numel() // size)
        result[name] = fragment_address(max(0, min(share, shape.numel() - rank * share)), first)
        first += share
    return result


def _facts(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """What our checkpoints contain besides tensors; see `save_and_load.py`."""
    base, tensors = _base(optimizer), model["module"]
    groups = base["param_groups"]
    number_of = {index: number for number, group in enumerate(groups) for index in group["params"]}
    scalars: list[dict[str, float]] = [{} for _ in groups]
    for index, state in base["state"].items():
        scalars[number_of[index]] = {_STEP: float(state.get(_STEP, 0))}
    return {
        "optimizer": {
            "kind": "Adam",
            "groups": {name: number_of[i] for i, names in enumerate(model["param_shapes"]) for name in names},
            "options": [{key: group[key] for key in _OPTIONS if key in group} for group in groups],
            "scalars": scalars,
        },
        "layout": {},
        "ranks": model["dp_world_size"],
        "plan": "",
        "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        "model": {},
        "tied": dict(model["shared_params"] or {}),
        "common": {
            "counters": {name: int(model[name]) for name in COUNTERS},
            "lr_scheduler": model["lr_scheduler"],
            "loss_scaler": {},
            "client_state": {key: value for key, value in model.items() if key not in _OF_DEEPSPEED},
        },
    }
