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

from sdp_deepspeed.atomic_files import complete_or_absent, sync, write_text
from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, explained, fill
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader

MASTER, WEIGHT = "master", "weight"
MODEL_CONFIG, GENERATION = "model_config.json", "generation_config.json"
# What the tokenizers of Transformers write.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Format:
    """What is written.

    Args:
        fp32: all weights in fp32, from the masters where there are any; else as they were trained.
        max_shard_bytes: of a file; a larger tensor has one of its own.
    """

    fp32: bool = False
    max_shard_bytes: int = 5 * 10**9


@dataclass(frozen=True)
class Source:
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


def find(path: Path, tag: str | None = None) -> Path:
    """The folder of a checkpoint.

    Args:
        path: that folder, or the one above with `latest`.

    Raises:
        ValueError: there is none.
    """
    if tag is not None:
        return path / tag
    if (path / files.MANIFEST).is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    tags, _ = files.candidates(path)
    if not tags:
        raise ValueError(f"{path} has no complete checkpoint of sdp_deepspeed")
    return path / tags[0]


def verify(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Its manifest, and what is wrong with its files.

    Raises:
        ValueError: there is no manifest, or it is damaged.
    """
    manifest = files.read_manifest(path)
    problems = [files.problem_of(path, name, record) for name, record in sorted(manifest["files"].items())]
    return manifest, [problem for problem in problems if problem is not None]


def export(path: Path, out: Path, form: Format, tokenizer: Path | None = None) -> Path:
    """Write `out`, complete or not at all.

    Args:
        path: of a checkpoint.
        tokenizer: folder whose tokenizer files are copied.

    Raises:
        ValueError: the checkpoint is damaged, `out` is there already, or `tokenizer` has no tokenizer.
    """
    _, problems = verify(path)
    if problems:
        raise ValueError("; ".join(problems[:5]))
    copied = [] if tokenizer is None else _tokenizer_files(tokenizer)
    sources = list(_sources(path, fp32=form.fp32))
    with complete_or_absent(out) as aside:
        _write_weights(path, aside, list(_shards(sources, form.max_shard_bytes)))
        _write_configs(path, aside, sources)
        for file in copied:
            shutil.copyfile(file, aside / file.name)
    return out


def _sources(path: Path, *, fp32: bool) -> Iterator[Source]:
    stored: Mapping[str, Any] = SafetensorsReader(path).read_metadata().state_dict_metadata
    names = [key.removeprefix(f"{WEIGHT}/") for key in stored if key.startswith(f"{WEIGHT}/")]
    file_names = _file_names(path, names)
    for name in names:
        key = f"{WEIGHT}/{name}"
        info = stored[key]
        master, dtype = f"{MASTER}/{name}", info.properties.dtype
        if fp32 and dtype.is_floating_point:
            dtype = torch.float32
        own = master if fp32 and master in stored else key
        yield Source(file_names.get(name, name), own, tuple(info.size), dtype)


def _file_names(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """What Transformers calls tensors in its files; as in the module if it is no model of Transformers."""
    config = _config(path)
    if config is None or not config.get("architectures"):
        return {}
    from sdp_deepspeed.checkpoint.interop.transformers_names import (
        FileNames,  # takes seconds, and ResNets need none of it
    )

    return FileNames(config["architectures"][0], config.get("model_type")).to_file(names)


def _config(path: Path) -> dict[str, Any] | None:
    """The model's own."""
    file = path / MODEL_CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _shards(sources: Sequence[Source], limit: int) -> Iterator[list[Source]]:
    shard: list[Source] = []
    for source in sources:
        if shard and sum(own.num_bytes for own in shard) + source.num_bytes > limit:
            yield shard
            shard = []
        shard.append(source)
    if shard:
        yield shard


def _write_weights(path: Path, out: Path, shards: Sequence[Sequence[Source]]) -> None:
    """One file after the other; an index if there are several."""
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(_read(path, shard), out / name, metadata={"format": "pt"})
        sync(out / name)
        places |= {source.name: name for source in shard}
    if len(shards) > 1:
        total = sum(source.num_bytes for shard in shards for source in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_text(out / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _read(path: Path, shard: Sequence[Source]) -> dict[str, torch.Tensor]:
    tensors = {source.name: torch.empty(source.shape, dtype=source.dtype) for source in shard}
    targets = {}
    for source in shard:
        targets[source.key] = Chunks(source.shape, source.dtype)
        targets[source.key].add(Box.whole(source.shape), tensors[source.name])
    with explained(f"{path} cannot be read"):
        fill(targets, SafetensorsReader(path))
    return tensors


def _write_configs(path: Path, out: Path, sources: Sequence[Source]) -> None:
    """The model's own config with the dtype that is written."""
    config = _config(path)
    if config is not None:
        counts: Counter[torch.dtype] = Counter()
        for source in sources:
            if source.dtype.is_floating_point:
                counts[source.dtype] += source.num_bytes
        config.pop("torch_dtype", None)
        if counts:
            config["dtype"] = str(counts.most_common(1)[0][0]).removeprefix("torch.")
        write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    if (path / GENERATION).is_file():
        shutil.copyfile(path / GENERATION, out / GENERATION)


def _tokenizer_files(folder: Path) -> list[Path]:
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise ValueError(f"--tokenizer: {folder} has no file of a tokenizer (such as tokenizer.json)")
    return found
