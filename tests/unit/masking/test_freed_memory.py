"""Free memory does not stay with the allocators."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from sdp_deepspeed.masking.freed_memory import give_back

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_system_gets_blocks_below_the_threshold_of_glibc() -> None:
    """Its threshold is that of the largest block freed so far; what lies between blocks in use is given back too."""
    del (largest := [torch.ones(30 * MIB, dtype=torch.uint8)])[:]
    give_back(torch.device("cpu"))
    before = resident_bytes()
    tensors = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(64)]
    assert resident_bytes() - before > 100 * MIB
    kept = tensors[::16]
    del tensors, largest
    give_back(torch.device("cpu"))
    assert resident_bytes() - before < 20 * MIB
    assert len(kept) == 4


def test_a_device_gets_its_cache_back() -> None:
    module = SimpleNamespace(empty_cache=mock.Mock())
    with mock.patch.object(torch, "get_device_module", return_value=module) as get:
        give_back(torch.device("cuda", 1))
        get.assert_called_once_with(torch.device("cuda", 1))
        module.empty_cache.assert_called_once_with()
        get.reset_mock()
        give_back(torch.device("cpu"))
    get.assert_not_called()


def test_other_c_libraries_are_left_alone() -> None:
    with mock.patch.object(ctypes, "CDLL", return_value=SimpleNamespace(malloc=mock.Mock())) as load:
        give_back(torch.device("cpu"))
    load.assert_called_once_with(None)
    load.return_value.malloc.assert_not_called()
