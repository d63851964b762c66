"""`dense_branch_scale: "coverage"`: multiply each branch of the dense model by its coverage (forward regime)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import KEY
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.units import Piece


def output_scales(mask: Mask) -> list[tuple[Piece, float]]:
    """Factors, if not 1, for weights and biases of output projections.

    Raises:
        ValueError: a branch whose description has no output projection, or with a norm after it, which undoes a factor.
    """
    plan, found = mask.plan, []
    for branch in mask.branches:
        own = {piece.parameter for piece in branch.pieces}
        units = [
            (plan.coverage_of(index), piece)
            for index, unit in enumerate(plan.units)
            if plan.coverage_of(index) < 1
            for piece in unit.pieces
            if piece.parameter in own
        ]
        if units:
            outputs = _outputs(mask, branch)
            found += [(piece, coverage) for coverage, piece in units if piece.parameter in outputs]
    return found


@contextmanager
def scaled(mask: Mask) -> Iterator[None]:
    """Context in which the dense model (an undone mask) is scaled. Afterwards weights are bit-identical to before;
    elements that were changed inside (loaded) are divided by the scale.

    Raises:
        ValueError: see `output_scales`.
    """
    assert not mask.is_applied, "subnetworks are not scaled"
    kept = []
    with torch.no_grad():
        for piece, scale in output_scales(mask):
            view = mask.view(piece)
            kept.append((view, view.clone(), scale))
            view.mul_(scale)
    try:
        yield
    finally:
        for view, values, scale in kept:
            view.copy_(torch.where(view == values * scale, values, view / scale))


def _outputs(mask: Mask, branch: LocatedBranch) -> set[str]:
    cuts = [cut for cut in branch.description.inner.cuts if cut.is_output] if branch.description.inner else []
    names = {
        name
        for cut in cuts
        for name in replace(cut, module=f"{branch.root}.{cut.module}").names(mask.parameters)
        if name in mask.parameters
    }
    if not names:
        raise ValueError(
            f"{KEY}.dense_branch_scale: {branch.name!r} describes no output projection to scale; register it with "
            "architectures.InnerLayers"
        )
    tail = branch.description.inner.tail if branch.description.inner else ()
    after = [f"{branch.layer}.{name}" for name in branch.description.after] + [f"{branch.root}.{name}" for name in tail]
    for name in after:
        kind = type(mask.model.get_submodule(name)).__name__
        if "norm" in kind.lower():
            raise ValueError(
                f"{KEY}.dense_branch_scale: {name} ({kind}) normalizes the output of {branch.name!r}, so a factor has "
                'no effect; use "none"'
            )
    return names
