"""Random fills of large tensors: only what is wanted of them, by several threads, with the bits of one after the other.

PyTorch fills a contiguous tensor from the random stream in blocks of 16 elements, each from numbers of its own. So how
many numbers a fill draws is known, the state of the generator before each stretch of the tensor can be computed
(`mersenne_twister`), and stretches can be filled in any order, or not at all. Whether the installed PyTorch does it
that way is tried with each kind of fill before it is relied on; if not, they are done whole, one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from sdp_deepspeed.deferred_init.mersenne_twister import advance
from sdp_deepspeed.deferred_init.operation import Operation, Ref

Stretch = tuple[int, int]  # from the first element to before the last

MIN_JUMP = 1 << 22
"""Random numbers that are as well drawn: that takes as long as computing the state after them."""
MAX_STRETCH = 1 << 24
"""Elements that one thread fills at a time: twenty times what it could fill while its state is computed."""

_BLOCK = 16
_NUMBERS_PER_ELEMENT = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 1, torch.float64: 2}
_FILLS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def num_numbers(operation: Operation) -> int | None:
    """How many 32-bit numbers an operation draws; None if only doing it can tell."""
    if operation.call not in _FILLS or operation.kwargs:
        return None
    (target,) = operation.targets
    per_element, count = _NUMBERS_PER_ELEMENT.get(target.dtype), target.num_elements
    # Other layouts are filled element by element; a last block that is not full is filled twice.
    if per_element is None or not target.is_contiguous or count % _BLOCK or count < MIN_JUMP:
        return None
    return count * per_element if _is_as_expected(operation.call, operation.args[1:], target.dtype) else None


def pass_over(operation: Operation) -> bool:
    """Move the random stream on as the operation would, without doing it; False if only doing it can."""
    count = num_numbers(operation)
    if count is not None:
        _pass_over(count)
    return count is not None


def _pass_over(count: int) -> None:
    if count < MIN_JUMP:
        torch.empty(count, dtype=torch.int32, device="cpu").random_()
    else:
        torch.set_rng_state(advance(torch.get_rng_state(), count))


@cache
def _is_as_expected(fill: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether a fill in two parts, and states that are computed, are those of the fill as a whole."""
    count = 1 << 16
    generator = torch.Generator(device="cpu").manual_seed(0)
    torch.empty(3, dtype=torch.float32, device="cpu").normal_(
        generator=generator
    )  # leaves half of a pair of normal numbers
    before = generator.get_state()
    whole, parts = torch.empty(2, count, dtype=dtype, device="cpu")
    fill(whole, *args, generator=generator)
    after = generator.get_state()
    fill(parts[: count // 2], *args, generator=generator.set_state(before))
    fill(parts[count // 2 :], *args, generator=generator)
    states = (generator.get_state(), advance(before, count * _NUMBERS_PER_ELEMENT[dtype]))
    return torch.equal(whole, parts) and all(torch.equal(state, after) for state in states)


def _stretches(wanted: Iterable[Stretch]) -> list[Stretch]:
    """The least that is worth filling: whole blocks, and what lies between two stretches if a jump takes longer."""
    result: list[Stretch] = []
    for start, stop in wanted:
        aligned = (start // _BLOCK * _BLOCK, -(-stop // _BLOCK) * _BLOCK)
        if result and aligned[0] - result[-1][1] < MIN_JUMP:
            aligned = (result.pop()[0], aligned[1])
        result.append(aligned)
    return result


class Fills:
    """Fills that run in the background, while the random stream is already behind them.

    Args:
        pool: None does them at once.
        num_threads: of the pool.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, num_threads: int) -> None:
        self._pool = pool
        self._most_running = num_threads + 2  # which bounds the memory of tensors in the making
        self._running: deque[Future[Any]] = deque()
        self._of_storage: dict[int, list[Future[Any]]] = {}

    @classmethod
    @contextmanager
    def in_threads(cls, num_threads: int) -> Iterator[Fills]:
        """Inside, fills run in so many threads; after an error none is left."""
        if num_threads == 1:
            yield cls(None, 1)
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="sdp-init") as pool:
            yield cls(pool, num_threads)

    def begin(
        self,
        operation: Operation,
        memory: Mapping[int, torch.UntypedStorage],
        parts: Mapping[Ref, Sequence[Stretch]],
    ) -> bool:
        """Do an operation, or begin to; False if it is none that can be divided.

        Args:
            memory: by address, the storage that it fills.
            parts: what of a tensor must be filled, if not all of it.
        """
        count = num_numbers(operation)
        if count is None:
            return False
        (target,) = operation.targets
        size, here = target.num_elements, 0
        flat, per_element = target.view(memory[target.storage]).view(-1), count // size
        for start, stop in _stretches(parts.get(target, [(0, size)])):
            _pass_over((start - here) * per_element)
            self._fill(operation, flat[start:stop], per_element)
            here = stop
        _pass_over((size - here) * per_element)
        return True

    def _fill(self, operation: Operation, values: torch.Tensor, per_element: int) -> None:
        _, *args = operation.args
        if self._pool is None:
            operation.call(values, *args)
            return
        futures = self._of_storage.setdefault(operation.targets[0].storage, [])
        for part in values.split(MAX_STRETCH):
            if len(self._running) >= self._most_running:
                self._running.popleft().result()
            generator = torch.Generator(device="cpu").set_state(torch.get_rng_state())
            futures.append(self._pool.submit(operation.call, part, *args, generator=generator))
            self._running.append(futures[-1])
            _pass_over(len(part) * per_element)

    def wait(self, storage: int) -> None:
        """Until nothing fills the storage any more; raises what went wrong there."""
        for future in self._of_storage.pop(storage, ()):
            future.result()

    def are_done(self, storage: int) -> bool:
        return all(future.done() for future in self._of_storage.get(storage, ()))
