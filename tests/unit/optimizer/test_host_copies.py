"""What is asked of the device: copies that do not block from page-locked memory, and an event behind them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from sdp_deepspeed.optimizer.host_copies import HostCopies

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("pin", [False, True])
def test_only_page_locked_memory_needs_a_wait(pin: bool) -> None:
    copies, target, source = HostCopies(CUDA, pin_memory=pin), mock.Mock(), mock.Mock()
    with mock.patch("torch.Event") as event, mock.patch("torch.empty") as empty:
        memory = copies.memory(7, torch.bfloat16)
        copies.copy(target, source)
        mark = copies.mark()
        assert [call[0] for call in event.mock_calls] == (["", "().record"] if pin else [])
        mark.synchronize()
    assert memory is empty.return_value
    empty.assert_called_once_with(7, dtype=torch.bfloat16, device="cpu", pin_memory=pin)
    target.copy_.assert_called_once_with(source, non_blocking=pin)
    assert [call[0] for call in event.mock_calls] == (["", "().record", "().synchronize"] if pin else [])
    assert event.call_args_list == ([mock.call(CUDA)] if pin else [])


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [False, True])
def test_there_and_back_on_a_gpu(pin: bool) -> None:
    copies = HostCopies(CUDA, pin_memory=pin)
    memory, back = copies.memory(2**20, torch.float32), torch.zeros(2**20, device=CUDA)
    assert memory.is_pinned() == pin
    copies.copy(memory, torch.arange(2.0**20, device=CUDA))
    copies.mark().synchronize()
    assert torch.equal(memory, torch.arange(2.0**20))
    copies.copy(back, memory)
    copies.mark().synchronize()
    assert torch.equal(back.cpu(), memory)
