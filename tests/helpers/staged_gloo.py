"""Gloo for tensors on a GPU, by way of host memory: several ranks share one GPU, which NCCL refuses.

Gloo itself has no all-to-all for a GPU's tensors. This group copies every argument to the host, runs gloo there, and
copies the results back in `wait`. With tensors on the CPU it does the same, so that it can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda
from torch.utils._pytree import tree_leaves, tree_map_only

BACKEND = "staged"
# Gloo's methods whose first argument is what they fill in.
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base"),
)
LATE = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base")
# Torch 2.13's names of a group's methods for those of gloo.
NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}


class Staged(dist.Work):
    """A collective that runs on the host.

    Args:
        work: gloo's.
        results: each tensor with its copy on the host.
    """

    def __init__(self, work: Any, results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._results = work, results

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """The results are there, in the current stream."""
        self._work.wait(timeout)
        with torch.no_grad():
            for tensor, copy in self._results:
                tensor.copy_(copy)
        self._results = []
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class Late(dist.Work):
    """A collective as NCCL runs it: on a stream of its own that is behind, both when it reads and when it writes. All
    ranks must wait for collectives in the same order, as gloo begins when it is waited for.

    Args:
        start: gloo's method.
        results: what it fills in, beside its other arguments.
        is_waited_for: whether `wait` makes the current stream wait, as it must.
    """

    CYCLES = 4_000_000  # some two milliseconds, far longer than what a small model starts meanwhile

    def __init__(self, start: Callable[..., Any], results: Any, arguments: Any, *, is_waited_for: bool) -> None:
        super().__init__()
        self._start, self._is_waited_for = start, is_waited_for
        self._results, self._kept = results, arguments  # as torch keeps both until they are waited for
        self._stream = cuda.Stream()
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            cuda._sleep(self.CYCLES)
            self._copies, self._others = tree_map_only(torch.Tensor, _on_host_later, (results, arguments))

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self._results is None:
            return True
        self._stream.synchronize()
        self._start(self._copies, *self._others).wait(timeout)
        with cuda.stream(self._stream), torch.no_grad():
            cuda._sleep(self.CYCLES)
            for tensor, copy in zip(tree_leaves(self._results), tree_leaves(self._copies), strict=True):
                tensor.copy_(copy, non_blocking=True)
        if self._is_waited_for:
            cuda.current_stream().wait_stream(self._stream)
        self._results = self._kept = None
        return True


class StagedGloo(dist.ProcessGroup):
    """A group over gloo whose tensors may be anywhere.

    Attributes:
        is_late: whether the collectives of LATE are `Late`, on all groups of the process.
        is_waited_for: `Late`'s.
    """

    is_late = False
    is_waited_for = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:
        """The base class looks for it in a backend of its own."""
        return str(dist.distributed_c10d._get_process_group_name(self))

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Gloo's group, with the options of the run."""
        return self._gloo

    def barrier(self, *arguments: Any, **options: Any) -> Any:
        return self._gloo.barrier(*arguments, **options)

    def send(self, tensors: list[torch.Tensor], *arguments: Any) -> Any:
        return self._gloo.send([_on_host(tensor) for tensor in tensors], *arguments)


def _staged(name: str) -> Callable[..., Any]:
    def call(self: StagedGloo, results: Any, *arguments: Any, **options: Any) -> Staged | Late:
        if self.is_late and name in LATE:
            return Late(getattr(self._gloo, name), results, arguments, is_waited_for=self.is_waited_for)
        copies, others = tree_map_only(torch.Tensor, _on_host, (results, arguments))
        work = getattr(self._gloo, name)(copies, *others, **options)
        return Staged(work, list(zip(tree_leaves(results), tree_leaves(copies), strict=True)))

    return call


for _name in COLLECTIVES:
    setattr(StagedGloo, _name, _staged(_name))
    setattr(StagedGloo, NEW_NAMES.get(_name, _name), _staged(_name))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _on_host_later(tensor: torch.Tensor) -> torch.Tensor:
    """In page-locked memory, so that nobody waits for it here."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


def register() -> None:
    """`init_process_group("staged")` and `new_group()` make such groups from now on."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, StagedGloo, devices=["cpu", "cuda"])
