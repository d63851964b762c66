"""Folders in Hugging Face format: export of a checkpoint or a live run, and import of weights.

In files, Transformers renames some tensors and divides some differently. Exports use `save_pretrained` of a model on
the meta device, which does both; imports apply Transformers' renamings.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from sdp_deepspeed.checkpoint.box_exchange import BoxDirectory, fill
from sdp_deepspeed.checkpoint.dcp_planners import LoadPlanner, State, add_box
from sdp_deepspeed.checkpoint.files import Reader
from sdp_deepspeed.checkpoint.hf_folder import (
    UNFINISHED,
    WEIGHTS,
    WEIGHTS_INDEX,
    replaced_export,
    save_tensors,
    tied_names,
    weights_of,
)
from sdp_deepspeed.checkpoint.rank_state import WEIGHT, RankState
from sdp_deepspeed.checkpoint.saved_tensors import make_targets, written_state
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.consistency import run_on_all_ranks
from sdp_deepspeed.plan.tensors import persistent_buffers

logger = logging.getLogger("sdp_deepspeed")


# ---- out ------------------------------------------------------------------------------------------------------------


def export(
    reader: Reader,
    facts: Mapping[str, Any],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    tokenizer: Path | None = None,
) -> None:
    """Export the dense model of a checkpoint to a new folder, in one process.

    Tensors are staged in a scratch file, so that one output shard is in memory at a time.

    Args:
        dtype: dtype of floating-point weights. Default: that of the run; masters are rounded once.

    Raises:
        ValueError: `out` exists and is not an empty folder, or `tokenizer` contains no tokenizer.
    """
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= {UNFINISHED}):
        raise ValueError(f"{out} already exists; use a new folder")
    tokens = None if tokenizer is None else _tokenizer(tokenizer)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    shapes = {key.partition("/")[2]: tensor.size for key, tensor in stored.items() if key.startswith(f"{WEIGHT}/")}
    with replaced_export(out) as folder:
        tensors = _scratch_tensors(folder, shapes, _dtypes(facts["dtypes"], dtype))
        reader.read(LoadPlanner(), _whole(tensors))
        save_tensors(tensors, facts["model"], facts.get("tied", {}), folder, max_shard_size)
        if tokens is not None:
            tokens.save_pretrained(folder)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from None


def dense_state_dict(state: RankState, device: torch.device) -> dict[str, torch.Tensor]:
    """Gather the live dense model in host memory of rank 0; empty on other ranks. Collective.

    Args:
        device: device of collectives in the default group.
    """
    offered = {key: boxes for key, boxes in written_state(state).items() if key.startswith(f"{WEIGHT}/")}
    directory = BoxDirectory(offered, state.groups.control)
    live: dict[str, torch.Tensor] = {**state.mask.parameters, **state.mask.buffers}
    stored: dict[str, Any] = directory.metadata.state_dict_metadata
    shapes = {key.partition("/")[2]: tensor.size for key, tensor in stored.items()} if dist.get_rank() == 0 else {}

    allocate = partial(_room_for, shapes, {name: tensor.dtype for name, tensor in live.items()})
    tensors = run_on_all_ranks(allocate, state.groups.control)  # an allocation error is raised on all ranks
    fill(_whole(tensors), offered, directory, device)
    return tensors


def _room_for(shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtypes[name], device="cpu") for name, shape in shapes.items()}


def _dtypes(names: Mapping[str, str], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    for name, text in names.items():
        of_run: torch.dtype = getattr(torch, text)
        dtypes[name] = dtype if dtype is not None and of_run.is_floating_point else of_run
    return dtypes


def _whole(tensors: Mapping[str, torch.Tensor]) -> State:
    state: State = {}
    for name, tensor in tensors.items():
        add_box(state, f"{WEIGHT}/{name}", tensor.shape, [0] * tensor.dim(), tensor)
    return state


def _scratch_tensors(
    folder: Path, shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Tensors in unnamed temporary files, so that they need not fit into memory."""
    tensors = {}
    file = folder / "scratch"
    for name, shape in shapes.items():
        tensors[name] = torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtypes[name]).view(shape)
        file.unlink()
    return tensors


# ---- in -------------------------------------------------------------------------------------------------------------


def load_pretrained(state: RankState, folder: Path) -> None:
    """Load masters and weights from a local folder; optimizer state is unchanged. Collective; each rank reads what it
    steps.

    Raises:
        ValueError: on all ranks, before anything is changed, if files are missing, damaged, or of a different model.
    """

    def prepare() -> tuple[dict[str, torch.Tensor], State]:
        tensors = _stored_tensors(folder, state)
        boxes, _ = make_targets(state, whole_metadata(tensors).state_dict_metadata, None)
        return tensors, boxes

    tensors, targets = run_on_all_ranks(prepare, state.groups.control)
    run_on_all_ranks(lambda: fill_boxes(targets, tensors), state.groups.control)
    state.optimizer.gather_weights()


