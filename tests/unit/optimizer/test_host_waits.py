"""How often a step makes the host wait for a GPU: once, where the norm is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sdp_deepspeed.distributed.communicator import Communicator, Done
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from tests.helpers.nobody import Nobody
from tests.helpers.rank_models import optimizer_of
from tests.helpers.toy_training import Toy, toy_of

# What needs values on the host, and what copies from memory of the host that is not page-locked.
WAITS = {"tolist", "item", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"}
WAITS |= {"nonzero", "masked_select", "unique", "equal", "allclose", "isclose", "is_nonzero", "tensor", "as_tensor"}


class HostWaits(TorchFunctionMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.found.append(name)
        if name in ("to", "copy_"):
            devices = {value.device for value in [*args, *(kwargs or {}).values()] if isinstance(value, torch.Tensor)}
            assert len(devices) <= 1
        return func(*args, **(kwargs or {}))


class Equals(Nobody):
    """A group whose ranks all have what this one has."""

    def all_to_all_single(self, received: torch.Tensor, *arguments: Any, **options: Any) -> Done:
        received.zero_()
        return Done()

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> None:
        tensor.mul_(self.size)

    def all_gather_object(self, values: list[Any], value: Any, group: Any) -> None:
        values[:] = [value] * self.size


def optimizer_of_toy(toy: Toy, **options: Any) -> SubnetworkOptimizer:
    parameters = {
        name: nn.Parameter(value, requires_grad=bool(toy.holds(0)[name].any())) for name, value in toy.weights().items()
    }
    wanted: list[dict[str, Any]] = [
        {"params": [parameters[info.name] for info in toy.layout.tensors if info.group == group]} for group in (0, 1)
    ]
    settings = OptimizerSettings(toy.stage, 0.0, torch.float32, bucket_elements=40, max_in_flight=1)
    return optimizer_of(
        torch.optim.SGD([group for group in wanted if group["params"]], lr=1.0),
        parameters=parameters,
        tensors=toy.layout.tensors,
        plan=toy.layout.plan,
        dp_group=Communicator(Equals(toy.layout.size)),
        settings=replace(settings, **options),
        nodes=toy.layout.nodes,
    )


def waits_in_a_step(toy: Toy, optimizer: SubnetworkOptimizer) -> list[str]:
    """Backward and step, the second time."""
    parameters = optimizer.model.parameters()
    for _ in range(2):
        with HostWaits() as waits:
            for name, gradient in toy.gradients(0, 0, 0):
                if parameters[name].requires_grad:
                    (parameters[name] * gradient).sum().backward()
            optimizer.end_backward()
            optimizer.step()
    return waits.found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"clip": 1.0, "skip_overflow": True}, {"needs_norm": False, "clip": 1.0}])
def test_once_for_norm_overflow_and_what_is_left(options: dict[str, Any], stage: int) -> None:
    toy = toy_of(3, 4, "forward", 40, "halves", stage=stage, missing=0.0)
    assert waits_in_a_step(toy, optimizer_of_toy(toy, **options)) == ["tolist"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_not_at_all_without_a_norm(stage: int) -> None:
    """But at stage 2, where ranks must agree whether any of them has gradients that are left to send."""
    toy = toy_of(3, 4, "forward", 40, "halves", stage=stage, missing=0.0)
    assert waits_in_a_step(toy, optimizer_of_toy(toy, needs_norm=False)) == ["tolist"] * (stage == 2)


def test_parameters_that_were_frozen_cost_one() -> None:
    """At stage 0 in fp32, where those without a gradient on any rank are not stepped."""
    toy = toy_of(6, 2, "forward", 10_000, stage=0, missing=0.0)
    tensors = tuple(replace(info, dtype=torch.float32, group=0) for info in toy.layout.tensors)
    toy = replace(toy, layout=replace(toy.layout, tensors=tensors))
    optimizer = optimizer_of_toy(toy, needs_norm=False)
    assert [group.in_place for group in optimizer.groups] == [True]
    for parameter in list(optimizer.model.parameters().values())[:4]:
        parameter.requires_grad = False
    assert waits_in_a_step(toy, optimizer) == ["tolist"]
