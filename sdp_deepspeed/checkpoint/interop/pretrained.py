"""Start from a model in Hugging Face format: each rank reads from the safetensors files what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.checkpoint.interop.hugging_face_names import WEIGHTS, WEIGHTS_INDEX
from sdp_deepspeed.checkpoint.interop.name_matching import Match, NameMap, refuse_others
from sdp_deepspeed.checkpoint.interop.whole_tensors import SliceReader, Slices, WholeTensor, WholeTensorsReader
from sdp_deepspeed.checkpoint.state.chunks import translated_dcp_errors
from sdp_deepspeed.checkpoint.state.fill import fill
from sdp_deepspeed.checkpoint.state.trained_state import TrainedState, WeightChunks
from sdp_deepspeed.checkpoint.storage.errors import translating_os_errors
from sdp_deepspeed.checkpoint.storage.names import WEIGHT
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.messages import quoted

if TYPE_CHECKING:
    from sdp_deepspeed.checkpoint.interop.transformers_names import FileNames

_ROWS = 4096  # compared at a time


class HuggingFaceReader(WholeTensorsReader):
    """The weights in a local folder, single file or sharded.

    Args:
        stored: all tensors in the files, by the names that the module gives them.
        match: which of them is which of the model's.
    """

    def __init__(self, stored: Mapping[str, WholeTensor], match: Match) -> None:
        super().__init__({f"{WEIGHT}/{dense}": stored[name] for dense, name in match.found.items()})
        self._stored, self._match = stored, match

    @classmethod
    def of_folder(cls, folder: Path, names: NameMap, file_names: FileNames) -> HuggingFaceReader:
        """Look into all files.

        Args:
            folder: as `save_pretrained` writes it.
            names: of the model that they are for.
            file_names: which names it has in files.

        Raises:
            ValueError: a file is missing or damaged, or the weights are of another model.
        """
        files = dict(_stored(folder))
        stored = {name: files[file_name] for name, file_name in file_names.to_module(files).items()}
        match = names.match(stored.keys())
        if match.missing and (converted := file_names.converted(files)):
            raise ValueError(
                f"load_pretrained: {folder} stores {quoted(converted)}, which Transformers puts together when it loads "
                "a model (experts one by one, which are one tensor in the model): save it with "
                "save_pretrained(..., save_original_format=False), or load it with from_pretrained before "
                "deepspeed.initialize"
            )
        refuse_others(match, f"load_pretrained: {folder}")
        return cls(stored, match)

    @contextmanager
    def open(self, file: Path) -> Iterator[SliceReader]:
        with _opened(file) as opened:
            yield lambda whole, slices: _read_slice(opened, whole, slices)

    def check_tied(self, rank: int, size: int) -> None:
        """Compare this rank's share of the rows of tensors that are stored twice and are one in the model.

        Raises:
            ValueError: they differ, so the saved model did not tie them.
        """
        for dense, others in self._match.tied.items():
            one = self._stored[self._match.found[dense]]
            for other in (self._stored[name] for name in others):
                if one.shape != other.shape or not all(
                    torch.equal(self._rows(one, begin), self._rows(other, begin))
                    for begin in range(rank * _ROWS, one.shape[0], size * _ROWS)
                ):
                    raise ValueError(
                        f"load_pretrained: {one.name!r} and {other.name!r} differ in {one.file.parent}, and the model "
                        "ties them; build it with tie_word_embeddings=false"
                    )

    def _rows(self, whole: WholeTensor, begin: int) -> torch.Tensor:
        rows = slice(begin, min(begin + _ROWS, whole.shape[0]))
        with self.open(whole.file) as read:
            return read(whole, (rows, *(slice(0, size) for size in whole.shape[1:])))


def load_pretrained(trained: TrainedState, folder: Path) -> None:
    """Fill weights and masters from a local folder in Hugging Face format; every rank calls it. The optimizer's
    moments, counters and the LR scheduler stay as they are.

    Raises:
        ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
    """
    run_on_all_ranks(trained.world, translating_os_errors(partial(_load, trained, folder)))


def _load(trained: TrainedState, folder: Path) -> None:
    # Imports Transformers, which other models do without.
    from sdp_deepspeed.checkpoint.interop.transformers_names import FileNames

    where = f"load_pretrained: {folder}"
    weights = trained.rank_state().weights
    model_type = getattr(getattr(trained.module, "config", None), "model_type", None)
    file_names = FileNames.of_model(type(trained.module).__name__, model_type)
    reader = HuggingFaceReader.of_folder(folder, NameMap.of(trained.module, weights.tensors), file_names)
    check_shapes(reader, weights, where)
    _check_numbers(reader, weights, where)
    reader.check_tied(trained.world.rank, trained.world.size)
    with translated_dcp_errors(where):
        fill(trained, reader, strict=True, optimizer_metadata=None)


def check_shapes(reader: WholeTensorsReader, weights: WeightChunks, where: str) -> None:
    """ValueError where the stored weights have another shape than the model's."""
    for key, whole in reader.tensors.items():
        kind, _, name = key.partition("/")
        if kind == WEIGHT and name in weights.tensors and whole.shape != (shape := weights.shape(name)):
            raise ValueError(
                f"{where}: {whole.name!r} has shape {list(whole.shape)} there and {list(shape)} in the model; build "
                "the model with the same config as the one that was saved"
            )


