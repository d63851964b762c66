"""State dicts of a sharded model for PyTorch's Distributed Checkpoint (DCP).

Each rank contributes the shards that it holds, and DCP joins them by name. For tensors that a rank lacks, the state
dict has placeholders: DCP neither writes nor reads anything for them, and any other use raises, since the result would
contain only a part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn

from sdp_deepspeed.masking.placeholders import PartialTensor

_WAY = (
    "save it with torch.distributed.checkpoint on all ranks or sdp_deepspeed.fsdp.CheckpointManager; the whole model "
    "is sdp_deepspeed.fsdp.full_state_dict(model)"
)


class AbsentTensor(PartialTensor):
    """Placeholder in a state dict for a tensor that this rank lacks.

    For DCP it is a tensor of the dense shape without local shards (it implements the underscore methods that DCP calls
    on such tensors), and so are its copies. Any other use raises.
    """

    _dense_shape: torch.Size

    @classmethod
    def like(cls, refusal: str, shape: Sequence[int]) -> AbsentTensor:
        made: Any = cls.of(refusal)
        made._dense_shape = torch.Size(shape)
        return cast(AbsentTensor, made)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")  # DCP would allocate meta tensors

    def size(self) -> torch.Size:  # type: ignore[override]
        return self._dense_shape

    def data_ptr(self) -> int:
        return 0

    def to(self, *_: Any, **__: Any) -> AbsentTensor:
        return self

    def new_empty(self, *_: Any, **__: Any) -> AbsentTensor:
        return self

    def __create_write_items__(self, *_: Any) -> list[Any]:
        return []

    def __create_chunk_list__(self) -> list[Any]:
        return []


class _PartsTensor(torch.Tensor):
    """Marker in a state dict with parts of tensors. DCP saves it; `torch.save` and safetensors raise."""

    __torch_function__: Any = nn.Parameter.__torch_function__  # results of operations are ordinary tensors

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(f"this rank holds some neurons or heads, so its state dict is partial; {_WAY}")

    def is_contiguous(self, *_: Any, **__: Any) -> NoReturn:  # called by safetensors
        self.__reduce_ex__(4)


class PartsDict(nn.ModuleDict):
    """The parts of a layer's branches on this rank."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8, device="cpu").as_subclass(_PartsTensor)

    def set_extra_state(self, state: Any) -> None:
        """Does nothing."""


def install(model: nn.Module, absent: Mapping[str, torch.Size]) -> None:
    """Add placeholders for tensors that this rank lacks to the state dicts of a model, and ignore these tensors when
    loading.

    Args:
        absent: shapes of the tensors that this rank lacks, by dense name.
    """
    by_owner: dict[str, dict[str, torch.Size]] = {}
    for name, shape in absent.items():
        owner, _, attribute = name.rpartition(".")
        by_owner.setdefault(owner, {})[attribute] = shape
    for owner, shapes in by_owner.items():
        module = model.get_submodule(owner)
        module.register_state_dict_post_hook(partial(_show, shapes))
        module.register_load_state_dict_pre_hook(partial(_leave, shapes))


def _show(shapes: Mapping[str, torch.Size], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    for name, shape in shapes.items():
        if prefix + name in state:
            text = f"this rank lacks {prefix}{name}, so its state dict is partial; {_WAY}"
            state[prefix + name] = AbsentTensor.like(text, shape)


def _leave(shapes: Mapping[str, torch.Size], module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name, shape in shapes.items():
        given = state.get(prefix + name)
        if given is not None and given.size() == shape:
            state[prefix + name] = getattr(module, name)
