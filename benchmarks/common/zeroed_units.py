"""The oracle that needs no names of a family: a subnetwork equals the dense model in which all parameters of its absent
units are zero, in what it computes and in the gradients of what it holds (unscaled)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.planner import plan_model

Run = Callable[[nn.Module], list[Tensor]]
WORKERS = 2
# Narrower products add in another order. A wrong cut differs by percents of the largest element.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
WHOLE = 0.8  # share of the layers' parameters that are in units


@dataclass(frozen=True)
class Verdict:
    """What a strategy is for a model.

    Args:
        word: "right"; "partial": right, but not all branches are units, or less than `WHOLE` of the layers' parameters
            are; "refused": by an error; "wrong"; "not measured": the comparison cannot be made.
        reason: of any word but "right".
        share: of the layers' parameters that are in units. Layers are those with units, and all repeated ones whose
            output has their input's shape.
        off: largest difference of outputs and gradients, relative to the largest element.
        moved: by how much the subnetworks' outputs differ from the dense model's, by the same measure, at least.
    """

    word: str
    reason: str = ""
    share: float = 0.0
    off: float = 0.0
    moved: float = 0.0


class _NotMeasuredError(Exception):
    pass


def judge(model: nn.Module, run: Run, strategy: str) -> Verdict:
    """Compare the subnetworks of two workers at C = 1/2 with the dense model.

    Args:
        model: in training mode without dropout; it is not changed.
        run: the tensors that a model computes from an example, the same each time.
        strategy: "block" or "neuron".
    """
    try:
        branches = proven_branches(model, strategy)
        by_type, uncut = _strategies(branches, strategy)
        plan, _ = plan_model(model, _block(by_type), WORKERS, branches=branches)
        masks = [Mask(deepcopy(model), plan, rank, branches) for rank in range(WORKERS)]
        for mask in masks:
            mask.apply()
    except ValueError as refusal:
        return Verdict("refused", str(refusal))
    try:
        dense = _values(deepcopy(model), run)
        share = _share_in_units(model, plan, run, dense.gradients.keys())
        compared = [_compare(model, dense, mask, run) for mask in masks]
    except _NotMeasuredError as why:
        return Verdict("not measured", str(why))
    off, moved = max(off for off, _ in compared), min(moved for _, moved in compared)
    limit = TOLERANCE[_dtype(model)]
    if off > limit:
        return Verdict("wrong", f"differs by {off:.2g}", share, off, moved)
    if moved < 10 * limit:
        return Verdict("not measured", "a subnetwork computes what the dense model does", share, off, moved)
    missing = uncut or (f"{share:.2f} of the layers' parameters are in units" if share < WHOLE else "")
    return Verdict("partial" if missing else "right", missing, share, off, moved)


def _strategies(branches: Sequence[LocatedBranch], strategy: str) -> tuple[dict[str, str], str]:
    """The strategy of each branch type: neurons where all branches of the type can be cut; and why some cannot."""
    types = dict.fromkeys(branch.name.rpartition(".")[2] for branch in branches)
    if strategy == "block":
        return dict.fromkeys(types, "block"), ""
    reasons = {branch.name.rpartition(".")[2]: branch.uncuttable_reason for branch in branches}
    reasons |= {b.name.rpartition(".")[2]: b.uncuttable_reason for b in branches if b.uncuttable_reason}
    if all(reasons.values()):
        raise ValueError(next(iter(reasons.values())))
    uncut = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    return {name: "block" if reasons[name] else "neuron" for name in types}, uncut


def _block(strategy: dict[str, str]) -> SubnetworkConfig:
    block = parse({KEY: {"coverage": 0.5, "branch_scale": "none", "shared": [], "strategy": strategy}})
    assert block is not None
    return block


def _compare(model: nn.Module, dense: _Values, mask: Mask, run: Run) -> tuple[float, float]:
    """`off` and `moved` of a worker's subnetwork."""
    zeroed = deepcopy(model)
    _zero_absent(zeroed, mask.plan, mask.rank)
    expected = _values(zeroed, run)
    found = _values(mask.model, run)
    off = max(_difference(a, b) for a, b in zip(found.outputs, expected.outputs, strict=True))
    for name, pieces in mask.pieces.items():
        for piece in (piece for piece, _ in pieces if mask.is_trained(piece)):
            wanted = piece.narrow(expected.gradients[name]) if name in expected.gradients else None
            got = mask.view(piece, found.gradients[name]) if name in found.gradients else None
            if wanted is None:
                off = max(off, float(got is not None and got.any()))
            else:  # sums may cancel (biases of keys): rounding is that of the model's largest gradient
                got = torch.zeros_like(wanted) if got is None else got
                off = max(off, _difference(got, wanted, expected.largest_gradient / 64))
    if off > TOLERANCE[_dtype(model)]:
        again = deepcopy(model)
        _zero_absent(again, mask.plan, mask.rank)
        if any(not torch.equal(a, b) for a, b in zip(_values(again, run).outputs, expected.outputs, strict=True)):
            raise _NotMeasuredError("the dense model computes something else each time")
    return off, max(_difference(a, b) for a, b in zip(expected.outputs, dense.outputs, strict=True))


