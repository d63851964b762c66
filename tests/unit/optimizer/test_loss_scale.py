"""What fp16 cannot hold: on one rank, by numbers that a person can check."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn

from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.mailbox import run_mail
from tests.helpers.rank_models import optimizer_of


def alone(weight: nn.Parameter, stage: int, scale: float) -> SubnetworkOptimizer:
    """SGD with rate 1 on one rank."""
    unit = Unit("unit", (Piece("w", None, 0, weight.numel()),))
    settings = OptimizerSettings(stage, 0.0, bucket_elements=10**6, wire_dtype=torch.float16, skip_overflow=True)
    return run_mail(
        1,
        lambda communicator, _: optimizer_of(
            torch.optim.SGD([weight], lr=1.0),
            parameters={"w": weight},
            tensors=[TensorInfo("w", tuple(weight.shape), weight.dtype)],
            plan=Plan("forward", "block", 1, 1, 0, (unit,), ((0,),), (0,)),
            dp_group=communicator,
            settings=settings,
            loss_scaler=LossScaler(scale=scale),
        ),
    )[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_the_scale_saves_is_not_lost_again(stage: int) -> None:
    """1e-8 is zero in fp16. Times 2**16 it is not, and it must be divided by 2**16 in fp32."""
    weight = nn.Parameter(torch.zeros(7, dtype=torch.float16))
    optimizer = alone(weight, stage, 2.0**16)
    scaled = torch.full((7,), 1e-8 * 2**16, dtype=torch.float16)
    (weight * scaled).sum().backward()
    optimizer.end_backward()
    optimizer.step()
    (master,) = optimizer.groups[0].tensors
    assert torch.equal(master.detach(), -scaled.float() / 2**16)
    assert optimizer._global_grad_norm == pytest.approx(float(scaled.float().norm()) / 2**16, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_norm_that_fp16_cannot_hold_is_no_overflow(stage: int) -> None:
    """Its largest number is 65504; gradients of which each is smaller may have a larger norm."""
    weight = nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    optimizer = alone(weight, stage, 1.0)
    (weight * torch.full((10_000,), 1000.0, dtype=torch.float16)).sum().backward()
    optimizer.end_backward()
    optimizer.step()
    assert not optimizer.overflow
    assert optimizer._global_grad_norm == pytest.approx(100_000, rel=1e-5)
    assert weight.tolist() == [-1000.0] * 10_000
