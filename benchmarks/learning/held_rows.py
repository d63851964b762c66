"""Masks for running all virtual workers in one pass, each with some rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.learning.row_sites import AbsentBranch, MaskedInput, Rows, Site, SkippedRows
from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.experts import mixtures
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece


@dataclass(frozen=True)
class HeldRows:
    """The changes to a model that make each row run as its worker does.

    Args:
        sites: places where some workers lack something.
    """

    sites: Sequence[Site]

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, subnetwork_of_row: torch.Tensor, *, is_scaled: bool = False) -> HeldRows:
        """Find the sites of a model.

        Args:
            model: dense.
            subnetwork_of_row: subnetwork of each row, [rows].
            is_scaled: whether what a unit adds is multiplied by 1 / C in the forward regime (`branch_scale`).

        Raises:
            ValueError: the regime is "backward", rows of the model depend on each other, or a branch cannot run for
                some rows.
        """
        if plan.regime == "backward":
            raise ValueError("the backward regime does not run by rows; use Reference")
        _refuse_mixed_rows(model)
        if plan.is_dense:
            return cls(())
        _refuse_own_forwards(model)
        return cls(
            [
                site
                for branch in proven_branches(model, "neuron")
                for site in _sites(model, plan, branch, subnetwork_of_row, is_scaled=is_scaled)
            ]
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model runs each row as its worker does."""
        with ExitStack() as stack:
            for site in self.sites:
                site.install(stack)
            yield


def scale_outputs(model: nn.Module, plan: Plan) -> None:
    """Multiply the output projections of each unit by its coverage, in place.

    Raises:
        ValueError: a branch without described output projection.
    """
    for branch in proven_branches(model, "neuron"):
        outputs = _outputs(model, branch)
        for index, pieces in _units_of(plan, branch):
            for piece in pieces:
                if piece.parameter in outputs:
                    piece.narrow(model.get_parameter(piece.parameter).detach()).mul_(plan.coverage_of(index))


def _refuse_mixed_rows(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(f"{name}: a {type(module).__name__} mixes the rows of all workers; use Reference")


def _refuse_own_forwards(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            raise ValueError(f"{name}: its forward is not that of {type(module).__name__}; use Reference")


def _units_of(plan: Plan, branch: LocatedBranch) -> Iterator[tuple[int, list[Piece]]]:
    """Yield units with their parameters of a branch."""
    names = {piece.parameter for piece in branch.pieces if piece.kind == "parameter"}
    for index, unit in enumerate(plan.units):
        pieces = [piece for piece in unit.pieces if piece.parameter in names]
        if pieces:
            yield index, pieces


def _outputs(model: nn.Module, branch: LocatedBranch) -> set[str]:
    """Names of weights and biases of a branch's output projections."""
    cuts = [cut for cut in branch.description.inner.cuts if cut.is_output] if branch.description.inner else []
    if not cuts:
        raise ValueError(f"{branch.name}: its description names no output projection to scale")
    known = dict(model.get_submodule(branch.root).named_parameters())
    return {f"{branch.root}.{name}" for cut in cuts for name in cut.names(known) if name in known}


def _sites(
    model: nn.Module, plan: Plan, branch: LocatedBranch, subnetwork_of_row: torch.Tensor, *, is_scaled: bool
) -> Iterator[Site]:
    units = [(index, pieces) for index, pieces in _units_of(plan, branch) if plan.coverage_of(index) < 1]
    if not units:
        return
    if mixtures(model, [branch]) or branch.description.extra_outputs:
        raise ValueError(f"{branch.name}: it has further outputs, or its rows depend on each other; use Reference")
    if any(piece.dim is not None for _, pieces in units for piece in pieces):
        yield from _cut_sites(model, plan, branch, units, subnetwork_of_row, is_scaled=is_scaled)
        return
    (index, _), *others = units
    assert not others, "a branch that is not cut is in one unit"
    held = torch.isin(subnetwork_of_row, subnetwork_of_row.new_tensor(plan.holders[index]))
    rows = Rows(held.nonzero().flatten(), (~held).nonzero().flatten())
    modules = tuple(model.get_submodule(name) for name in branch.modules)
    if held.any():
        yield SkippedRows(modules, rows, 1 / plan.coverage_of(index) if is_scaled else 1.0)
    else:
        yield AbsentBranch(model, branch)


def _cut_sites(
    model: nn.Module,
    plan: Plan,
    branch: LocatedBranch,
    units: Sequence[tuple[int, list[Piece]]],
    subnetwork_of_row: torch.Tensor,
    *,
    is_scaled: bool,
) -> Iterator[Site]:
    for tensor in branch.cut_tensors:
        path, _, leaf = tensor.parameter.rpartition(".")
        module = model.get_submodule(path)
        if leaf not in ("weight", "bias"):
            raise ValueError(f"{tensor.parameter} is not of a linear layer, so it cannot be cut by rows; use Reference")
        if leaf != "weight" or not tensor.cut.is_output:
            continue
        if not _is_linear(module):
            raise ValueError(f"{path} is a {type(module).__name__}, which cannot be cut by rows; use Reference")
        dtype = module.get_parameter("weight").dtype
        held = subnetwork_of_row.new_ones(plan.num_subnetworks, tensor.size, dtype=dtype)
        for index, pieces in units:
            for piece in (piece for piece in pieces if piece.parameter == tensor.parameter):
                columns = held[:, piece.start : piece.start + piece.length]
                if is_scaled:
                    columns /= plan.coverage_of(index)
                columns[[worker for worker in range(plan.num_subnetworks) if not plan.holds(index, worker)]] = 0
        yield MaskedInput(module, held[subnetwork_of_row].unsqueeze(1))  # broadcast over positions


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # that of Transformers
