"""From a checkpoint to a folder in Hugging Face format, in one process, with memory for one file of it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sdp_deepspeed.atomic_files import complete_or_absent, regular
from sdp_deepspeed.checkpoint.interop.hugging_face_names import CONFIG, TOKENIZER_FILES, WEIGHTS, WEIGHTS_INDEX
from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, read_chunks, translated_dcp_errors
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader
from sdp_deepspeed.checkpoint.storage.manifest import verify
from sdp_deepspeed.checkpoint.storage.names import GENERATION_CONFIG, MASTER, MODEL_CONFIG, WEIGHT
from sdp_deepspeed.messages import listed


@dataclass(frozen=True)
class ExportFormat:
    """What is written.

    Args:
        fp32: all weights in fp32, from the masters where there are any; else as they were trained.
        max_shard_bytes: of a file; a larger tensor has one of its own.
    """

    fp32: bool = False
    max_shard_bytes: int = 5 * 10**9


@dataclass(frozen=True)
class ExportTensor:
    """A dense tensor of a checkpoint, and what it becomes.

    Args:
        name: in the files that are written.
        key: in the checkpoint.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export(path: Path, out: Path, form: ExportFormat, tokenizer: Path | None = None) -> Path:
    """Write `out`, complete or not at all.

    Args:
        path: of a checkpoint.
        tokenizer: folder whose tokenizer files are copied.

    Raises:
        ValueError: the checkpoint is damaged, `out` is there already, or `tokenizer` has no tokenizer.
    """
    _, problems = verify(path)
    if problems:
        raise ValueError(listed(problems, separator="; "))
    copied = [] if tokenizer is None else _tokenizer_files(tokenizer)
    tensors = list(_tensors(path, fp32=form.fp32))
    with complete_or_absent(out) as staging:
        _write_weights(path, staging, list(_shards(tensors, form.max_shard_bytes)))
        _write_configs(path, staging, tensors)
        for file in copied:
            shutil.copyfile(file, staging / file.name)
    return out


def _tensors(path: Path, *, fp32: bool) -> Iterator[ExportTensor]:
    stored: Mapping[str, Any] = SafetensorsReader(path).read_metadata().state_dict_metadata
    names = [key.removeprefix(f"{WEIGHT}/") for key in stored if key.startswith(f"{WEIGHT}/")]
    file_names = _file_names(path, names)
    for name in names:
        key = f"{WEIGHT}/{name}"
        info = stored[key]
        master, dtype = f"{MASTER}/{name}", info.properties.dtype
        if fp32 and dtype.is_floating_point:
            dtype = torch.float32
        source = master if fp32 and master in stored else key
        yield ExportTensor(file_names.get(name, name), source, tuple(info.size), dtype)


def _file_names(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """What Transformers calls tensors in its files; as in the module if it is no model of Transformers."""
    config = _config(path)
    if config is None or not config.get("architectures"):
        return {}
    # Takes seconds, and ResNets need none of it.
    from sdp_deepspeed.checkpoint.interop.transformers_names import FileNames

    return FileNames.of_model(config["architectures"][0], config.get("model_type")).to_file(names)


def _config(path: Path) -> dict[str, Any] | None:
    """The model's own."""
    file = path / MODEL_CONFIG
    return json.loads(regular(file).read_text(encoding="utf-8")) if file.is_file() else None


def _shards(tensors: Sequence[ExportTensor], limit: int) -> Iterator[list[ExportTensor]]:
    shard: list[ExportTensor] = []
    for tensor in tensors:
        if shard and sum(other.num_bytes for other in shard) + tensor.num_bytes > limit:
            yield shard
            shard = []
        shard.append(tensor)
    if shard:
        yield shard


def _write_weights(path: Path, out: Path, shards: Sequence[Sequence[ExportTensor]]) -> None:
    """One file after the other; an index if there are several."""
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(_read(path, shard), out / name, metadata={"format": "pt"})
        places |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.num_bytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write_json(out / WEIGHTS_INDEX, index)


def _read(path: Path, shard: Sequence[ExportTensor]) -> dict[str, torch.Tensor]:
    values = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in shard}
    targets = {}
    for tensor in shard:
        targets[tensor.key] = Chunks(tensor.shape, tensor.dtype)
        targets[tensor.key].add(Box.whole(tensor.shape), values[tensor.name])
    with translated_dcp_errors(f"{path} cannot be read"):
        read_chunks(targets, SafetensorsReader(path))
    return values


def _write_configs(path: Path, out: Path, tensors: Sequence[ExportTensor]) -> None:
    """The model's own config with the dtype that is written."""
    config = _config(path)
    if config is not None:
        counts: Counter[torch.dtype] = Counter()
        for tensor in tensors:
            if tensor.dtype.is_floating_point:
                counts[tensor.dtype] += tensor.num_bytes
        config.pop("torch_dtype", None)
        if counts:
            config["dtype"] = str(counts.most_common(1)[0][0]).removeprefix("torch.")
        _write_json(out / CONFIG, config)
    if (path / GENERATION_CONFIG).is_file():
        shutil.copyfile(path / GENERATION_CONFIG, out / GENERATION_CONFIG)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer_files(folder: Path) -> list[Path]:
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        raise ValueError(f"--tokenizer: {folder} has no file of a tokenizer (such as tokenizer.json)")
    return files
