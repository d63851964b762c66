"""Weights of a team, as its host stores them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from sdp_deepspeed.masking import Mask
from sdp_deepspeed.teams.dense_modules import like
from sdp_deepspeed.teams.ranks import TeamRanks
from sdp_deepspeed.teams.shares import Share, shares_by_name, shares_of


class TorchHost:
    """Reads and writes parameters of a bare module, of DistributedDataParallel, and of `fully_shard`.

    Other hosts have the same methods. All ranks of a team call them. Hosts that replace Parameters keep modules and
    names of attributes.

    Attributes:
        shapes: of the team's whole tensors, by dense name.
    """

    _model: nn.Module

    def __init__(self) -> None:
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self.shapes: dict[str, torch.Size] = {}

    def reduce(self, mask: Mask) -> None:
        """Reduce the model to the team's subnetwork."""
        mask.apply()
        self._model = mask.model
        for name in mask.pieces:
            if mask.stored_pieces(name):
                path, _, attribute = name.rpartition(".")
                self._places[name] = (mask.model.get_submodule(path), attribute)
                self.shapes[name] = mask.parameters[name].shape

    def prepare(self) -> None:
        """Call it first: a forward pass without a backward pass leaves modules of FSDP2 with copies of weights."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def read(self, name: str) -> torch.Tensor:
        """The team's whole tensor, detached."""
        parameter = self.parameter(name).detach()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def write(self, name: str, values: torch.Tensor) -> None:
        """Set the team's whole tensor."""
        parameter = self.parameter(name).detach()
        if isinstance(parameter, DTensor):
            values = values.to(parameter.device, parameter.dtype)
            mesh, placements = parameter.device_mesh, parameter.placements
            values = distribute_tensor(values, mesh, placements, src_data_rank=None).to_local()
            parameter = parameter.to_local()
        parameter.copy_(values)

    def local(self) -> list[torch.Tensor]:
        """What this rank has of each parameter."""
        self.prepare()
        parameters = [self.parameter(name) for name in self.shapes]
        return [value.to_local() if isinstance(value, DTensor) else value for value in parameters]

    def parameter(self, name: str) -> torch.Tensor:
        """The Parameter as it is in its module now."""
        module, attribute = self._places[name]
        parameter: torch.Tensor = getattr(module, attribute)
        return parameter


class Weights:
    """The pieces of dense tensors that a team stores.

    Args:
        host: reads and writes whole tensors of the team.
        mask: applied.

    Attributes:
        shares: this rank's, of all dense tensors.
    """

    def __init__(self, host: TorchHost, mask: Mask, ranks: TeamRanks) -> None:
        self._host, self._mask, self._ranks = host, mask, ranks
        self.shares = shares_of(mask, ranks.rank, ranks.size, ranks.divided)
        stored = [share for share in self.shares if share.offset is not None]
        self._stored = shares_by_name(stored)

    @torch.no_grad()
    def read(self, target: torch.Tensor) -> None:
        """Read this rank's shares, fp32, into a vector; collective in the team."""
        self._host.prepare()
        for share, values in self._pieces():
            assert share.offset is not None
            target[share.offset : share.offset + share.length] = share.of(values)

    @torch.no_grad()
    def write(self, source: torch.Tensor) -> None:
        """Set weights to this rank's shares in a vector; collective in the team."""
        self._host.prepare()
        for name, of_name in self._stored.items():
            pieces = {share.piece: self._whole(share, source) for share in of_name}
            if name in self._mask.buffers:
                buffer = self._mask.model.get_buffer(name)
                for piece, values in pieces.items():
                    self._mask.view_in(piece, buffer).copy_(like(values, buffer))
                continue
            if of_name[0].piece.dim is None:
                self._host.write(name, pieces[of_name[0].piece])
                continue
            held = {piece: values for piece, values in pieces.items() if self._mask.is_held(piece)}
            if held:
                dim = of_name[0].piece.dim
                self._host.write(name, torch.cat([*held.values()], dim))
            for piece, values in pieces.items():
                if piece not in held:  # backward regime: a frozen tensor beside the parameter
                    self._mask.view(piece).copy_(values)

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that every team has whole; collective in the team."""
        self._host.prepare()
        return self._host.read(name)

    def _pieces(self) -> Iterator[tuple[Share, torch.Tensor]]:
        for name, of_name in self._stored.items():
            if name in self._mask.buffers:
                buffer = self._ranks.mean(self._mask.model.get_buffer(name))  # each rank has its own statistics
                yield from ((share, self._mask.view_in(share.piece, buffer)) for share in of_name)
                continue
            is_read = of_name[0].piece.dim is None or any(self._mask.is_held(share.piece) for share in of_name)
            whole = self._host.read(name) if is_read else None
            for share in of_name:
                yield share, self._mask.view(share.piece) if whole is None else self._mask.view_in(share.piece, whole)

    def _whole(self, share: Share, source: torch.Tensor) -> torch.Tensor:
        assert share.offset is not None
        count = int(torch.Size(share.shape).numel())
        values = source[share.offset : share.offset + share.length]
        return self._ranks.join(share.piece.parameter, values, count).view(share.shape)


def hide_absent(mask: Mask) -> None:
    """Take parameters that this team lacks out of its modules, where hosts would find empty tensors.

    They become plain attributes, zeros without storage of their own, which some modules read to describe themselves,
    or use.
    """
    for name in mask.pieces:
        if mask.stored_pieces(name):
            continue
        path, _, attribute = name.rpartition(".")
        module = mask.model.get_submodule(path)
        parameter = module._parameters.pop(attribute)
        assert parameter is not None
        vars(module)[attribute] = parameter.detach().new_zeros(()).expand(mask.shapes[name])
