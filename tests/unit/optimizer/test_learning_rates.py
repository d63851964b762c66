"""Learning rates by coverage: each tensor is stepped at its own, and param groups are afterward what they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from sdp_deepspeed.config import LearningRateRule
from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.optimizer.learning_rates import check_parts, rate_factor, rates_by_coverage, refuse_rates
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.units import Piece
from tests.helpers.fused_adam import not_compiled
from tests.helpers.toy_training import by_hand, compare, run_toy, toy_of
from tests.helpers.whole_tensors import WHOLE_TENSORS

FACTORS = (1.0, 0.5, 0.25, 0.5, 1.0)


def test_factors() -> None:
    assert [rate_factor("none", coverage) for coverage in (0.25, 1.0)] == [1, 1]
    assert [rate_factor("sqrt", coverage) for coverage in (0.25, 1.0)] == [0.5, 1]
    assert [rate_factor("linear", coverage) for coverage in (0.25, 1.0)] == [0.25, 1]


@pytest.mark.parametrize(
    ("stage", "regime", "rule"),
    [(0, "forward", "sqrt"), (0, "backward", "linear"), (1, "forward", "linear"), (2, "backward", "sqrt")],
)
def test_random_layouts_by_hand(stage: int, regime: str, rule: LearningRateRule) -> None:
    """Slices with shared gaps, weights of two dtypes in one group, small buckets."""
    for seed in range(3):
        toy = toy_of(seed, 4, regime, stage=stage, lr_by_coverage=rule)
        compare(toy, run_toy(toy), by_hand(toy))


PIECES = [Piece("w", 0, row, 1) for row in range(4)]  # of three elements
FRAGMENTS = [Fragment(PIECES[0], 1, 3), Fragment(PIECES[1], 0, 3), Fragment(PIECES[2], 0, 1), Fragment(PIECES[3], 0, 2)]


def group_of(factors: tuple[float, ...], dtype: torch.dtype) -> SteppedGroup:
    weight = nn.Parameter(torch.arange(12.0).view(4, 3).to(dtype))
    return SteppedGroup(FRAGMENTS, PieceViews({"w": weight}), factors=dict(zip(PIECES, factors, strict=True)))


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.0, 1.0, 1.0, 1.0), [[1, 2, 3, 4, 5, 6, 9, 10]]),
        ((1.0, 0.5, 0.5, 1.0), [[1, 2], [3, 4, 5, 6], [9, 10]]),
        ((0.5, 0.5, 0.25, 0.25), [[1, 2, 3, 4, 5], [6, 9, 10]]),
    ],
)
def test_a_flat_master_is_cut_where_factors_change(factors: tuple[float, ...], expected: list[list[float]]) -> None:
    group = group_of(factors, torch.bfloat16)
    assert [tensor.tolist() for tensor in group.tensors] == expected
    assert group.factors == [dict(zip(factors, factors, strict=True))[f] for f in _without_repeats(factors)]
    found = [
        group.tensors[index].tolist()[start : start + fragment.num_elements]
        for fragment, (index, start) in zip(FRAGMENTS, group.places(), strict=True)
    ]
    assert found == [[1, 2], [3, 4, 5], [6], [9, 10]]
    gradient = torch.arange(8.0)
    group.set_flat_gradient(gradient)
    assert torch.cat([tensor.grad for tensor in group.tensors if tensor.grad is not None]).tolist() == list(range(8))
    assert {tensor.grad.untyped_storage().data_ptr() for tensor in group.tensors if tensor.grad is not None} == {
        gradient.untyped_storage().data_ptr()
    }, "a copy"


def _without_repeats(factors: tuple[float, ...]) -> list[float]:
    return [factor for index, factor in enumerate(factors) if index == 0 or factors[index - 1] != factor]


def test_in_place_each_fragment_has_its_factor() -> None:
    group = group_of((1.0, 0.5, 0.5, 0.25), torch.float32)
    assert group.in_place
    assert group.factors == [1.0, 0.5, 0.5, 0.25]
    assert SteppedGroup(FRAGMENTS, PieceViews({"w": nn.Parameter(torch.ones(4, 3))})).factors == [1.0] * 4


def fused_adam(groups: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    made: torch.optim.Optimizer = FusedAdam(groups, lr=1e-2, eps=1e-4)
    return made


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, weight_decay=0.1),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "AdamW tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), fused=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, lr_decay=0.1),
    "FusedAdam": fused_adam,
    **{name: WHOLE_TENSORS[name] for name in ("Muon+AdamW", "Lamb", "Momentum8bit")},
}


def parameters() -> list[nn.Parameter]:
    """Vectors, which DeepSpeed's Muon hands to its Adam: what it makes of matrices would be compiled first."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(12, generator=generator)) for _ in FACTORS]


def stepped_once(optimizer: torch.optim.Optimizer, groups: list[Any], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in groups:
        for tensor in group.tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator)
    with rates_by_coverage(optimizer, groups):
        optimizer.step()


