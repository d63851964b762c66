"""Start from DeepSpeed's universal format: a folder `zero/<name>/` with fp32 weights, moments and steps of each tensor.

Read are deepspeed/checkpoint/ds_to_universal.py (which writes it) and universal_checkpoint.py (which loads it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sdp_deepspeed.checkpoint.interop.name_matching import Match, NameMap, refuse_others
from sdp_deepspeed.checkpoint.interop.safe_pickles import read_known
from sdp_deepspeed.checkpoint.interop.whole_tensors import SliceReader, Slices, WholeTensor, WholeTensorsReader
from sdp_deepspeed.checkpoint.state.snapshot import COUNTERS
from sdp_deepspeed.checkpoint.storage.names import WEIGHT
from sdp_deepspeed.messages import quoted

ZERO, FP32, STEP, PARAM, VOCABULARY = "zero", "fp32", "step", "param", "vocab_tensor"
LATEST_UNIVERSAL, _OPTIMIZER = "latest_universal", "optimizer_state.pt"
# Of the options of a param group, those that are numbers of the method, not switches of one implementation.
_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


def is_universal(path: Path) -> bool:
    """Whether a tag's folder is in this format."""
    return (path / ZERO).is_dir()


class UniversalReader(WholeTensorsReader):
    """Weights in fp32 and moments.

    Args:
        path: of the tag.
        tensors: by our key.
        match: what is what.
    """

    def __init__(self, path: Path, tensors: Mapping[str, WholeTensor], match: Match) -> None:
        super().__init__(tensors)
        self.match = match
        self._path = path

    @classmethod
    def of_folder(cls, path: Path, names: NameMap, shapes: Mapping[str, tuple[int, ...]]) -> UniversalReader:
        """Look at all files of a tag.

        Args:
            names: of the model that they are for.
            shapes: of its dense tensors: vocabularies are stored without padding, and are padded with zeros to these.

        Raises:
            ValueError: files are missing or damaged, or could run foreign code.
        """
        folders = {folder.name: folder for folder in (path / ZERO).iterdir() if folder.is_dir()}
        match, flat_shapes = names.match(folders.keys()), _FlatShapes(path)
        tensors: dict[str, WholeTensor] = {}
        for dense, name in match.found.items():
            if not (folders[name] / f"{FP32}.pt").is_file():
                raise ValueError(f"{folders[name] / f'{FP32}.pt'} is missing; convert the checkpoint again")
            for file in sorted(folders[name].glob("*.pt")):
                if file.stem != STEP:
                    kind = WEIGHT if file.stem == FP32 else file.stem
                    tensors[f"{kind}/{dense}"] = _whole_tensor(file, name, shapes.get(dense), flat_shapes)
        return cls(path, tensors, match)

    @contextmanager
    def open(self, file: Path) -> Iterator[SliceReader]:
        tensor = _tensor(file, read_known(file))
        yield lambda whole, slices: _read_slice(tensor, whole.shape, slices)

    def moments(self) -> set[str]:
        """Kinds of moments, such as `exp_avg`."""
        return {key.partition("/")[0] for key in self.tensors} - {WEIGHT}

    def steps(self) -> dict[str, float]:
        """Steps taken, by dense name, of tensors that have moments."""
        kinds = self.moments()
        return {
            dense: self._step(name)
            for dense, name in self.match.found.items()
            if any(f"{kind}/{dense}" in self.tensors for kind in kinds)
        }

    def _step(self, name: str) -> float:
        file = self._path / ZERO / name / f"{STEP}.pt"
        if file.is_file():
            return float(read_known(file))
        states = _optimizer(self._path).get("optimizer_state_dict", {}).get("state", {})
        groups = ModelStates.read(self._path).shapes
        index = next((index for index, group in enumerate(groups) if name in group), None)
        if index is None or STEP not in states.get(index, {}):
            raise ValueError(
                f"{self._path}: it has moments of {name!r}, but not the number of steps that they stand for; load it "
                "with load_optimizer_states=False"
            )
        return float(states[index][STEP])


