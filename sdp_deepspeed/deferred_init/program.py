"""What an initialization did to tensors without storage, and how to do it again with storage for few of them.

The program is the list of operations in their order. Run again, it draws from the random stream exactly what building
the dense model draws, but each tensor exists only from the operation that its final value begins with to the last one
that touches it: then it is handed over, and gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from sdp_deepspeed.deferred_init.fills import Fills, Stretch, pass_over
from sdp_deepspeed.deferred_init.operation import Operation, Ref, address


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

    def run(
        self,
        wanted: Iterable[int],
        *,
        parts: Mapping[Ref, Sequence[Stretch]] | None = None,
        num_threads: int = 1,
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Each of the storages `wanted` with its final data, as soon as that is final; draws from the random stream.

        Whoever takes them decides how long they live: nothing here keeps them.

        Args:
            parts: of tensors that are wanted in part the elements that are, ascending; the others may be anything.
            num_threads: that fill tensors with random numbers; the values do not depend on it.
        """
        left = set(wanted)
        operations = self._needed_operations(left)
        last = {
            storage: number
            for number, (operation, _) in enumerate(operations)
            for storage in operation.writes | operation.reads
        }
        read = {storage for operation, _ in operations for storage in operation.reads}  # as a whole, maybe
        parts = {ref: stretches for ref, stretches in (parts or {}).items() if ref.storage not in read}
        memory: dict[int, torch.UntypedStorage] = {}
        final: deque[tuple[int, torch.UntypedStorage]] = deque()
        for generator, state in self.generators.values():
            generator.set_state(state)
        with Fills.in_threads(num_threads) as fills:
            for number, (operation, matters) in enumerate(operations):
                if not matters:
                    if not pass_over(operation):
                        operation.call(*_scratch(operation.args), **_scratch(operation.kwargs))
                    continue
                self._run(operation, memory, fills, parts)
                for storage in [storage for storage in memory if last[storage] == number]:
                    data = memory.pop(storage)
                    if storage in left:
                        left.remove(storage)
                        final.append((storage, data))
                    del data
                while final and fills.are_done(final[0][0]):
                    fills.wait(final[0][0])  # for its error
                    yield final.popleft()
            while final:
                fills.wait(final[0][0])
                yield final.popleft()
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

    def _run(
        self,
        operation: Operation,
        memory: dict[int, torch.UntypedStorage],
        fills: Fills,
        parts: Mapping[Ref, Sequence[Stretch]],
    ) -> None:
        for storage in operation.writes | operation.reads:
            fills.wait(storage)
        skips = operation.is_random and not self.draws
        for storage in operation.writes if skips else operation.reads | {ref.storage for ref in operation.targets}:
            if storage not in memory:
                zeros = skips or storage not in operation.replaces
                memory[storage] = allocate(self.storages[storage].nbytes(), zeros=zeros)
        if skips or fills.begin(operation, memory, parts):
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
