"""Load DeepSpeed's ZeRO checkpoints, with moments, through its universal format: a folder `zero/NAME/` with fp32
weights, moments and step of each tensor, written by deepspeed/checkpoint/ds_to_universal.py.

DeepSpeed's program unpickles arbitrary objects. Here only tensors, plain values and the classes of DeepSpeed's own
checkpoints are unpickled. Requires DeepSpeed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import SubparamShape, ds_to_universal
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from sdp_deepspeed.checkpoint.boxes import make_targets
from sdp_deepspeed.checkpoint.files import LATEST_UNIVERSAL, complete_tags, new_folder, tags_to_try
from sdp_deepspeed.checkpoint.hugging_face import fill_boxes, matched, whole_metadata
from sdp_deepspeed.checkpoint.optimizer_state import Facts, restore_optimizer
from sdp_deepspeed.checkpoint.rank_state import WEIGHT, RankState, persistent_buffers
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.consistency import run_on_all_ranks

logger = logging.getLogger("sdp_deepspeed")
ZERO, FP32, STEP, PARAM = "zero", "fp32", "step", "param"
_OPTIMIZERS, _MODEL = "*_optim_states.pt", "*mp_rank_00_model_states.pt"
_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay")  # no options of an implementation
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Keys of DeepSpeed's engine in the model file; other keys are client state.
_OF_DEEPSPEED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info"),
    *("folding", "expert_parallel"),
}


# ---- files that are pickles -----------------------------------------------------------------------------------------


def _member(kind: Any, name: str) -> ZeroStageEnum:
    """Replacement of `getattr`, with which Python 3.11.0 to 3.11.3 pickle enum members."""
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"getattr of {kind!r} and {name!r}")
    return ZeroStageEnum[name]


_KNOWN: list[Any] = [
    *(LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, SubparamShape, Namespace),
    (_member, "builtins.getattr"),
]


@contextmanager
def _known_classes_only() -> Iterator[None]:
    """Context in which `torch.load` executes no code, whatever its arguments."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before, os.environ[name] = os.environ.get(name), "1"
    try:
        with torch.serialization.safe_globals(_KNOWN):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _read(file: Path) -> Any:
    """Load a file with memory-mapped tensors.

    Raises:
        ValueError: the file is missing or damaged, or contains objects that could execute code.
    """
    try:
        with _known_classes_only():
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(f"{file} was not loaded: {found[1] if found else 'it'} could run code") from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged or missing: {str(error).splitlines()[0]}") from None


# ---- from ZeRO to universal -----------------------------------------------------------------------------------------


def convert(source: Path, out: Path, *, tag: str | None = None) -> Path:
    """Convert a ZeRO checkpoint to `out/TAG_universal` with DeepSpeed's own program, in one process. Writes
    `out/latest_universal`.

    Args:
        source: folder of a checkpoint, or its parent with a file `latest`.

    Raises:
        ValueError: `source` is not a ZeRO checkpoint with Adam, is damaged, or could execute code.
    """
    folder = source if tag is None and any(source.glob(_OPTIMIZERS)) else source / (tag or _latest(source))
    if not any(folder.glob(_OPTIMIZERS)):
        raise ValueError(f"{folder} has no files {_OPTIMIZERS}; pass the folder of a ZeRO checkpoint")
    for file in sorted(folder.glob("*.pt")):
        _check(file, _read(file))
    name = f"{folder.name}_universal"
    with new_folder(out / name) as written:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        # Only Megatron's models record the state that is injected here.
        arguments = Namespace(
            input_folder=str(folder), output_folder=str(written / name), inject_missing_state=True, **options
        )
        with _known_classes_only(), contextlib.redirect_stdout(sys.stderr):
            try:
                ds_to_universal.main(arguments)
            except (AssertionError, KeyError, RuntimeError, ValueError, OSError, pickle.UnpicklingError) as error:
                raise ValueError(f"{folder}: DeepSpeed cannot convert it: {error!r}") from None
        _add_rest(folder, written / name / ZERO)
        (written / LATEST_UNIVERSAL).unlink(missing_ok=True)  # DeepSpeed writes it next to the output
        for path in (written / name).iterdir():
            path.rename(written / path.name)
        (written / name).rmdir()
    (out / LATEST_UNIVERSAL).write_text(name, encoding="utf-8")
    return out / name


