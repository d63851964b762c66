"""State dicts of a sharded model, as PyTorch's Distributed Checkpoint (DCP) saves and loads them.

Each rank gives the shards of what it holds; DCP joins by name what all ranks give. What a rank lacks stands there as a
tensor of which DCP has nothing to write and nothing to read, and which nobody else can take for weights: saved in
another way, the file would have a part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn

from sdp_deepspeed.masking.partial import PartialTensor

_WAY = (
    "save it with torch.distributed.checkpoint on all ranks or sdp_deepspeed.fsdp.CheckpointManager; the whole model "
    "is sdp_deepspeed.fsdp.full_state_dict(model)"
)


class LackingTensor(PartialTensor):
    """Stands in a state dict for a tensor that this rank lacks.

    To DCP it is a tensor of the dense shape without anything of it here (the methods with underscores are what DCP asks
    tensors of other kinds for), and so are its copies on the host. Whatever else is done with it raises.
    """

    _dense_shape: torch.Size

    @classmethod
    def like(cls, refusal: str, shape: Sequence[int]) -> LackingTensor:
        made: Any = cls.of(refusal)
        made._dense_shape = torch.Size(shape)
        return cast(LackingTensor, made)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")  # what is on the meta device DCP makes anew

    def size(self) -> torch.Size:  # type: ignore[override]
        return self._dense_shape

    def data_ptr(self) -> int:
        return 0

    def to(self, *_: Any, **__: Any) -> LackingTensor:
        return self

    def new_empty(self, *_: Any, **__: Any) -> LackingTensor:
        return self

    def __create_write_items__(self, *_: Any) -> list[Any]:
        return []

    def __create_chunk_list__(self) -> list[Any]:
        return []


class _PartsTensor(torch.Tensor):
    """Stands in a state dict beside the parts that this rank has. DCP saves it; by `torch.save` or safetensors, with
    the rest of the state dict, it raises."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # what is made of it is an ordinary tensor

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(f"this rank holds some neurons or heads, so its state dict is partial; {_WAY}")

    def is_contiguous(self, *_: Any, **__: Any) -> NoReturn:  # as safetensors asks
        self.__reduce_ex__(4)


class PartsDict(nn.ModuleDict):
    """The parts of a layer's branches that this rank has."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8, device="cpu").as_subclass(_PartsTensor)

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set."""


def install(model: nn.Module, lacking: Mapping[str, torch.Size]) -> None:
    """Have state dicts of a model say what this rank lacks, and have it load such state dicts, or the dense model's, of
    whose lacking tensors it takes nothing.

    Args:
        lacking: shapes of the tensors of which this rank has nothing, by dense name.
    """
    by_owner: dict[str, dict[str, torch.Size]] = {}
    for name, shape in lacking.items():
        owner, _, own = name.rpartition(".")
        by_owner.setdefault(owner, {})[own] = shape
    for owner, shapes in by_owner.items():
        module = model.get_submodule(owner)
        module.register_state_dict_post_hook(partial(_show, shapes))
        module.register_load_state_dict_pre_hook(partial(_leave, shapes))


def _show(shapes: Mapping[str, torch.Size], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    for name, shape in shapes.items():
        if prefix + name in state:
            text = f"this rank lacks {prefix}{name}, so its state dict is partial; {_WAY}"
            state[prefix + name] = LackingTensor.like(text, shape)


def _leave(shapes: Mapping[str, torch.Size], module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name, shape in shapes.items():
        given = state.get(prefix + name)
        if given is not None and given.size() == shape:
            state[prefix + name] = getattr(module, name)
