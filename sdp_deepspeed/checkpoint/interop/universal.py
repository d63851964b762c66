"""Start from DeepSpeed's universal format: a folder `zero/<name>/` with fp32 weights, moments and steps of each tensor.

Read are deepspeed/checkpoint/ds_to_universal.py (which writes it) and universal_checkpoint.py (which loads it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdp_deepspeed.checkpoint.interop.name_matching import Match, Names, refuse_others
from sdp_deepspeed.checkpoint.interop.safe_pickles import read_known
from sdp_deepspeed.checkpoint.interop.whole_tensors import Part, Slices, Stored, WholeTensorsReader
from sdp_deepspeed.checkpoint.state.rank_chunks import WEIGHT
from sdp_deepspeed.messages import quoted

ZERO, FP32, STEP, PARAM, VOCABULARY = "zero", "fp32", "step", "param", "vocab_tensor"
_OPTIMIZER = "optimizer_state.pt"
# Of the options of a param group, those that are numbers of the method, not switches of one implementation.
_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


def is_universal(path: Path) -> bool:
    """Whether a tag's folder is in this format."""
    return (path / ZERO).is_dir()


class UniversalReader(WholeTensorsReader):
    """Weights in fp32 and moments.

    Args:
        path: of the tag.
        names: of the model that they are for.
        shapes: of its dense tensors: vocabularies are stored without padding, and are padded with zeros to these.

    Attributes:
        match: what is what.

    Raises:
        ValueError: files are missing or damaged, or could run foreign code.
    """

    def __init__(self, path: Path, names: Names, shapes: Mapping[str, tuple[int, ...]]) -> None:
        folders = {folder.name: folder for folder in (path / ZERO).iterdir() if folder.is_dir()}
        self.match: Match = names.match(folders.keys())
        self._path = path
        self._flat_shapes: Mapping[str, tuple[int, ...]] | None = None
        tensors: dict[str, Stored] = {}
        for dense, name in self.match.found.items():
            if not (folders[name] / f"{FP32}.pt").is_file():
                raise ValueError(f"{folders[name] / f'{FP32}.pt'} is missing; convert the checkpoint again")
            for file in sorted(folders[name].glob("*.pt")):
                if file.stem != STEP:
                    kind = WEIGHT if file.stem == FP32 else file.stem
                    tensors[f"{kind}/{dense}"] = self._stored(file, name, shapes.get(dense))
        super().__init__(tensors)

    def _stored(self, file: Path, name: str, wanted: tuple[int, ...] | None) -> Stored:
        content = read_known(file)
        tensor = _tensor(file, content)
        shape = tuple(tensor.shape) if isinstance(content, dict) else self._shape_of_flat(name, tensor)
        if isinstance(content, dict) and content.get(VOCABULARY) and wanted and wanted[0] > shape[0]:
            shape = (wanted[0], *shape[1:])
        return Stored(file, name, shape, tensor.dtype)

    def _shape_of_flat(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """ZeRO-3 without tensor parallelism leaves tensors flat; their shapes are in the model's file."""
        if self._flat_shapes is None:
            groups = ModelStates.read(self._path).shapes
            self._flat_shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        shape = self._flat_shapes.get(name)
        if shape is None or torch.Size(shape).numel() != tensor.numel():
            raise ValueError(
                f"{self._path}: {name!r} has {tensor.numel()} elements and no shape that fits; it is damaged"
            )
        return shape

    @contextmanager
    def open(self, file: Path) -> Iterator[Part]:
        tensor = _tensor(file, read_known(file))
        yield lambda stored, slices: _part(tensor, stored.shape, slices)

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
        found = _optimizer(self._path).get("optimizer_state_dict", {}).get("state", {})
        groups = ModelStates.read(self._path).shapes
        index = next((index for index, group in enumerate(groups) if name in group), None)
        if index is None or STEP not in found.get(index, {}):
            raise ValueError(
                f"{self._path}: it has moments of {name!r}, but not the number of steps that they stand for; load it "
                "with load_optimizer_states=False"
            )
        return float(found[index][STEP])


def _tensor(file: Path, content: Any) -> torch.Tensor:
    tensor = content.get(PARAM) if isinstance(content, dict) else content
    if not torch.is_tensor(tensor):
        raise ValueError(f"{file} is damaged: it holds no tensor")
    return tensor


def _part(tensor: torch.Tensor, shape: tuple[int, ...], slices: Slices) -> torch.Tensor:
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


def facts(reader: UniversalReader, path: Path, options: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What `load_tensors` wants to know of the optimizer that wrote it; None if there are no moments.

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
        options = [own | {key: group[key] for key in _OPTIONS if key in group} for own, group in pairs]
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
        counters = {
            name: int(content[name]) for name in ("global_steps", "global_samples", "skipped_steps") if name in content
        }
        rest = {key: value for key, value in content.items() if key not in _OWN_KEYS}
        return cls(list(content.get("param_shapes") or []), counters, content.get("lr_scheduler"), rest)


def check_model(reader: UniversalReader, path: Path, *, strict: bool) -> None:
    """ValueError if it is of another model."""
    if strict:
        refuse_others(reader.match, f"load_checkpoint: {path}")
    elif not reader.match.found:
        raise ValueError(f"load_checkpoint: {path} has nothing of this model, but {quoted(reader.match.unknown)}")
