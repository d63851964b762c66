"""Tensor parallelism inside units: FSDP2 shards the local part of each parameter, and modules see DTensors.

FSDP2 combines both axes in one DTensor, which requires that both meshes are slices of one root mesh
(`DeviceMesh._concatenate` compares the ranks of the roots). Holders are an arbitrary subset of the data-parallel ranks,
which is not a slice of the user's mesh. With a separate root, the mesh of the weights would differ from that of the
activations, which DTensor's operators refuse. So the two are kept apart: before FSDP2 shards it, a DTensor is replaced
by its local part, which shares its memory. While its module runs, the module sees the DTensor again
(`DTensor.from_local`, which is differentiable).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.fsdp.parts import chunk_range
from sdp_deepspeed.masking.placeholders import PartialTensor
from sdp_deepspeed.messages import listed, quoted
from sdp_deepspeed.parallel.consistency import gather_objects
from sdp_deepspeed.plan.tensor_parallel_shards import Division, TensorParallelShards

_REFUSAL = (
    "under tensor parallelism all ranks' parts have the same name, so only one would be saved; use "
    "sdp_deepspeed.fsdp.CheckpointManager or full_state_dict"
)


@dataclass(frozen=True)
class _Whole:
    """The metadata to build a DTensor from a local part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> _Whole:
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    @property
    def is_divided(self) -> bool:
        return any(isinstance(placement, Shard) for placement in self.placements)

    def division(self, size: int) -> Division:
        """How `torch.chunk` divides the tensor among ranks."""
        (placement,) = self.placements
        assert isinstance(placement, Shard)
        dim = placement.dim % len(self.shape)
        ends = [chunk_range(self.shape[dim], place, size) for place in range(size)]
        return Division(tuple(self.shape), dim, tuple(stop - start for start, stop in ends))

    def around(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass
class ReplacedDTensors:
    """Tensor parallelism of a model, on one rank.

    Args:
        columns: global ranks of the data-parallel mesh of each tensor-parallel rank; one without tensor parallelism.
        exist: whether parameters are DTensors.
    """

    columns: tuple[tuple[int, ...], ...]
    exist: bool
    _given: list[tuple[nn.Module, str, Any]] = field(default_factory=list)  # the original DTensors
    _wholes: dict[str, _Whole] = field(default_factory=dict)  # by name in the model
    _hooks: list[Any] = field(default_factory=list)

    def take_local(self, module: Any) -> None:
        """Replace all DTensors of a model by their local parts; tied parameters stay tied."""
        local: dict[int, nn.Parameter] = {}
        for path, inner in list(module.named_modules()):
            wholes: dict[str, _Whole] = {}
            for name, given in list(inner.named_parameters(recurse=False, remove_duplicate=False)):
                tensor: Any = given
                if isinstance(tensor, DTensor):
                    wholes[name] = self._wholes[f"{path}.{name}".lstrip(".")] = _Whole.of(tensor)
                    if id(given) not in local:
                        part: torch.Tensor = tensor.to_local().detach().contiguous()  # required by FSDP2
                        local[id(given)] = nn.Parameter(part, requires_grad=given.requires_grad)
                    self._given.append((inner, name, given))
                    inner.register_parameter(name, local[id(given)])
            if wholes:
                self._hooks += _show_while_it_runs(inner, wholes)
            if any(whole.is_divided for whole in wholes.values()):
                self._hooks.append(inner.register_state_dict_post_hook(partial(_refuse, wholes)))

    def __enter__(self) -> ReplacedDTensors:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Restore the model after an error. Drop the references to the original DTensors."""
        if kind is not None:
            for inner, name, parameter in self._given:
                inner.register_parameter(name, parameter)
            for hook in self._hooks:
                hook.remove()
        self._given.clear()
        self._hooks.clear()

    def shards(self, index: int) -> TensorParallelShards:
        """The part of each parameter on a tensor-parallel rank."""
        size = len(self.columns)
        divisions = {name: whole.division(size) for name, whole in self._wholes.items() if whole.is_divided}
        return TensorParallelShards(index, size, divisions)

    def around(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The DTensor of a local part; the part itself if the parameter was not a DTensor."""
        return self._wholes[name].around(local) if name in self._wholes else local


def check_per_head(module: nn.Module, branches: Sequence[LocatedBranch]) -> None:
    """Raise ValueError for plain parameters that are applied to each head, if heads are sharded: each rank would have a
    partial gradient, from its own heads, that is not summed."""
    parameters = dict(module.named_parameters())
    plain: list[str] = []
    for branch in branches:
        of_branch: list[Any] = [parameters[piece.parameter] for piece in branch.pieces if piece.parameter in parameters]
        if any(isinstance(parameter, DTensor) and _Whole.of(parameter).is_divided for parameter in of_branch):
            plain += [name for name in branch.per_head_parameters if not isinstance(parameters[name], DTensor)]
    if plain:
        raise ValueError(
            f"fully_shard: {quoted(plain)} is applied to the heads of one rank, so its gradient is partial; "
            "parallelize its module, for example with SequenceParallel(sequence_dim=2, use_local_output=True)"
        )


def find_dtensors(module: nn.Module, mesh: DeviceMesh, control: dist.ProcessGroup) -> ReplacedDTensors:
    """Find which ranks have the same parts of a model's DTensors, if it has any. Collective.

    Raises:
        ValueError: on all ranks, if these and the DTensors' meshes are not columns and rows of one grid.
    """
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    column = tuple(mesh.mesh.tolist())
    gathered = gather_objects((column, [tuple(other.mesh.flatten().tolist()) for other in meshes]), control)
    columns = tuple(sorted({column for column, _ in gathered}))
    if len(columns) == 1 and not any(rows for _, rows in gathered):
        return ReplacedDTensors(columns, exist=False)
    rows = set(zip(*columns, strict=False))
    everybody = sorted(rank for column in columns for rank in column)
    of_dtensors = sorted({row for _, rows_of_rank in gathered for row in rows_of_rank})
    is_grid = everybody == list(range(len(gathered))) and len({len(column) for column in columns}) == 1
    if not is_grid or any(
        row not in rows or rank not in row for rank, (_, of_rank) in enumerate(gathered) for row in of_rank
    ):
        raise ValueError(
            f"fully_shard: mesh: got ranks {listed(columns)}, and DTensors over ranks {listed(of_dtensors)}, expected "
            f'axes of one mesh of {len(gathered)} ranks: mesh["tp"] in parallelize_module, mesh["dp"] here'
        )
    return ReplacedDTensors(columns, exist=True)


def _show_while_it_runs(module: nn.Module, wholes: dict[str, _Whole]) -> list[Any]:
    """Show a module its DTensors while it runs, as instance attributes, which precede its parameters. FSDP2's hooks run
    around these."""

    def show(inner: nn.Module, *_: Any) -> None:
        for name, whole in wholes.items():
            vars(inner)[name] = whole.around(inner.get_parameter(name))

    def hide(inner: nn.Module, *_: Any) -> None:
        for name in wholes:
            vars(inner).pop(name, None)

    return [module.register_forward_pre_hook(show), module.register_forward_hook(hide, always_call=True)]


def _refuse(wholes: dict[str, _Whole], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    for name, whole in wholes.items():
        if whole.is_divided and prefix + name in state:
            state[prefix + name] = PartialTensor.of(f"{prefix}{name}: {_REFUSAL}")
