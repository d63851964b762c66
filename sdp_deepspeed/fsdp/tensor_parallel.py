"""Tensor parallelism inside of units: FSDP2 shards what this rank has of each parameter, and TP sees DTensors.

FSDP2 makes one DTensor over both axes, which it can only where both meshes are slices of one root mesh
(`DeviceMesh._concatenate` compares the ranks of the roots). Holders are any subset of the data-parallel ranks, which is
no slice of the user's mesh; and over a root of their own the weights' mesh would not equal that of the activations,
which DTensor's operators refuse. So the two stay apart: before FSDP2 shards it, a DTensor is replaced by its local part
(which shares its memory), and while its module runs, the module has it as the DTensor again (`DTensor.from_local`,
which autograd goes through).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.fsdp.parts import chunk
from sdp_deepspeed.masking.partial import PartialTensor
from sdp_deepspeed.messages import listed, quoted
from sdp_deepspeed.parallel.agree import gather_objects
from sdp_deepspeed.plan.shards import Division, Shards

_REFUSAL = (
    "under tensor parallelism the parts of all its ranks have one name, so only one would be saved; use "
    "sdp_deepspeed.fsdp.CheckpointManager or full_state_dict"
)


@dataclass(frozen=True)
class _Whole:
    """What makes a DTensor of a local part."""

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

    def division(self, size: int) -> Division | None:
        """Among so many ranks, as `torch.chunk` does it; None if each of them has all."""
        (placement,) = self.placements
        if not isinstance(placement, Shard):
            return None
        dim = placement.dim % len(self.shape)
        ends = [chunk(self.shape[dim], place, size) for place in range(size)]
        return Division(tuple(self.shape), dim, tuple(stop - start for start, stop in ends))

    def around(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass
class TensorParallel:
    """Of one rank.

    Args:
        columns: the data-parallel groups, one for each tensor-parallel rank: ranks of the default group.
    """

    columns: tuple[tuple[int, ...], ...]
    _given: list[tuple[nn.Module, str, Any]] = field(default_factory=list)  # as they were
    _wholes: dict[str, _Whole] = field(default_factory=dict)  # by name in the model
    _hooks: list[Any] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.columns)

    def take_local(self, module: Any) -> None:
        """Replace all DTensors of a model by their local parts; who was one parameter stays one."""
        local: dict[int, nn.Parameter] = {}
        for path, inner in list(module.named_modules()):
            wholes: dict[str, _Whole] = {}
            for name, given in list(inner.named_parameters(recurse=False, remove_duplicate=False)):
                tensor: Any = given
                if isinstance(tensor, DTensor):
                    wholes[name] = self._wholes[f"{path}.{name}".lstrip(".")] = _Whole.of(tensor)
                    if id(given) not in local:
                        part: torch.Tensor = tensor.to_local().detach().contiguous()  # as FSDP2 wants it
                        local[id(given)] = nn.Parameter(part, requires_grad=given.requires_grad)
                    self._given.append((inner, name, given))
                    inner.register_parameter(name, local[id(given)])
            if wholes:
                self._hooks += _show_while_it_runs(inner, wholes)
            if any(whole.is_divided for whole in wholes.values()):
                self._hooks.append(inner.register_state_dict_post_hook(partial(_refuse, wholes)))

    def __enter__(self) -> TensorParallel:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """With an error the model is again as it was given. What was given is dropped: it would keep all in memory."""
        if kind is not None:
            for inner, name, parameter in self._given:
                inner.register_parameter(name, parameter)
            for hook in self._hooks:
                hook.remove()
        self._given.clear()
        self._hooks.clear()

    def shards(self, index: int) -> Shards:
        """What one tensor-parallel rank has of each parameter."""
        divisions = {name: whole.division(self.size) for name, whole in self._wholes.items()}
        return Shards(index, self.size, {name: known for name, known in divisions.items() if known})

    def is_divided(self, name: str) -> bool:
        """Whether tensor-parallel ranks have different parts of a parameter; else they have the same."""
        return name in self._wholes and self._wholes[name].is_divided

    def around(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The DTensor of which this rank has a local part; that itself, if the parameter was no DTensor."""
        return self._wholes[name].around(local) if name in self._wholes else local


def check_per_head(module: nn.Module, branches: Sequence[LocatedBranch]) -> None:
    """Refuse plain parameters that run on each head alike where ranks have some of the heads each: each would have its
    own heads' part of their gradient, and nobody would add these up.

    Raises:
        ValueError: by name, with what to write.
    """
    parameters = dict(module.named_parameters())
    plain: list[str] = []
    for branch in branches:
        own = [piece.parameter for piece in branch.pieces if piece.parameter in parameters]
        inner = branch.description.inner
        if inner is not None and any(_is_divided(parameters[name]) for name in own):
            inside = tuple(f"{branch.root}.{norm}." for norm in inner.per_head)
            plain += [name for name in own if name.startswith(inside) and not isinstance(parameters[name], DTensor)]
    if plain:
        raise ValueError(
            f"fully_shard: {quoted(plain)} runs on the heads of each tensor-parallel rank, and nobody would add up its "
            "gradients, as it is no DTensor: give its module a style in parallelize_module, for norms of queries and "
            "keys SequenceParallel(sequence_dim=2, use_local_output=True)"
        )


def _is_divided(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and _Whole.of(tensor).is_divided


def columns_of(module: nn.Module, mesh: DeviceMesh, control: Any) -> tuple[tuple[int, ...], ...]:
    """The data-parallel meshes of all tensor-parallel ranks, this rank's among them; none where there is one for all.
    Every rank calls it.

    Raises:
        ValueError: on all ranks, if these are not the columns of one grid whose rows are the DTensors' meshes.
    """
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    own = tuple(mesh.mesh.tolist())
    gathered = gather_objects((own, [tuple(other.mesh.flatten().tolist()) for other in meshes]), control)
    columns = tuple(sorted({column for column, _ in gathered}))
    if len(columns) == 1 and not any(rows for _, rows in gathered):
        return ()
    rows = set(zip(*columns, strict=False))
    everybody = sorted(rank for column in columns for rank in column)
    of_dtensors = sorted({row for _, own_rows in gathered for row in own_rows})
    is_grid = everybody == list(range(len(gathered))) and len({len(column) for column in columns}) == 1
    if not is_grid or any(
        other not in rows or rank not in other for rank, (_, own) in enumerate(gathered) for other in own
    ):
        raise ValueError(
            f"fully_shard: mesh: got ranks {listed(columns)} on different ranks, and DTensors over ranks "
            f"{listed(of_dtensors)}, expected both to be axes of one mesh of all {len(gathered)} ranks: "
            'init_device_mesh(..., (dp, tp), mesh_dim_names=("dp", "tp")), then mesh["tp"] for '
            'parallelize_module and mesh["dp"] here'
        )
    return columns


def _show_while_it_runs(module: nn.Module, wholes: dict[str, _Whole]) -> list[Any]:
    """What a module finds under the name of its parameter is the DTensor while it runs: an attribute of the instance
    comes before its parameters. FSDP2's hooks are around these."""

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
