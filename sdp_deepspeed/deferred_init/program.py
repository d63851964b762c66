"""What an initialization did to tensors without storage, and how to do it again with storage for few of them.

The program is the list of operations in their order. Run again, it draws from the random stream exactly what building
the dense model draws, but each tensor exists only from the operation that its final value begins with to the last one
that touches it: then it is handed over, and gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


def address(tensor: torch.Tensor) -> int:
    """Of the tensor's storage, with or without data; no other storage has it as long as this one lives."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Ref:
    """A tensor as a view into a storage, without data.

    Args:
        storage: its address.
        offset, size, stride: in elements.
    """

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Ref:
        offset = int(tensor.storage_offset())
        return cls(address(tensor), offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie without gaps or overlaps."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def covers(self, num_bytes: int) -> bool:
        """Whether it is all of a storage of that size."""
        count = torch.Size(self.size).numel()
        return self.offset == 0 and self.is_dense and count * self.dtype.itemsize == num_bytes

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in a storage with data."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """A tensor of the same layout for values that nobody needs."""
        pairs = zip(self.size, self.stride, strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in pairs) if 0 not in self.size else 0
        return torch.empty(count, dtype=self.dtype, device="cpu").as_strided(self.size, self.stride)


@dataclass(frozen=True)
class Operation:
    """One call of the constructor, to be made again.

    Args:
        call: with `args` and `kwargs`, in which tensors without data are `Ref`s.
        births: outputs that got a storage of their own, by their position among all outputs.
        targets: what is written in place.
        reads: storages whose values it needs.
        replaces: storages of which it leaves nothing as it was.
        is_random: whether it draws from the random stream.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    births: tuple[tuple[int, Ref], ...] = ()
    targets: tuple[Ref, ...] = ()
    reads: frozenset[int] = frozenset()
    replaces: frozenset[int] = frozenset()
    is_random: bool = False

    @property
    def writes(self) -> frozenset[int]:
        return frozenset(ref.storage for ref in (*(ref for _, ref in self.births), *self.targets))


@dataclass
class Program:
    """Operations in their order.

    Args:
        rng_state: of PyTorch's generator for the CPU before the first one.
        draws: whether random values are drawn; else they are zeros, for a checkpoint that overwrites them.

    Attributes:
        state_at_end: of the same generator when the program had been written, as long as nobody used it since.
        storages: by address, kept alive so that no other storage gets an address of theirs.
        generators: other generators that were used, with their state before.
    """

    rng_state: torch.Tensor
    draws: bool = True
    state_at_end: torch.Tensor = field(default_factory=torch.get_rng_state)
    operations: list[Operation] = field(default_factory=list)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    generators: dict[int, tuple[torch.Generator, torch.Tensor]] = field(default_factory=dict)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """A tensor as seen by the program, which now knows its storage."""
        self.storages.setdefault(address(tensor), tensor.untyped_storage())
        return Ref.of(tensor)

    def never_written(self, storages: Iterable[int]) -> set[int]:
        """Those of which no operation says what is in them."""
        return set(storages).difference(*[operation.writes for operation in self.operations])

    def run(self, wanted: Iterable[int]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Each of the storages `wanted` with its final data, as soon as that is final; draws from the random stream.

        Whoever takes them decides how long they live: nothing here keeps them.
        """
        left = set(wanted)
        operations = self._needed_operations(left)
        last = {
            storage: number
            for number, (operation, _) in enumerate(operations)
            for storage in operation.writes | operation.reads
        }
        memory: dict[int, torch.UntypedStorage] = {}
        for generator, state in self.generators.values():
            generator.set_state(state)
        for number, (operation, matters) in enumerate(operations):
            if not matters:
                operation.call(*_scratch(operation.args), **_scratch(operation.kwargs))
                continue
            self._run(operation, memory)
            for storage in [storage for storage in memory if last[storage] == number]:
                final = memory.pop(storage)
                if storage in left:
                    left.remove(storage)
                    yield storage, final
                del final
        for storage in left:
            yield storage, allocate(self.storages[storage].nbytes(), zeros=True)

    def _needed_operations(self, wanted: Iterable[int]) -> list[tuple[Operation, bool]]:
        """What makes the values in storages `wanted`, and what only moves the random stream on (False).

        Values that are replaced before anybody reads them are made by nobody. How much a random operation draws does
        not depend on what was in its target; it may on other tensors, so that those are made.
        """
        needed = set(wanted)
        result = []
        for operation in reversed(self.operations):
            matters = not needed.isdisjoint(operation.writes) or bool(operation.is_random and operation.reads)
            if matters:
                needed -= operation.replaces
                needed |= operation.reads | (operation.writes - operation.replaces)
            if matters or (operation.is_random and self.draws):
                result.append((operation, matters))
        return result[::-1]

    def _run(self, operation: Operation, memory: dict[int, torch.UntypedStorage]) -> None:
        skips = operation.is_random and not self.draws
        for storage in operation.writes if skips else operation.reads | {ref.storage for ref in operation.targets}:
            if storage not in memory:
                zeros = skips or storage not in operation.replaces
                memory[storage] = allocate(self.storages[storage].nbytes(), zeros=zeros)
        if skips:
            return
        args, kwargs = tree_map_only(Ref, lambda ref: ref.view(memory[ref.storage]), (operation.args, operation.kwargs))
        outputs = tree_leaves(operation.call(*args, **kwargs))
        for position, ref in operation.births:
            memory[ref.storage] = self._as_recorded(ref, outputs[position])

    def _as_recorded(self, ref: Ref, output: torch.Tensor) -> torch.UntypedStorage:
        """Storage with the output where `ref` says: kernels on the meta device may choose other strides."""
        size = self.storages[ref.storage].nbytes()
        if Ref.of(output) == Ref(address(output), ref.offset, ref.size, ref.stride, ref.dtype):
            storage = output.untyped_storage()
            if storage.nbytes() == size:
                return storage
        storage = allocate(size, zeros=False)
        ref.view(storage).copy_(output)
        return storage


def _scratch(tree: Any) -> Any:
    return tree_map_only(Ref, Ref.scratch, tree)


def allocate(num_bytes: int, *, zeros: bool, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    make = torch.zeros if zeros else torch.empty
    return make(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