def _check_numbers(reader: HuggingFaceReader, weights: WeightChunks, where: str) -> None:
    """ValueError for weights that are no numbers without what stands beside them."""
    for key, whole in reader.tensors.items():
        dtype = weights.tensors[key.partition("/")[2]].dtype
        if whole.dtype.is_floating_point != dtype.is_floating_point:
            raise ValueError(
                f"{where}: {whole.name!r} is {whole.dtype} there and {dtype} in the model; quantized weights are not "
                "supported, give the folder of the model before it was quantized"
            )


def _stored(folder: Path) -> Iterator[tuple[str, WholeTensor]]:
    """All tensors in the files of a folder, by their names there."""
    files = _files(folder)
    for file, expected in files.items():
        with _opened(file) as opened:
            names = set(opened.keys())
            if lost := sorted((expected or names) - names):
                raise ValueError(
                    f"load_pretrained: {file} lacks {quoted(lost)}, which {folder / WEIGHTS_INDEX} says are in it"
                )
            for name in sorted(expected or names):
                part = opened.get_slice(name)
                shape = tuple(part.get_shape())
                dtype = (part[0:0] if shape else opened.get_tensor(name)).dtype
                yield name, WholeTensor(file, name, shape, dtype)


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Weight files and the names that the index says are in them, None without an index."""
    if not folder.is_dir():
        raise ValueError(f"load_pretrained: there is no folder {folder}; give one that save_pretrained wrote")
    if (folder / WEIGHTS_INDEX).is_file():
        return _indexed(folder)
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"load_pretrained: {folder} has pytorch_model*.bin only, pickles, which could run foreign code; convert "
            "them where you trust their source: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
        )
    raise ValueError(f"load_pretrained: {folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def _indexed(folder: Path) -> dict[Path, set[str] | None]:
    try:
        index = json.loads(regular(folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))
        places: Mapping[str, str] = index["weight_map"]
        names = {str(Path(file).name) for file in places.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"load_pretrained: {folder / WEIGHTS_INDEX} cannot be read: {problem!r}") from None
    if lost := sorted(name for name in names if not (folder / name).is_file()):
        raise ValueError(
            f"load_pretrained: {folder} lacks {quoted(lost)}, which its index names; it is not completely copied"
        )
    return {folder / file: {name for name, place in places.items() if Path(place).name == file} for file in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(regular(file), framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"load_pretrained: {file} is damaged or cannot be read: {problem}") from None


def _read_slice(opened: Any, whole: WholeTensor, slices: Slices) -> torch.Tensor:
    return opened.get_slice(whole.name)[slices] if slices else opened.get_tensor(whole.name)