def as_stepped(tensors: list[nn.Parameter], factors: tuple[float, ...]) -> Any:
    return SimpleNamespace(tensors=tensors, factors=list(factors))


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_is_stepped_at_its_own_rate(kind: str) -> None:
    """Bit for bit as an optimizer of its own steps it, and all that users hold stays, with what was written into it."""
    with not_compiled() if kind == "FusedAdam" else nullcontext():
        ours, alone = parameters(), parameters()
        one = KINDS[kind]([{"params": ours, "name": "decays"}, {"params": (rest := parameters())[:2]}])
        groups = [as_stepped(ours, FACTORS), as_stepped(rest[:2], (1.0, 1.0))]
        others = [KINDS[kind]([{"params": [tensor]}]) for tensor in alone]
        for other, factor in zip(others, FACTORS, strict=True):
            other.param_groups[0]["lr"] = other.param_groups[0]["lr"] * factor
        live, given = one.param_groups, list(one.param_groups)
        before = [dict(group) for group in given]
        for number in range(3):
            stepped_once(one, groups, number)
            assert one.param_groups is live
            assert [id(group) for group in live] == [id(group) for group in given]
            for group, old in zip(given, before, strict=True):
                assert all(group[key] is value for key, value in old.items()), "another object"
            generator = torch.Generator().manual_seed(number)
            for tensor, other in zip(alone, others, strict=True):
                tensor.grad = torch.randn(tensor.shape, generator=generator)
                other.step()
    different = [index for index, pair in enumerate(zip(ours, alone, strict=True)) if not torch.equal(*pair)]
    assert not different, different
    if kind == "FusedAdam":
        assert [group["step"] for group in given] == [others[0].param_groups[0]["step"]] * 2


def test_none_leaves_the_optimizer_alone() -> None:
    tensors = parameters()
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    (group,) = optimizer.param_groups
    with rates_by_coverage(optimizer, [as_stepped(tensors, (1.0,) * len(tensors))]) as parts:
        assert optimizer.param_groups[0] is parts[0][0] is group
    assert group["params"] == tensors


class Failing(torch.optim.SGD):
    """Ends half-way."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise ArithmeticError


def test_an_error_in_a_step_restores_param_groups() -> None:
    tensors = parameters()
    optimizer = Failing(tensors, lr=0.1)
    (group,) = optimizer.param_groups
    seen: list[Any] = []
    with pytest.raises(ArithmeticError):
        _step(optimizer, tensors, seen)
    (parts,) = seen
    assert [part["lr"] for part in parts] == [0.1, 0.05, 0.025]
    assert optimizer.param_groups == [group]
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["params"]) == (0.1, tensors)
    assert not any(part["params"] for part in parts), "kept alive"


def _step(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter], seen: list[Any]) -> None:
    with rates_by_coverage(optimizer, [as_stepped(tensors, FACTORS)]) as parts:
        seen += parts
        optimizer.step()


class Wrapper(torch.optim.SGD):
    """Has another one step, which has the same list of param groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.inner.param_groups = self.param_groups

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_who_shares_the_list_of_param_groups_has_the_rates_too() -> None:
    found, expected = parameters(), parameters()
    stepped_once(Wrapper(found), [as_stepped(found, FACTORS)], 0)
    stepped_once(torch.optim.SGD(expected, lr=0.1), [as_stepped(expected, FACTORS)], 0)
    assert all(map(torch.equal, found, expected))


class Counting(torch.optim.SGD):
    """Counts in a tensor of the group, and in a number, and finds out something of the learning rate."""

    def __init__(self, params: Any, *, keeps_rate: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self._keeps_rate = keeps_rate
        for group in self.param_groups:
            group |= {"count": torch.zeros(1)}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["steps"] = group.get("steps", 0) + 1
            if self._keeps_rate:
                group["lr_max"] = max(group.get("lr_max", 0), group["lr"])


def test_a_group_counts_a_step_once() -> None:
    tensors = parameters()
    optimizer = Counting(tensors)
    (group,) = optimizer.param_groups
    count = group["count"]
    for number in range(3):
        stepped_once(optimizer, [as_stepped(tensors, FACTORS)], number)
    assert group["count"] is count
    assert (group["steps"], count.item()) == (3, 3)


def checked(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter]) -> None:
    communicator: Any = OneRank()
    with rates_by_coverage(optimizer, [as_stepped(tensors, FACTORS)]) as parts:
        optimizer.step()
        check_parts(optimizer, parts, communicator)


def test_numbers_that_follow_from_the_rate_are_refused() -> None:
    """Those of a whole group, as in optimizers without a schedule."""
    tensors = parameters()
    checked(Counting(tensors), tensors)
    with pytest.raises(ValueError, match=r"'Counting' keeps numbers .*\('lr_max'\).*lr_by_coverage"):
        checked(Counting(tensors, keeps_rate=True), tensors)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda p: Adafactor(p), "has lr=None"),
        (lambda p: _changed(torch.optim.SGD(p, lr=0.1), lr="auto"), "has lr='auto'"),
        (lambda p: _changed(torch.optim.SGD(p, lr=0.1), lr=True), "has lr=True"),
        (lambda p: _changed(torch.optim.SGD(p, lr=0.1), lr=torch.ones(2)), r"has lr=tensor\("),
        (lambda p: _changed(Adafactor(p), lr=0.1), "has relative_step=True"),
        (lambda p: torch.optim.Adafactor(p), "takes its lr only as a bound"),
    ],
)
def test_rates_of_no_use_are_refused(make: Callable[[Any], torch.optim.Optimizer], problem: str) -> None:
    optimizer = make(parameters())
    refuse_rates(optimizer, "none")
    with pytest.raises(ValueError, match=rf"lr_by_coverage: got 'sqrt'.*param group 0 of .*{problem}.*set .*\"none\""):
        refuse_rates(optimizer, "sqrt")


def _changed(optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
    optimizer.param_groups[0].update(options)
    return optimizer


def test_rates_of_use_are_taken() -> None:
    for lr in (1, 0.1, torch.tensor(0.1), torch.tensor([0.1])):
        refuse_rates(_changed(torch.optim.SGD(parameters(), lr=0.1), lr=lr), "linear")
    refuse_rates(Adafactor(parameters(), lr=0.1, relative_step=False), "linear")
