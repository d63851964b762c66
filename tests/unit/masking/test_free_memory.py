"""How much memory is left: of a machine, of a container on it, of a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

from sdp_deepspeed.masking import free_memory as module
from sdp_deepspeed.masking.free_memory import FreeMemory, free_memory

CPU = torch.device("cpu")
GIB = 2**30
V2, V1 = "0::/job/step", "5:cpu:/other\n4:cpuacct,memory:/job/step"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def host(folder: Path, own: str | None, files: Mapping[str, str]) -> FreeMemory:
    """On a machine with 8 of 16 GiB free, and these files of control groups."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if own is not None:
        (folder / "own").write_text(own + "\n")
    with (
        mock.patch.object(module, "_CGROUPS", folder / "cgroup"),
        mock.patch.object(module, "_OWN_CGROUPS", folder / "own"),
        mock.patch.object(psutil, "virtual_memory", return_value=SimpleNamespace(available=8 * GIB, total=16 * GIB)),
        mock.patch("socket.gethostname", return_value="node1"),
    ):
        found = free_memory(CPU)
    assert found is not None
    assert (found.pool, found.own) == ("node1 host memory", 0)
    return found


def version_2(where: str, limit: str, used: int) -> dict[str, str]:
    names = {"memory.max": limit, "memory.current": str(used), "memory.stat": f"anon 5\ninactive_file {GIB}\n"}
    return {f"{where}/{name}".lstrip("/"): text for name, text in names.items()}


@pytest.mark.parametrize(
    ("own", "files", "shared", "total"),
    [
        (None, {}, 8, 16),  # no control groups
        (V2, {}, 8, 16),
        (V2, version_2("job/step", "max", 3 * GIB), 8, 16),
        (V2, version_2("job/step", str(6 * GIB), 3 * GIB), 4, 6),  # files that it has read can go
        (V2, version_2("job", str(6 * GIB), 3 * GIB), 4, 6),  # the group above limits it too
        (V2, version_2("", str(6 * GIB), 7 * GIB), 0, 6),  # as a container sees its own
        (V2, version_2("other", str(6 * GIB), 3 * GIB), 8, 16),
        (V2, version_2("job/step", str(60 * GIB), 3 * GIB), 8, 16),
        (
            V1,
            {
                "memory/job/step/memory.limit_in_bytes": str(4 * GIB),
                "memory/job/step/memory.usage_in_bytes": str(3 * GIB),
                "memory/job/step/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
            },
            2,
            4,
        ),
    ],
)
def test_host_memory(folder: Path, own: str | None, files: dict[str, str], shared: int, total: int) -> None:
    found = host(folder, own, files)
    assert (found.shared, found.total) == (shared * GIB, total * GIB)


def test_of_this_machine() -> None:
    found = free_memory(CPU)
    assert found is not None
    assert 0 < found.shared <= found.total


def test_gpu_memory() -> None:
    """What the allocator has reserved and does not use is left too; a GPU has one name in all processes."""
    gpu = torch.device("cuda", 3)
    with (
        mock.patch.object(torch.accelerator, "get_memory_info", return_value=(5, 100)),
        mock.patch.object(torch.accelerator, "memory_reserved", return_value=30),
        mock.patch.object(torch.accelerator, "memory_allocated", return_value=20),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(uuid="GPU-1")),
        mock.patch("socket.gethostname", return_value="node1"),
    ):
        assert free_memory(gpu) == FreeMemory("node1 GPU-1", 5, 10, 100)
        with mock.patch.object(torch.accelerator, "get_memory_info", side_effect=RuntimeError("not here")):
            assert free_memory(gpu) is None