def _zero_absent(model: nn.Module, plan: Plan, rank: int) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for index, unit in enumerate(plan.units):
            if not plan.holds_rank(index, rank):
                for piece in unit.pieces:
                    if piece.kind == "parameter":
                        piece.narrow(parameters[piece.parameter]).zero_()


@dataclass(frozen=True)
class _Values:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]

    @property
    def largest_gradient(self) -> float:
        return max((float(gradient.abs().max()) for gradient in self.gradients.values()), default=0.0)


def _values(model: nn.Module, run: Run) -> _Values:
    """Outputs, and the gradients of their sum with random weights."""
    outputs = run(model)
    generator = torch.Generator().manual_seed(11)
    loss = sum((torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) * o).sum() for o in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
    if not all(tensor.isfinite().all() for tensor in (*outputs, *gradients.values())):
        raise _NotMeasuredError("values are not finite")
    return _Values([output.detach() for output in outputs], gradients)


def _difference(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Relative to the largest element, or to `least` if that is more."""
    if found.shape != expected.shape:
        return float("inf")
    scale = max(float(expected.abs().max()), least) if expected.numel() else 0.0
    return float((found - expected).abs().max()) / scale if scale else float(found.any())


def _share_in_units(model: nn.Module, plan: Plan, run: Run, used: Collection[str]) -> float:
    """Share of the layers' parameters that are in units.

    Args:
        used: parameters that count: cross-attention of a decoder without an encoder never runs.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if name in used}
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    held = dict.fromkeys(sizes, 0)
    for unit in plan.units:
        for piece in unit.pieces:
            if piece.kind == "parameter" and piece.parameter in used:
                held[piece.parameter] += piece.num_elements(shapes[piece.parameter])
    layers = tuple(f"{name}." for name in _repeated_layers(model, run))
    counted = [name for name in sizes if held[name] or name.startswith(layers)]
    return sum(held.values()) / max(1, sum(sizes[name] for name in counted))


def _repeated_layers(model: nn.Module, run: Run) -> list[str]:
    """Outermost children of containers that return a tensor of their input's shape, and contain another module."""
    found: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: Any, named: Any, output: Any) -> None:
            given, returned = _first(arguments) or _first(named), _first(output)
            if given is not None and given == returned:
                found.append(name)

        return hook

    probe = deepcopy(model)
    for path, container in probe.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict) and len(container) > 1:
            for child_name, child in container.named_children():
                if next(child.children(), None) is not None:
                    child.register_forward_hook(note(f"{path}.{child_name}".lstrip(".")), with_kwargs=True)
    with torch.no_grad():
        run(probe)
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _first(value: Any) -> torch.Size | None:
    """Shape of the first floating-point tensor."""
    tensors = (t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point())
    return next((tensor.shape for tensor in tensors), None)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