class _FlatShapes:
    """ZeRO-3 without tensor parallelism leaves tensors flat; their shapes are in the model's file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        groups = ModelStates.read(self._path).shapes
        return {name: tuple(shape) for group in groups for name, shape in group.items()}

    def of(self, name: str, num_elements: int) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None or torch.Size(shape).numel() != num_elements:
            raise ValueError(
                f"{self._path}: {name!r} has {num_elements} elements and no shape that fits; it is damaged"
            )
        return shape


def _whole_tensor(file: Path, name: str, wanted: tuple[int, ...] | None, flat_shapes: _FlatShapes) -> WholeTensor:
    content = read_known(file)
    tensor = _tensor(file, content)
    shape = tuple(tensor.shape) if isinstance(content, dict) else flat_shapes.of(name, tensor.numel())
    if isinstance(content, dict) and content.get(VOCABULARY) and wanted and wanted[0] > shape[0]:
        shape = (wanted[0], *shape[1:])
    return WholeTensor(file, name, shape, tensor.dtype)


def _tensor(file: Path, content: Any) -> torch.Tensor:
    tensor = content.get(PARAM) if isinstance(content, dict) else content
    if not torch.is_tensor(tensor):
        raise ValueError(f"{file} is damaged: it holds no tensor")
    return tensor


def _read_slice(tensor: torch.Tensor, shape: tuple[int, ...], slices: Slices) -> torch.Tensor:
    if not slices:
        return tensor.view(())
    if tensor.dim() != len(shape):
        tensor = tensor.view(shape)
    part = tensor[slices]
    padding = slices[0].stop - slices[0].start - part.shape[0]
    return part if not padding else torch.cat([part, part.new_zeros(padding, *part.shape[1:])])


def _optimizer(path: Path) -> Mapping[str, Any]:
    file = path / ZERO / _OPTIMIZER
    return read_known(file) if file.is_file() else {}


def optimizer_metadata(reader: UniversalReader, path: Path, options: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What `fill` wants to know of the optimizer that wrote it; None if there are no moments.

    Args:
        options: of the param groups here, which keep what the checkpoint does not say.
    """
    if not reader.moments():
        return None
    steps = reader.steps()
    counts = sorted(set(steps.values()))
    state = _optimizer(path)
    stored = state.get("param_groups") or []
    if len(stored) == len(options):
        pairs = zip(options, stored, strict=True)
        options = [here | {key: group[key] for key in _OPTIONS if key in group} for here, group in pairs]
    return {
        "groups": {name: counts.index(step) for name, step in steps.items()},
        "unknown_members": True,  # the format does not tell which parameters the options are of
        "counts": [{STEP: step} for step in counts],
        "options": options,
        "loss_scaler": _numbers(state.get("loss_scaler")),
    }


def _numbers(scaler: Any) -> dict[str, float]:
    """Of a loss scaler."""
    return {key: value for key, value in getattr(scaler, "__dict__", {}).items() if isinstance(value, (int, float))}


# What DeepSpeed's engine puts beside the client's state into the model's file.
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info"),
    *("folding", "expert_parallel"),
}


@dataclass(frozen=True)
class ModelStates:
    """What the file of a rank's model has beside its tensors.

    Args:
        shapes: of the parameters of each param group (ZeRO-3: of each sub-group), by name.
        counters: attributes of the engine.
    """

    shapes: list[Mapping[str, Any]]
    counters: Mapping[str, int]
    lr_scheduler: Any
    client_state: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ModelStates:
        """Of the first rank."""
        files = sorted(path.glob("*mp_rank_00_model_states.pt"))
        if not files:
            raise ValueError(f"{path} has no file *mp_rank_00_model_states.pt; copy the whole folder")
        content = read_known(files[0])
        if not isinstance(content, dict):
            raise ValueError(f"{files[0]} is damaged: it holds no state of a model")
        counters = {name: int(content[name]) for name in COUNTERS if name in content}
        rest = {key: value for key, value in content.items() if key not in _OWN_KEYS}
        return cls(list(content.get("param_shapes") or []), counters, content.get("lr_scheduler"), rest)


def check_model(reader: UniversalReader, path: Path, *, strict: bool) -> None:
    """ValueError if it is of another model."""
    if strict:
        refuse_others(reader.match, f"load_checkpoint: {path}")
    elif not reader.match.found:
        raise ValueError(f"load_checkpoint: {path} has nothing of this model, but {quoted(reader.match.unknown)}")
