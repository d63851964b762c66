"""Bytes that one rank sends, counted where every host's collectives pass: PyTorch's c10d operators.

Both engines are counted here in the same way, whatever they call above. An exchange with explicit splits is exact;
a reduction or a gathering counts the least that any algorithm must send (what a ring sends), since the backend's own
choice is not visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.held_bytes import tensors_in

# Operators that carry no payload worth counting.
_CONTROL = {"barrier", "monitored_barrier_", "check_for_nan", "recv_", "recv_any_source_"}


def _num_bytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


def _others_share(num_bytes: int, num_ranks: int) -> int:
    """The part of `num_bytes`, cut into one share per rank, that belongs to the other ranks."""
    return num_bytes * (num_ranks - 1) // num_ranks


def _all_to_all_bytes(tensor: torch.Tensor, splits: Sequence[int], num_ranks: int, rank: int) -> int:
    """Bytes of `tensor`'s rows that do not stay on `rank`; empty `splits` mean equal shares."""
    if not splits:
        return _others_share(_num_bytes(tensor), num_ranks)
    rows = tensor.size(0)
    row_bytes = _num_bytes(tensor) // rows if rows else 0
    return row_bytes * (sum(splits) - splits[rank])


def sent_bytes(operator: str, arguments: Mapping[str, Any], num_ranks: int, rank: int) -> int:
    """Bytes that `rank` sends in one call of a c10d operator.

    Args:
        operator: its name without namespace, e.g. "allreduce_".
        arguments: the call's arguments by their names in the operator's schema.
        num_ranks: size of the process group.
        rank: this process's rank in the group.

    Raises:
        RuntimeError: an operator that is not known here; counting it as nothing would flatter someone.
    """
    if operator in _CONTROL:
        return 0
    if operator in {"allreduce_", "allreduce_coalesced_"}:
        return 2 * _others_share(_num_bytes(arguments["tensors"]), num_ranks)
    if operator == "broadcast_":  # a chain: everybody but its end passes the tensor on; the mean over ranks
        return _others_share(_num_bytes(arguments["tensors"]), num_ranks)
    if operator == "reduce_":  # a chain that ends at the root
        return 0 if rank == arguments["root_rank"] else _num_bytes(arguments["tensors"])
    for name in ("input_tensor", "inputs", "input_tensors", "input_list"):
        if operator.lstrip("_").startswith("reduce_scatter") and name in arguments:
            return _others_share(_num_bytes(arguments[name]), num_ranks)
        if operator.lstrip("_").startswith("allgather") and name in arguments:
            return (num_ranks - 1) * _num_bytes(arguments[name])
    if operator == "alltoall_base_":
        return _all_to_all_bytes(arguments["input"], arguments["input_split_sizes"], num_ranks, rank)
    if operator == "send":
        return _num_bytes(arguments["tensors"])
    raise RuntimeError(
        f"c10d operator {operator!r} is not known to the traffic counter: add it to {__name__}.sent_bytes"
    )


class TrafficCounter(TorchDispatchMode):
    """Counts what this rank sends while the block runs; on every rank that is to be counted.

    Attributes:
        total: bytes sent.
        calls_by_operator: number of calls, by c10d operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.calls_by_operator: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operator = func._schema.name.removeprefix("c10d::")
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        group = dist.ProcessGroup.unbox(arguments["process_group"]) if "process_group" in arguments else None
        if group is None or group.size() == 1:
            return
        self.calls_by_operator[operator] += 1
        self.total += sent_bytes(operator, arguments, group.size(), group.rank())
