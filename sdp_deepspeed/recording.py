"""Record operations on meta tensors, so that each of the tensors can be computed later, independently.

Operations that draw random numbers are seeded by their position in the recording. Values depend on the recording and
the seed only, not on which tensors are computed, or in which order.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_BLANK = {f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")}
# In-place operations that overwrite their target completely.
_REPLACING = {f"aten::{name}_" for name in ("normal", "uniform", "zero", "fill", "copy", "exponential", "bernoulli")}


@dataclass(frozen=True)
class Ref:
    """Reference to a tensor without data: a view into a numbered storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Operation:
    """A recorded call, with Refs in place of meta tensors.

    Args:
        replaces: storages that the call overwrites completely.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Mapping[int, Ref]
    reads: frozenset[int]
    replaces: frozenset[int]
    is_random: bool


def is_meta(value: Any) -> bool:
    """Whether a value is a meta tensor, even if `Tensor.is_meta` is overridden."""
    return isinstance(value, torch.Tensor) and value.untyped_storage().device.type == "meta"


class Recording(TorchDispatchMode):
    """Context that records operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # indices of operations, by storage
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that ids are unique
        self._numbers: dict[int, int] = {}

    def ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(id(storage), len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        return Ref(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if not func.is_view and any(map(is_meta, tree_leaves((args, kwargs, result)))):
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name, arguments = func._schema.name, func._schema.arguments
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        targets = []
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = tree_leaves(values.get(argument.name))
                targets += [self.ref(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        replaced = [ref for ref in targets if name in _REPLACING and self._fills_storage(ref)]
        names = {argument.name for argument in arguments}
        if "device" in names:
            kwargs["device"] = "cpu"
        if {"device", "dtype"} <= names:  # the default dtype may change
            kwargs["dtype"] = result.dtype
        kwargs.pop("generator", None)
        args, kwargs = tree_map_only(torch.Tensor, self._without_data, (args, kwargs))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ref)]
        known = {ref.storage for ref in inputs}
        outputs = {}
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and (ref := self.ref(leaf)).storage not in known:
                outputs[position] = ref
        if name in _BLANK:
            return
        reads = frozenset(ref.storage for ref in inputs if ref not in replaced)
        new = frozenset(ref.storage for ref in (*replaced, *outputs.values())) - reads
        for storage in {ref.storage for ref in (*targets, *outputs.values())}:
            self._writers[storage].append(len(self._operations))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self._operations.append(Operation(func, args, kwargs, outputs, reads, new, is_random))

    def _fills_storage(self, ref: Ref) -> bool:
        num_bytes = torch.Size(ref.shape).numel() * ref.dtype.itemsize
        return num_bytes == self._storages[ref.storage].nbytes() and 0 not in ref.stride

    def _without_data(self, tensor: torch.Tensor) -> Ref | torch.Tensor:
        return self.ref(tensor) if is_meta(tensor) else tensor.detach().clone()

    def is_written(self, ref: Ref) -> bool:
        """Whether any operation wrote to the tensor's storage."""
        return ref.storage in self._writers

    @torch.no_grad()
    def value(self, ref: Ref, seed: int) -> torch.Tensor:
        """Compute a tensor, and everything it depends on, on the CPU. Elements that nothing wrote to are NaN.

        The result equals that of the same operations on the CPU, except for random numbers. Changes PyTorch's random
        state.
        """
        memory: dict[int, torch.UntypedStorage] = {}

        def with_data(ref: Ref) -> torch.Tensor:
            if ref.storage not in memory:
                num_bytes = self._storages[ref.storage].nbytes()
                blank = torch.full((num_bytes,), 255, dtype=torch.uint8, device="cpu")  # NaN in each floating dtype
                memory[ref.storage] = blank.untyped_storage()
            return ref.view(memory[ref.storage])

        for index in self._needed_for(ref.storage):
            operation = self._operations[index]
            if operation.is_random:
                digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
                torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
            args, kwargs = tree_map_only(Ref, with_data, (operation.args, operation.kwargs))
            results = tree_leaves(operation.call(*args, **kwargs))
            memory |= {ref.storage: results[i].untyped_storage() for i, ref in operation.outputs.items()}
        return with_data(ref)

    def _needed_for(self, storage: int) -> list[int]:
        """Indices of the operations that determine a storage's values, ascending."""
        needed: set[int] = set()
        waiting = [(storage, len(self._operations))]
        while waiting:
            storage, end = waiting.pop()
            for index in reversed(self._writers.get(storage, ())):
                if index >= end:
                    continue
                operation = self._operations[index]
                if index not in needed:
                    needed.add(index)
                    waiting += [(read, index) for read in operation.reads if read != storage]
                if storage in operation.replaces:
                    break
        return sorted(needed)
