"""A param group whose master is in host memory."""

from __future__ import annotations

import pytest
import torch

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.optimizer.host_step import HostStep
from sdp_deepspeed.optimizer.settings import Offload
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.units import Piece


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_in_host_memory(dtype: torch.dtype, pin: bool) -> None:
    """fp32 weights have a master of their own too; only `write_back` changes weights."""
    weight = torch.nn.Parameter(torch.arange(6.0).to(dtype))
    host = HostStep.build(weight.device, Offload(pin))
    group = SteppedGroup([Fragment(Piece("w", None, 0, 6), 1, 4)], PieceViews({"w": weight}), host)
    assert not group.in_place
    taken = 0.0
    for gradient in (0.5, 0.25, 1.0):
        group.link()
        group.set_flat_gradient(torch.full((3,), gradient))
        torch.optim.SGD(group.tensors, lr=1.0).step()
        assert weight.tolist() == [0, *(x - taken for x in (1, 2, 3)), 4, 5]
        group.write_back()
        taken += gradient
        assert weight.tolist() == [0, *(x - taken for x in (1, 2, 3)), 4, 5]
        assert group.tensors[0].grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [False, True])
def test_a_group_of_gpu_weights_in_host_memory(pin: bool) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0, device="cuda").bfloat16())
    host = HostStep.build(weight.device, Offload(pin))
    assert host is not None
    group = SteppedGroup([Fragment(Piece("w", None, 0, 6), 1, 4)], PieceViews({"w": weight}), host)
    for gradient in (0.5, 0.25, 0.75):
        group.set_flat_gradient(torch.full((3,), gradient, device="cuda"))
        host.wait()
        (master,) = group.tensors
        assert master.grad is not None
        assert (master.device.type, master.grad.device.type) == ("cpu", "cpu")
        assert master.grad.is_pinned() == pin
        torch.optim.SGD(group.tensors, lr=1.0).step()
        group.write_back()
    assert weight.tolist() == [0, -0.5, 0.5, 1.5, 4, 5]