def whole_metadata(tensors: Mapping[str, torch.Tensor]) -> Metadata:
    """DCP's metadata of whole tensors by key."""
    result: dict[str, Any] = {}
    for key, tensor in tensors.items():
        chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
        result[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])
    return Metadata(result)


@torch.no_grad()
def fill_boxes(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill boxes from whole tensors by key. From memory-mapped tensors, only the boxes are read."""
    for key, boxes in state.items():
        for offsets, values in boxes.parts.items():
            values.copy_(tensors[key][tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))])


def _stored_tensors(folder: Path, state: RankState) -> dict[str, torch.Tensor]:
    """Memory-map the model's tensors, by our key."""
    model = state.model
    stored = {name: tensor for file in _weight_files(folder) for name, tensor in _mapped(file).items()}
    in_module, converted = _module_names(stored, model)
    known = {*state.mask.parameters, *persistent_buffers(model)}
    stored_of, repeated, unknown = match_names(in_module, model, known)
    if converted and known - stored_of.keys():
        raise ValueError(
            f"{folder} stores the model's {quoted(converted)} in parts; save it with save_pretrained(..., "
            "save_original_format=False)"
        )
    if unknown:
        raise ValueError(f"{folder} is of another model: it has {quoted(unknown)}; build the model that was saved")
    if dist.get_rank() == 0:
        for dense, second in repeated:
            first = stored_of[dense]
            values, again = stored[in_module[first]], stored[in_module[second]]
            if values.dtype != again.dtype or not torch.equal(values, again):
                raise ValueError(
                    f"{folder}: {first!r} and {second!r} differ, but the model ties them; build it with "
                    "tie_word_embeddings=false"
                )
    return {f"{WEIGHT}/{dense}": stored[in_module[name]] for dense, name in stored_of.items()}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not index.is_file():  # other libraries have other names, such as diffusion_pytorch_model
        files = folder.iterdir() if folder.is_dir() else ()
        names = sorted({name for name in (weights_of(path.name) for path in files) if name is not None})
        name = names[0] if len(names) == 1 else ""
        if (folder / f"{name}.safetensors").is_file():
            return [folder / f"{name}.safetensors"]
        index = folder / f"{name}.safetensors.index.json"
        if not index.is_file():
            raise ValueError(_no_weights(folder, names))
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({folder / Path(name).name for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: {error!r}") from None


def _no_weights(folder: Path, names: Sequence[str]) -> str:
    if len(names) > 1:
        return f"{folder} has several sets of weights ({', '.join(names)}); move those to load to a folder of their own"
    pickles = ", only pickles, which could run code" if any(folder.glob("*.bin")) else ""
    return f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}{pickles}; save the model with save_pretrained"


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """Memory-mapped tensors of a safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or cannot be read: {error}") from None


def _module_names(stored: Iterable[str], model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Names in files by names in the module, and names whose values Transformers converts."""
    transforms: list[Any] = []
    if hasattr(model, "base_model_prefix"):
        from transformers.conversion_mapping import get_model_conversion_mapping

        transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if not hasattr(transform, "operations")]
    converters = [transform for transform in transforms if hasattr(transform, "operations")]
    names, converted = {}, []
    for name in sorted(stored):
        if any(converter.rename_source_key(name)[1] is not None for converter in converters):
            converted.append(name)
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        names[renamed] = name
    return names, converted


def match_names(
    stored: Collection[str], model: nn.Module, known: Collection[str]
) -> tuple[dict[str, str], list[tuple[str, str]], list[str]]:
    """Match stored names with dense names: exact matches, then with or without the base model's prefix, then second
    names of tied tensors.

    Returns:
        Stored names by dense name; (dense name, stored name) of tensors that are stored twice; names that the model
        lacks.
    """
    tied = tied_names(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    stored_of: dict[str, str] = {}
    repeated: list[tuple[str, str]] = []
    unknown: list[str] = []
    for name in sorted(stored, key=lambda name: (name not in known, name)):
        spellings = [name, f"{prefix}{name}", name.removeprefix(prefix)]
        dense = next((spelling for spelling in spellings if spelling in known), None)
        tied_to = next((tied[spelling] for spelling in spellings if spelling in tied), None)
        if dense is not None and dense not in stored_of:
            stored_of[dense] = name
        elif dense is None and tied_to is not None and tied_to not in stored_of:
            stored_of[tied_to] = name
        elif dense is None and tied_to is not None:
            repeated.append((tied_to, name))
        elif not any(re.search(pattern, name) for pattern in ignored):
            unknown.append(name)
    return stored_of, repeated, unknown
