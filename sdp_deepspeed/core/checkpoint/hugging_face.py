"""Folders in Hugging Face format: the dense model of a checkpoint, or of a live run, as one; and a start from one.

Transformers calls some tensors otherwise in files than in modules, and stores some in other parts. Exports leave this
to its `save_pretrained`, of a model on the meta device; a start applies its renamings.
"""

from __future__ import annotations

import json
import mmap
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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

from sdp_deepspeed.core.checkpoint.boxes import LoadPlanner, State, add_box
from sdp_deepspeed.core.checkpoint.files import Reader, new_folder
from sdp_deepspeed.core.checkpoint.peers import Offers, fill
from sdp_deepspeed.core.checkpoint.state import WEIGHT, RankState, make_targets, persistent_buffers, written_state
from sdp_deepspeed.core.parallel.agree import run_on_all_ranks
from sdp_deepspeed.messages import quoted

WEIGHTS, WEIGHTS_INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
Facts = Mapping[str, Any]


# ---- out ------------------------------------------------------------------------------------------------------------


def model_facts(model: nn.Module) -> dict[str, Any]:
    """What makes a model of Transformers from its weights: its class, and JSON of its configs. Empty for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(model, "save_pretrained"):
        return {}
    generation: Any = getattr(model, "generation_config", None)
    return {
        "class": type(model).__name__,
        "config": config.to_json_string(use_diff=False),
        "generation_config": generation.to_json_string() if hasattr(generation, "to_json_string") else None,
    }


def export(
    reader: Reader,
    facts: Facts,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    tokenizer: Path | None = None,
) -> None:
    """Write the dense model of a checkpoint to a new folder, complete or not at all. One process; tensors wait in a
    scratch file there, so that memory has one shard of the output at a time.

    Args:
        facts: of the checkpoint (manager.py).
        dtype: of floating-point weights. Default: those of the run; masters are rounded once.
        tokenizer: folder whose tokenizer is added.

    Raises:
        ValueError: `out` is there already, or `tokenizer` has none.
    """
    files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()] if tokenizer else []
    if tokenizer is not None and not files:
        raise ValueError(f"{tokenizer} has no file of a tokenizer, such as tokenizer.json")
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    shapes = {key.partition("/")[2]: found.size for key, found in stored.items() if key.startswith(f"{WEIGHT}/")}
    with new_folder(out) as folder:
        tensors = _scratch_tensors(folder / "scratch", shapes, _dtypes(facts["dtypes"], dtype))
        reader.read(LoadPlanner(), _whole(tensors))
        _save(tensors, facts["model"], folder, max_shard_size)
        for file in files:
            shutil.copyfile(file, folder / file.name)


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"),
)


def dense_state_dict(
    state: RankState, device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The live dense model in host memory of rank 0; empty on others. Every rank calls it.

    Args:
        device: where the default group's backend takes tensors.
        dtype: of floating-point weights. Default: those of the run; masters are rounded once.
    """
    offered = {key: boxes for key, boxes in written_state(state).items() if key.startswith(f"{WEIGHT}/")}
    offers = Offers(offered, state.groups.control)
    own: dict[str, torch.Tensor] = {**state.mask.parameters, **state.mask.buffers}
    dtypes = _dtypes({name: str(tensor.dtype).removeprefix("torch.") for name, tensor in own.items()}, dtype)
    stored: dict[str, Any] = offers.metadata.state_dict_metadata
    shapes = {key.partition("/")[2]: found.size for key, found in stored.items()} if dist.get_rank() == 0 else {}
    tensors = {name: torch.empty(shape, dtype=dtypes[name], device="cpu") for name, shape in shapes.items()}
    fill(_whole(tensors), offered, offers, device)
    return tensors


