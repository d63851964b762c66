"""What is asked of a GPU besides what other tests marked gpu do; without `--gpu` a little of it on the CPU.

Several ranks share the machine's first GPU, over gloo by way of host memory (`helpers/staged_gloo.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdp_deepspeed.config import MODES, Mode
from tests.helpers.checkpointed_runs import settings_of, stepped
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import CPU, Place, Rank, run_ranks
from tests.helpers.training import assert_identical, dense_state, engine_of, train

pytestmark = [pytest.mark.slow, pytest.mark.gpu, pytest.mark.world(4)]


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_flash_attention_agrees_with_the_reference(rank: Rank, mode: Mode) -> None:
    """No other kernel of attention may run, in the engine and in the reference."""
    case = Case(rank.size, rank.size // 2, *mode, precision="bf16", optimizer="SGD")
    model: Any = case.specimen.build()
    assert model.config._attn_implementation == "sdpa"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        check_case(case, rank)


@dataclass(frozen=True)
class Resumed:
    """Resumes the run of one folder on this device, bit for bit, and goes on with it in another.

    Args:
        loaded: a folder with a checkpoint; None for the first.
        saved: folder of the next.
        device: where this rank must be; None for any.
    """

    loaded: Path | None
    saved: Path
    device: str | None = None

    def __call__(self, rank: Rank) -> None:
        engine = engine_of(settings_of(2, "bf16+fp32", holders=2))
        assert self.device in (None, engine.device.type)
        if self.loaded is not None:
            _, client_state = engine.load_checkpoint(str(self.loaded))
            expected = torch.load(self.loaded / f"rank_{rank.rank}.pt")
            assert_identical(on_host(dense_state(engine) | stepped(engine)), expected)
            assert client_state["on_a_device"].device.type == "cpu"
        train(engine, num_steps=2)
        engine.save_checkpoint(str(self.saved), client_state={"on_a_device": torch.ones(3, device=engine.device)})
        torch.save(on_host(dense_state(engine) | stepped(engine)), self.saved / f"rank_{rank.rank}.pt")


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def test_checkpoints_go_from_the_cpu_to_the_gpu_and_back(place: Place, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "third")]
    on_gpu = None if place is CPU else "cuda"
    for where, check in (
        (CPU, Resumed(None, folders[0], "cpu")),
        (place, Resumed(folders[0], folders[1], on_gpu)),
        (CPU, Resumed(folders[1], folders[2], "cpu")),
    ):
        assert run_ranks(4, [("resumed", check)], place=where) == {"resumed": None}
