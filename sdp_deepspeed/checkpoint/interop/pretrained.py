"""Start from a model in Hugging Face format: each rank reads from the safetensors files what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from sdp_deepspeed.checkpoint.interop.name_matching import Match, Names, refuse_others
from sdp_deepspeed.checkpoint.interop.whole_tensors import Part, Slices, Stored, WholeTensorsReader
from sdp_deepspeed.checkpoint.load import What, load_tensors
from sdp_deepspeed.checkpoint.save import together
from sdp_deepspeed.checkpoint.state.chunks import explained
from sdp_deepspeed.checkpoint.state.rank_chunks import WEIGHT, Layout
from sdp_deepspeed.messages import quoted

if TYPE_CHECKING:
    from sdp_deepspeed.checkpoint.checkpointer import CheckpointingEngine
    from sdp_deepspeed.checkpoint.interop.transformers_names import FileNames

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ROWS = 4096  # compared at a time


class HuggingFaceReader(WholeTensorsReader):
    """The weights in a local folder, single file or sharded.

    Args:
        folder: as `save_pretrained` writes it.
        names: of the model that they are for.
        file_names: which names it has in files.

    Raises:
        ValueError: a file is missing or damaged, or the weights are of another model.
    """

    def __init__(self, folder: Path, names: Names, file_names: FileNames) -> None:
        files = dict(_stored(folder))
        stored = {name: files[file_name] for name, file_name in file_names.to_module(files).items()}
        self.match: Match = names.match(stored.keys())
        refuse_others(self.match, f"load_pretrained: {folder}")
        self._stored = stored
        super().__init__({f"{WEIGHT}/{dense}": stored[name] for dense, name in self.match.found.items()})

    @contextmanager
    def open(self, file: Path) -> Iterator[Part]:
        with _opened(file) as opened:
            yield lambda stored, slices: _part(opened, stored, slices)

    def check_tied(self, rank: int, size: int) -> None:
        """Compare this rank's share of the rows of tensors that are stored twice and are one in the model.

        Raises:
            ValueError: they differ, so the saved model did not tie them.
        """
        for dense, others in self.match.tied.items():
            one = self._stored[self.match.found[dense]]
            for other in (self._stored[name] for name in others):
                if one.shape != other.shape or not all(
                    torch.equal(self._rows(one, begin), self._rows(other, begin))
                    for begin in range(rank * _ROWS, one.shape[0], size * _ROWS)
                ):
                    raise ValueError(
                        f"load_pretrained: {one.name!r} and {other.name!r} differ in {one.file.parent}, and the model "
                        "ties them; build it with tie_word_embeddings=false"
                    )

    def _rows(self, stored: Stored, begin: int) -> torch.Tensor:
        rows = slice(begin, min(begin + _ROWS, stored.shape[0]))
        with self.open(stored.file) as part:
            return part(stored, (rows, *(slice(0, size) for size in stored.shape[1:])))


def load_pretrained(engine: CheckpointingEngine, folder: str | Path) -> None:
    """Fill weights and masters from a local folder in Hugging Face format; every rank calls it. The optimizer's
    moments, counters and the LR scheduler stay as they are.

    Raises:
        ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
    """
    engine.before_checkpoint("load_pretrained")
    together(engine.world, lambda: _load(engine, Path(folder)))


def _load(engine: CheckpointingEngine, folder: Path) -> None:
    from sdp_deepspeed.checkpoint.interop.transformers_names import (
        FileNames,  # imports Transformers, which other models do without
    )

    layout = engine.layout()
    model_type = getattr(getattr(engine.module, "config", None), "model_type", None)
    file_names = FileNames(type(engine.module).__name__, model_type)
    reader = HuggingFaceReader(folder, Names.of(engine.module, layout.tensors), file_names)
    check_shapes(reader, layout, f"load_pretrained: {folder}")
    _check_numbers(reader, layout, f"load_pretrained: {folder}")
    reader.check_tied(engine.world.rank, engine.world.size)
    with explained(f"load_pretrained: {folder}"):
        load_tensors(engine, reader, What(module_only=True), None)


def check_shapes(reader: WholeTensorsReader, layout: Layout, where: str) -> None:
    """ValueError where the stored weights have another shape than the model's."""
    for key, stored in reader.tensors.items():
        kind, _, name = key.partition("/")
        if kind == WEIGHT and name in layout.tensors and stored.shape != layout.shape(name):
            raise ValueError(
                f"{where}: {stored.name!r} has shape {list(stored.shape)} there and {list(layout.shape(name))} in the "
                "model; build the model with the same config as the one that was saved"
            )


def _check_numbers(reader: HuggingFaceReader, layout: Layout, where: str) -> None:
    """ValueError for weights that are no numbers without what stands beside them."""
    for key, stored in reader.tensors.items():
        dtype = layout.tensors[key.partition("/")[2]].dtype
        if stored.dtype.is_floating_point != dtype.is_floating_point:
            raise ValueError(
                f"{where}: {stored.name!r} is {stored.dtype} there and {dtype} in the model; quantised weights are not "
                "supported, give the folder of the model before it was quantised"
            )


def _stored(folder: Path) -> Iterator[tuple[str, Stored]]:
    """All tensors in the files of a folder, by their names there."""
    files = _files(folder)
    for file, expected in files.items():
        with _opened(file) as opened:
            names = set(opened.keys())
            if lost := sorted((expected or names) - names):
                raise ValueError(f"load_pretrained: {file} lacks {quoted(lost)}, which {folder / INDEX} says are in it")
            for name in sorted(expected or names):
                part = opened.get_slice(name)
                shape = tuple(part.get_shape())
                dtype = (part[0:0] if shape else opened.get_tensor(name)).dtype
                yield name, Stored(file, name, shape, dtype)


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Weight files and the names that the index says are in them, None without an index."""
    if not folder.is_dir():
        raise ValueError(f"load_pretrained: there is no folder {folder}; give one that save_pretrained wrote")
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / ONE_FILE).is_file():
        return {folder / ONE_FILE: None}
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"load_pretrained: {folder} has pytorch_model*.bin only, pickles, which could run foreign code; convert "
            "them where you trust their source: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
        )
    raise ValueError(f"load_pretrained: {folder} has neither {ONE_FILE} nor {INDEX}")


def _indexed(folder: Path) -> dict[Path, set[str] | None]:
    try:
        places: Mapping[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = {str(Path(file).name) for file in places.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"load_pretrained: {folder / INDEX} cannot be read: {problem!r}") from None
    if lost := sorted(name for name in names if not (folder / name).is_file()):
        raise ValueError(
            f"load_pretrained: {folder} lacks {quoted(lost)}, which its index names; it is not completely copied"
        )
    return {folder / file: {name for name, place in places.items() if Path(place).name == file} for file in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"load_pretrained: {file} is damaged or cannot be read: {problem}") from None


def _part(opened: Any, stored: Stored, slices: Slices) -> torch.Tensor:
    return opened.get_slice(stored.name)[slices] if slices else opened.get_tensor(stored.name)