def _latest(source: Path) -> str:
    try:
        return (source / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        raise ValueError(
            f"{source} has no files {_OPTIMIZERS} and no latest; pass the folder of a ZeRO checkpoint"
        ) from None


def _check(file: Path, content: Any) -> None:
    """Raise ValueError for tensor names that are paths (they become folders), and optimizers other than Adam."""
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: it has no state")
    optimizer = content.get("optimizer_state_dict")
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    groups = [content.get("module") or (), content.get("frozen_param_shapes") or ()]
    groups += [*(content.get("param_shapes") or ()), *(optimizer.get("param_slice_mappings") or ())]
    if paths := [name for group in groups for name in group if os.sep in name or name.startswith(".")]:
        raise ValueError(f"{file} has tensor names that are paths: {quoted(paths)}")
    base = optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or {}
    for moments in base.get("state", {}).values() if isinstance(base, dict) else ():
        if not moments.keys() >= {"exp_avg", "exp_avg_sq"}:
            raise ValueError(
                f"{file}: DeepSpeed converts Adam's state only, got {quoted(sorted(moments))}; for weights alone use "
                "zero_to_fp32.py and load_pretrained"
            )


def _add_rest(folder: Path, zero: Path) -> None:
    """Add buffers and frozen parameters of ZeRO-3, which DeepSpeed's program leaves out."""
    found = {int(number[1]): file for file in folder.glob("*_model_states.pt") if (number := _RANK.search(file.name))}
    states = [_read(file) for _, file in sorted(found.items())]
    if not states:
        return
    tensors = {name: states[0]["module"][name] for name in states[0].get("buffer_names") or ()}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        flat = torch.cat([state["frozen_param_fragments"][name].view(-1) for state in states])
        tensors[name] = flat[: torch.Size(shape).numel()].view(shape)
    for name, tensor in tensors.items():
        (zero / name).mkdir(exist_ok=True)
        torch.save({PARAM: tensor.float()}, zero / name / f"{FP32}.pt")


_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states")


# ---- load -----------------------------------------------------------------------------------------------------------


def is_universal(path: Path) -> bool:
    """Whether a folder is a checkpoint in the universal format."""
    return (path / ZERO).is_dir() and any(path.glob(_MODEL))


def universal_tag(folder: Path, tag: str | None) -> str | None:
    """The tag to load in the universal format; None if the checkpoint is in our format.

    Args:
        folder: folder that contains all checkpoints.
        tag: name of the checkpoint. Default: the one in `latest_universal`.

    Raises:
        ValueError: `latest_universal` is invalid, or there is no checkpoint in either format.
    """
    if tag is not None:
        return tag if is_universal(folder / tag) else None
    pointer, own = folder / LATEST_UNIVERSAL, complete_tags(folder)
    if own and not pointer.is_file():
        return None
    if not pointer.is_file():
        raise ValueError(
            f"{folder} has no {LATEST_UNIVERSAL} and no checkpoint of sdp_deepspeed; run `sdp checkpoint import`, "
            "or disable checkpoint.load_universal"
        )
    named = pointer.read_text(encoding="utf-8").strip()
    if not is_universal(folder / named):
        raise ValueError(f"{pointer} names {named!r}, which is not a universal checkpoint; pass a tag")
    if own:
        logger.warning("loading %s; disable checkpoint.load_universal to load %s", folder / named, own[0])
    return named


def refuse_foreign(folder: Path, tag: str | None) -> None:
    """Raise ValueError for a checkpoint of plain DeepSpeed.

    Args:
        folder: folder that contains all checkpoints.
        tag: name of the checkpoint. Default: the one in `latest`.
    """
    name = next(iter(tags_to_try(folder)), None) if tag is None else tag
    if name is not None and any((folder / name).glob(_OPTIMIZERS)):
        raise ValueError(
            f"{folder / name} is a ZeRO checkpoint of DeepSpeed; run `sdp checkpoint import {folder} OUT --tag "
            f"{name}`, and load OUT with checkpoint.load_universal"
        )
    if name is not None and is_universal(folder / name):
        raise ValueError(f"{folder / name} is in DeepSpeed's universal format; set checkpoint.load_universal")


def load_universal(
    state: RankState, path: Path, *, optimizer_states: bool = True, strict: bool = True
) -> dict[str, Any]:
    """Load masters, weights, moments and step counts; collective. Returns the `common` state of `checkpointer.py`.

    Args:
        path: folder of a checkpoint in the universal format.
        optimizer_states: whether to load the optimizer's state, if there is one.
        strict: whether missing and unexpected tensors are errors.

    Raises:
        ValueError: on all ranks, before anything is changed, if files are missing or damaged, could execute code, or
            are of a different model.
    """

    def prepare() -> tuple[_Universal, Any, Facts | None]:
        stored = _Universal.open(path, state, strict=strict)
        facts = stored.facts(state) if optimizer_states and stored.moments else None
        metadata = whole_metadata(stored.tensors).state_dict_metadata
        return stored, make_targets(state, metadata, facts, strict=strict), facts

    def read() -> None:
        fill_boxes(targets.boxes, stored.tensors)
        if facts is not None:
            restore_optimizer(state, targets.moments, facts)

    stored, targets, facts = run_on_all_ranks(prepare, state.groups.control)
    run_on_all_ranks(read, state.groups.control)
    state.optimizer.gather_weights()
    model = stored.model
    counters = {name: int(model[name]) for name in COUNTERS if name in model}
    client_state = {key: value for key, value in model.items() if key not in _OF_DEEPSPEED}
    return {"counters": counters, "lr_scheduler": model.get("lr_scheduler"), "client_state": client_state}


@dataclass(frozen=True)
class _Universal:
    """A folder in the universal format.

    Args:
        tensors: memory-mapped, by our key.
        folders: folders of the tensors, by dense name.
        model: content of the model file.
        optimizer: content of the optimizer file; empty if there is none.
    """

    tensors: dict[str, torch.Tensor]
    folders: dict[str, Path]
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, state: RankState, *, strict: bool) -> _Universal:
        if not is_universal(path):
            raise ValueError(f"{path} is not a universal checkpoint: {ZERO} or {_MODEL} is missing")
        model = _read(min(path.glob(_MODEL)))
        optimizer = path / ZERO / "optimizer_state.pt"
        by_name = {folder.name: folder for folder in (path / ZERO).iterdir() if folder.is_dir()}
        known = {*state.mask.parameters, *persistent_buffers(state.model)}
        found, _, unknown = matched(by_name, state.model, known)
        if unknown and strict:
            raise ValueError(f"{path} is of another model: it has {quoted(unknown)}; build the model that was saved")
        folders = {name: by_name[other] for name, other in found.items()}
        result = cls({}, folders, model, _read(optimizer) if optimizer.is_file() else {})
        for name, folder in result.folders.items():
            if not (folder / f"{FP32}.pt").is_file():
                raise ValueError(f"{folder / f'{FP32}.pt'} is missing; convert the checkpoint again")
            for file in sorted(folder.glob("*.pt")):
                if file.stem != STEP:
                    key = state.key(WEIGHT if file.stem == FP32 else file.stem, name)
                    result.tensors[key] = result._tensor(file, folder.name)
        return result

    def _tensor(self, file: Path, name: str) -> torch.Tensor:
        """Load a tensor; those of ZeRO-3 are flat, with shapes in the model file."""
        content = _read(file)
        tensor = content.get(PARAM) if isinstance(content, dict) else content
        if not torch.is_tensor(tensor):
            raise ValueError(f"{file} is damaged: it has no tensor")
        if isinstance(content, dict):
            return tensor
        shape = next((group[name] for group in self.model.get("param_shapes") or () if name in group), None)
        if shape is None or torch.Size(shape).numel() != tensor.numel():
            raise ValueError(f"{file} is damaged: it has {tensor.numel()} elements and no shape that fits")
        return tensor.view(torch.Size(shape))

    @property
    def moments(self) -> set[str]:
        return {key.partition("/")[0] for key in self.tensors} - {WEIGHT}

    def facts(self, state: RankState) -> Facts:
        """Optimizer facts of Adam; with options of param groups if their number matches."""
        groups = state.optimizer.param_groups
        here = [{k: v for k, v in g.items() if k != "params"} for g in state.optimizer.optimizer.param_groups]
        stored = self.optimizer.get("param_groups") or []
        if len(stored) == len(here):
            here = [
                own | {k: group[k] for k in _OPTIONS if k in group} for own, group in zip(here, stored, strict=True)
            ]
        steps: list[set[float]] = [set() for _ in here]
        for name, group in groups.items():
            if name in self.folders and any(state.key(kind, name) in self.tensors for kind in self.moments):
                steps[group].add(self._step(self.folders[name]))
        if any(len(found) > 1 for found in steps):
            raise ValueError(f"param groups have different step counts {steps}; load without optimizer states")
        numbers = [next(iter(found), 0.0) for found in steps]
        return {"kind": "Adam", "groups": groups, "options": here, "scalars": [{STEP: n} for n in numbers]}

    def _step(self, folder: Path) -> float:
        if (folder / f"{STEP}.pt").is_file():
            return float(_read(folder / f"{STEP}.pt"))
        states = self.optimizer.get("optimizer_state_dict", {}).get("state", {})
        shapes: Iterable[Any] = self.model.get("param_shapes") or ()
        index = next((index for index, group in enumerate(shapes) if folder.name in group), None)
        if index is None or STEP not in states.get(index, {}):
            raise ValueError(f"{folder} has moments, but no step count; load without optimizer states")
        return float(states[index][STEP])
