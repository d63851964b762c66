"""Gradients of many micro-batches: sums in fp32 keep what sums in bf16 lose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.gatherers import Alone
from tests.helpers.rank_models import optimizer_of

NUM_MICRO = 64
SHAPE = (3, 5)
ROUNDING = NUM_MICRO * 2.0**-24  # relative, of that many additions of positive fp32 numbers


def sums_of(weights: dict[str, nn.Parameter], *, stage: int, accumulate_in_fp32: bool) -> SubnetworkOptimizer:
    """SGD that subtracts the averaged gradient once; one unit, and one shared tensor."""
    unit = Unit("unit", (Piece("own", None, 0, SHAPE[0] * SHAPE[1]),))
    return optimizer_of(
        torch.optim.SGD(list(weights.values()), lr=1.0),
        parameters=weights,
        tensors=[TensorInfo(name, SHAPE, weight.dtype) for name, weight in weights.items()],
        plan=Plan("forward", "block", 1, 1, 0, (unit,), ((0,),), (0,)),
        dp_group=Communicator(Alone()),
        settings=OptimizerSettings(
            stage, clip=0.0, bucket_elements=100, wire_dtype=torch.bfloat16, accumulate_in_fp32=accumulate_in_fp32
        ),
    )


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulate_in_fp32", [True, False])
def test_sums_of_many_nearly_equal_gradients(accumulate_in_fp32: bool, stage: int) -> None:
    """Weights are zero, so that the stepped master is minus the sum; the norm is that of the sums too."""
    weights = {name: nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16)) for name in ("own", "shared")}
    optimizer = sums_of(weights, stage=stage, accumulate_in_fp32=accumulate_in_fp32)
    generator = torch.Generator().manual_seed(0)
    gradients = (1.1 + 0.01 * torch.randn(NUM_MICRO, 2, *SHAPE, generator=generator)).bfloat16()
    rough = torch.zeros(2, *SHAPE, dtype=torch.bfloat16)
    for gradient in gradients:
        rough += gradient
        for weight, own in zip(weights.values(), gradient, strict=True):
            (weight * own).sum().backward()
        optimizer.end_backward()
        assert sum(tensor.numel() for tensor in optimizer.gradient_tensors()) == 2 * SHAPE[0] * SHAPE[1]
    exact = gradients.double().sum(0)
    lost = (rough.double() - exact).abs() / exact
    assert lost.min() > 100 * ROUNDING, "otherwise this test could not tell the sums apart"
    optimizer.step()
    (master,) = optimizer.groups[0].tensors
    expected = exact if accumulate_in_fp32 else rough.double()
    found, wanted = (-master.detach()).double().sort().values, expected.flatten().sort().values  # in whatever order
    torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=0)
    assert optimizer._global_grad_norm == pytest.approx(float(expected.norm()), rel=ROUNDING)
    for name, total in zip(weights, expected, strict=True):
        assert torch.equal(weights[name].detach(), -total.float().bfloat16()), name
        assert weights[name].grad is None


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_norm_of_many_elements(stage: int) -> None:
    """A CPU adds squares in fp32 one after the other: of three million in one sum, 1e-4 would be lost."""
    weight = nn.Parameter(torch.zeros(3_000_000))
    unit = Unit("unit", (Piece("own", None, 0, weight.numel()),))
    optimizer = optimizer_of(
        torch.optim.SGD([weight], lr=1.0),
        parameters={"own": weight},
        tensors=[TensorInfo("own", tuple(weight.shape), weight.dtype)],
        plan=Plan("forward", "block", 1, 1, 0, (unit,), ((0,),), (0,)),
        dp_group=Communicator(Alone()),
        settings=OptimizerSettings(stage, clip=0.0, bucket_elements=10**9, wire_dtype=torch.float32),
    )
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.grad = gradient.clone()
    optimizer.end_backward()
    optimizer.step()
    assert optimizer._global_grad_norm == pytest.approx(float(gradient.double().norm()), rel=2e-6)