def _dtypes(names: Mapping[str, str], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    own = {name: getattr(torch, text) for name, text in names.items()}
    return {name: dtype if dtype is not None and kept.is_floating_point else kept for name, kept in own.items()}


def _whole(tensors: Mapping[str, torch.Tensor]) -> State:
    state: State = {}
    for name, tensor in tensors.items():
        add_box(state, f"{WEIGHT}/{name}", tensor.shape, [0] * tensor.dim(), tensor)
    return state


def _scratch_tensors(
    file: Path, shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Tensors in a file that has no name any more, each in a mapping, hence a storage, of its own."""
    sizes = {name: shape.numel() * dtypes[name].itemsize for name, shape in shapes.items()}
    page, start, tensors = mmap.ALLOCATIONGRANULARITY, 0, dict[str, torch.Tensor]()
    with file.open("wb+") as stream:
        stream.truncate(sum(-(-size // page) * page for size in sizes.values()))
        for name, size in sizes.items():
            mapped = mmap.mmap(stream.fileno(), size, offset=start)
            tensors[name] = torch.frombuffer(mapped, dtype=dtypes[name]).view(shapes[name])
            start += -(-size // page) * page
    file.unlink()
    return tensors


def _save(tensors: dict[str, torch.Tensor], model: Facts, folder: Path, max_shard_size: str) -> None:
    """Weights and configs; of what is no model of Transformers under the names of the module."""
    import transformers

    kind = getattr(transformers, model["class"], None) if model else None
    if kind is None:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
        if model:
            (folder / CONFIG).write_text(model["config"], encoding="utf-8")
        return
    config = kind.config_class.from_dict(json.loads(model["config"]))
    floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    with torch.device("meta"):
        empty = kind(config).to(max(floating, key=floating.count))
    if model["generation_config"] is not None:
        empty.generation_config = transformers.GenerationConfig.from_dict(json.loads(model["generation_config"]))
    empty.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)


# ---- in -------------------------------------------------------------------------------------------------------------


def load_pretrained(state: RankState, folder: Path) -> None:
    """Start from a local folder: masters and weights; the optimizer's state stays. Every rank calls it, and reads what
    it steps.

    Raises:
        ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
    """

    def prepare() -> tuple[_Folder, State]:
        found = _Folder.open(folder, state)
        return found, make_targets(state, found.metadata.state_dict_metadata, None).boxes

    found, targets = run_on_all_ranks(prepare, state.groups.control)
    run_on_all_ranks(lambda: found.read(targets), state.groups.control)
    state.optimizer.return_weights()


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Folder:
    """Weights in safetensors files.

    Args:
        tensors: by our key.
    """

    tensors: dict[str, _Stored]

    @classmethod
    def open(cls, folder: Path, state: RankState) -> _Folder:
        """Look into all files, and give each tensor the name of the model's.

        Raises:
            ValueError: see `load_pretrained`.
        """
        model = state.mask.model
        stored = {found.name: found for file, names in _files(folder).items() for found in _tensors_of(file, names)}
        in_module, converted = _module_names(stored, model)
        known = {*state.mask.parameters, *persistent_buffers(model)}
        found, repeated, unknown = matched(in_module, model, known)
        missing = sorted(known - found.keys())
        if converted and missing:
            raise ValueError(
                f"{folder} stores {quoted(converted)}, parts of tensors of the model; save it with "
                "save_pretrained(..., save_original_format=False)"
            )
        if unknown:
            raise ValueError(
                f"{folder} is of another model, which has {quoted(unknown)}; build the model that was saved"
            )
        result = cls({state.key(WEIGHT, name): stored[in_module[other]] for name, other in found.items()})
        if dist.get_rank() == 0:
            for name, other in repeated:
                result.check_equal(stored[in_module[found[name]]], stored[in_module[other]])
        return result

    @property
    def metadata(self) -> Metadata:
        return whole_metadata({key: (stored.shape, stored.dtype) for key, stored in self.tensors.items()})

    @torch.no_grad()
    def read(self, state: State) -> None:
        """Fill boxes, reading no more than they have."""
        with ExitStack() as stack:
            opened = {file: stack.enter_context(_opened(file)) for file in {s.file for s in self.tensors.values()}}
            for key, boxes in state.items():
                stored = self.tensors[key]
                for offsets, values in boxes.parts.items():
                    values.copy_(_slice(opened[stored.file], stored, offsets, values.shape))

    def check_equal(self, one: _Stored, other: _Stored) -> None:
        """Tensors that the model ties."""
        with _opened(one.file) as first, _opened(other.file) as second:
            for start in range(0, one.shape[0], 4096):
                size = (min(4096, one.shape[0] - start), *one.shape[1:])
                offsets = (start, *(0 for _ in size[1:]))
                if one.shape != other.shape or not torch.equal(
                    _slice(first, one, offsets, size), _slice(second, other, offsets, size)
                ):
                    raise ValueError(
                        f"{one.file.parent}: {one.name!r} and {other.name!r} differ, and the model ties them; build it "
                        "with tie_word_embeddings=false"
                    )


def whole_metadata(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> Metadata:
    """DCP's, of whole tensors.

    Args:
        tensors: shape and dtype by key.
    """
    result: dict[str, Any] = {}
    for key, (shape, dtype) in tensors.items():
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        result[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [chunk])
    return Metadata(result)


def _slice(opened: Any, stored: _Stored, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    slices = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    return opened.get_slice(stored.name)[slices] if slices else opened.get_tensor(stored.name)


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Weight files, and the tensors that the index says are in each; None without an index."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    if not (folder / WEIGHTS_INDEX).is_file():
        pickles = ", only pickles, which could run code" if any(folder.glob("*.bin")) else ""
        raise ValueError(
            f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}{pickles}; save the model with save_pretrained"
        )
    try:
        places: dict[str, str] = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in places.items():
            files.setdefault(folder / Path(file).name, []).append(name)  # type: ignore[union-attr]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / WEIGHTS_INDEX} is damaged: {error!r}") from None
    return files


def _tensors_of(file: Path, expected: Collection[str] | None) -> Iterator[_Stored]:
    with _opened(file) as opened:
        names = set(opened.keys())
        if lost := sorted(set(expected or ()) - names):
            raise ValueError(
                f"{file} lacks {quoted(lost)}, which {WEIGHTS_INDEX} says are in it; copy the folder again"
            )
        for name in sorted(expected or names):
            part = opened.get_slice(name)
            shape = tuple(part.get_shape())
            yield _Stored(file, name, shape, (part[0:0] if shape else opened.get_tensor(name)).dtype)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or cannot be read: {error}") from None


def _module_names(stored: Iterable[str], model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Names in files by the names that the module gives them; and those whose values Transformers converts."""
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


def matched(
    stored: Collection[str], model: nn.Module, known: Collection[str]
) -> tuple[dict[str, str], list[tuple[str, str]], list[str]]:
    """Stored names by dense names: exact ones first, then with or without the prefix of the model without its head,
    then a second name of a tied tensor. Besides, (dense name, stored name) of tensors that are stored twice; and names
    that the model lacks."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}  # dense names by second names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known_as := first.setdefault(id(parameter), name)) != name:
            tied[name] = known_as
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found: dict[str, str] = {}
    repeated: list[tuple[str, str]] = []
    unknown: list[str] = []
    for name in sorted(stored, key=lambda name: (name not in known, name)):
        spellings = [name, f"{prefix}{name}", name.removeprefix(prefix)]
        own = next((spelling for spelling in spellings if spelling in known), None)
        second = next((tied[spelling] for spelling in spellings if spelling in tied), None)
        if own is not None and own not in found:
            found[own] = name
        elif own is None and second is not None and second not in found:
            found[second] = name
        elif own is None and second is not None:
            repeated.append((second, name))
        elif not any(re.search(pattern, name) for pattern in ignored):
            unknown.append(name)
    return found, repeated, unknown
