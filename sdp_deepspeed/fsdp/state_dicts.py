"""State dicts of a sharded model, as PyTorch's Distributed Checkpoint (DCP) saves and loads them.

Each rank gives the shards of what it holds; DCP joins by name what all ranks give. What a rank lacks stands there as a
tensor of which DCP has nothing to write and nothing to read, and which nobody else can take for weights: saved in
another way, the file would have a part of the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from sdp_deepspeed.fsdp.piece_table import PieceTable
from sdp_deepspeed.masking.block import BlockPart
from sdp_deepspeed.masking.mixins import Hook, PartialTensor

WAY = (
    "Save it with torch.distributed.checkpoint on all ranks, or with sdp_deepspeed.fsdp.CheckpointManager; the whole "
    "model is sdp_deepspeed.fsdp.full_state_dict(model) and save_pretrained(model, folder)"
)
T = TypeVar("T", bound="LackingTensor")
Shapes = Mapping[str, torch.Size]


class LackingTensor(PartialTensor):
    """Stands in a state dict for a tensor of a unit that this rank lacks.

    To DCP it is a tensor of the dense shape without anything of it here (the methods with underscores are what DCP asks
    tensors of other kinds for), and so are its copies on the host. Whatever else is done with it raises.
    """

    _dense_shape: torch.Size

    @classmethod
    def like(cls: type[T], refusal: str, shape: Sequence[int]) -> T:
        made: Any = cls.of(refusal)
        made._dense_shape = torch.Size(shape)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")  # what is on the meta device DCP makes anew

    def size(self) -> torch.Size:  # type: ignore[override]
        return self._dense_shape

    def data_ptr(self) -> int:
        return 0

    def to(self: T, *_: Any, **__: Any) -> T:
        return self

    def new_empty(self: T, *_: Any, **__: Any) -> T:
        return self

    def __create_write_items__(self, *_: Any) -> list[Any]:
        return []

    def __create_chunk_list__(self) -> list[Any]:
        return []


class PiecesTensor(torch.Tensor):
    """Stands in a state dict beside the pieces of a branch that this rank has: a digest of what all of them are, since
    under another plan other pieces have their names. DCP saves it; by `torch.save` or safetensors, with the rest of the
    state dict, it raises.
    """

    _refusal: str
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # what is made of it is an ordinary tensor

    @classmethod
    def of(cls, table: PieceTable, name: str) -> PiecesTensor:
        made: Any = digest(table).as_subclass(cls)
        made._refusal = f"this rank holds some pieces of {name}, so its state dict is partial. {WAY}"
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(self._refusal)

    def is_contiguous(self, *_: Any, **__: Any) -> NoReturn:  # as safetensors asks
        raise RuntimeError(self._refusal)


def digest(table: PieceTable) -> torch.Tensor:
    """Of a branch's pieces, as 4 integers."""
    pieces = {
        number: sorted((t.name, t.dim, t.intervals) for t in table.tensors(number).values()) for number in table.sets
    }
    raw = hashlib.sha256(json.dumps(pieces).encode()).digest()
    numbers = [int.from_bytes(raw[8 * i : 8 * i + 7], "big") for i in range(4)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def check_pieces(table: PieceTable, name: str, stored: Any) -> None:
    """ValueError if a state dict is of other pieces."""
    if not (isinstance(stored, torch.Tensor) and torch.equal(stored.cpu(), digest(table))):
        raise ValueError(
            f"{name}: the state dict is of another plan, whose pieces of neurons or heads are others under the same "
            "names: resume with the same block, number of ranks and assignment, or load a checkpoint of "
            "sdp_deepspeed.fsdp.CheckpointManager, which fits any plan"
        )


def show_as_lacking(part: BlockPart) -> list[Any]:
    """Have state dicts of a lacking unit's modules say so, and these modules load such state dicts, or the dense
    model's, of which they take nothing.

    Returns:
        Handles of the hooks.
    """
    text = f"this rank lacks {part.name}, so its state dict would be partial. {WAY}"
    shapes = {id(tensor): stand_in.shape for tensor, stand_in in part.stand_ins().items()}
    handles: list[Any] = []
    for module in {inner: None for outer in part.modules for inner in outer.modules()}:
        own = {**module._parameters, **module._buffers}
        lacking = {name: shapes[id(tensor)] for name, tensor in own.items() if id(tensor) in shapes}
        if lacking:
            handles.append(module.register_state_dict_post_hook(Hook(partial(_show, part, text, lacking))))
            handles.append(module.register_load_state_dict_pre_hook(Hook(partial(_leave, part, lacking))))
    return handles


def _show(part: BlockPart, text: str, shapes: Shapes, _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    for name in shapes:
        if f"{prefix}{name}" in state and not part.dense:
            state[f"{prefix}{name}"] = LackingTensor.like(text, shapes[name])


def _leave(part: BlockPart, shapes: Shapes, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name, shape in shapes.items():
        given = state.get(f"{prefix}{name}")
        if given is not None and not part.dense and given.size() == shape:
            state[f"{prefix}{name}"] = getattr(module, name)
