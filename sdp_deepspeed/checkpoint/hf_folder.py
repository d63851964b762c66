"""Folders in Hugging Face format, as they are written: in one process, from tensors of the dense model.

Transformers renames some tensors in files, and divides some differently. `save_pretrained` of a model on the meta
device does both.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn

from sdp_deepspeed.atomic_files import sync
from sdp_deepspeed.plan.tensors import names_of_persistent_buffers

logger = logging.getLogger("sdp_deepspeed")

WEIGHTS, WEIGHTS_INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
UNFINISHED = ".unfinished"


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Class and configs (JSON) of a Transformers model; empty for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(model, "save_pretrained"):
        return {}
    generation: Any = getattr(model, "generation_config", None)
    return {
        "class": type(model).__name__,
        "config": config.to_json_string(use_diff=False),
        "generation_config": generation.to_json_string() if hasattr(generation, "to_json_string") else None,
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Dense names of tied parameters and persistent buffers by their further names."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    names |= names_of_persistent_buffers(model)
    return {name: dense for name, dense in names.items() if name != dense}


def save_tensors(
    tensors: dict[str, torch.Tensor],
    model: Mapping[str, Any],
    tied: Mapping[str, str],
    folder: Path,
    max_shard_size: str,
) -> None:
    """Save weights and configs. Models of other libraries keep the names of the module, tied ones too."""
    import transformers

    kind = getattr(transformers, model["class"], None) if model else None
    if kind is None:
        again = {name: tensors[dense].clone() for name, dense in tied.items() if dense in tensors}
        save_torch_state_dict(tensors | again, folder, max_shard_size=max_shard_size)
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


def save_pretrained(model: Any, folder: Path, tokenizer: Any = None, **options: Any) -> None:
    """Export a dense model with its own `save_pretrained`, or else as a state dict, in one process. At any moment the
    folder has the weights of an older export, none, or the new ones; other files in it are kept. If it is interrupted
    while files are moved, the remaining ones are in `.unfinished`."""
    save = getattr(model, "save_pretrained", None) or partial(_save_state_dict, model)
    with replaced_export(folder) as written:
        save(str(written), **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(written))


def _save_state_dict(
    model: nn.Module, folder: str, *, state_dict: Mapping[str, torch.Tensor] | None = None, **options: Any
) -> None:
    """Save a state dict with all its names. Tensors are copied, since those that share memory would lose names."""
    state = model.state_dict() if state_dict is None else state_dict
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    save_torch_state_dict(copies, folder, **options)
    logger.warning(
        "a %s has no save_pretrained: wrote its state dict; load it with safetensors.torch.load_file",
        type(model).__name__,
    )


@contextmanager
def replaced_export(folder: Path) -> Iterator[Path]:
    """Context with an empty folder to write to, whose files then replace those of an older export in `folder`.

    The file that makes weights loadable (the index, or the only file of weights) is removed first and added last.
    """
    folder = Path(os.path.abspath(folder))
    unfinished, is_new = folder / UNFINISHED, not folder.exists()
    shutil.rmtree(unfinished, ignore_errors=True)
    written = unfinished / folder.name  # the same name as the folder, which `push_to_hub` uses
    try:
        written.mkdir(parents=True)
        yield written
        new = sorted((path for path in written.rglob("*") if path.is_file()), key=_visibility)
        for path in new:
            sync(path)
    except BaseException:
        shutil.rmtree(folder if is_new else unfinished, ignore_errors=True)
        raise
    weights = {weights_of(path.name) for path in new} - {None}
    for old in sorted(folder.iterdir(), key=_visibility, reverse=True):
        if weights_of(old.name) in weights:
            old.unlink()
            sync(folder)
    for path in new:
        final = folder / path.relative_to(written)
        final.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, final)
        sync(final.parent)
    shutil.rmtree(unfinished, ignore_errors=True)


def weights_of(name: str) -> str | None:
    """Common name of the files of one set of weights (one file, or shards and an index), such as "model" or the variant
    "model.fp16". None for other files."""
    match = re.fullmatch(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index(\..+)?\.json)?", name)
    return match and match[1] + (match[4] or "")


def _visibility(path: Path) -> int:
    """Sort key for the order in which files are added: the index is last."""
    return 2 if ".safetensors.index." in path.name else 1 if path.suffix == ".safetensors" else 0
