"""What is asked of a GPU besides what other tests marked gpu do; without `--gpu` a little of it on the CPU.

Several ranks share the machine's first GPU, over gloo by way of host memory (`helpers/staged_gloo.py`); one rank alone
has NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdp_deepspeed
from benchmarks.common.held_bytes import optimizer_tensors
from sdp_deepspeed.config import MODES, Mode
from tests.helpers.checkpointed_runs import settings_of, stepped
from tests.helpers.models import config, llama
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import CPU, Place, Rank, run_ranks
from tests.helpers.staged_gloo import StagedGloo
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
class WithLateStreams:
    """A case whose collectives read and write late, on streams of their own. What has no order is seen by its values:
    what is sent is overwritten before it was read, what is received is read before it was written.

    Args:
        is_waited_for: whether a collective's `wait` does what it must; without it, values must be wrong.
    """

    case: Case
    is_waited_for: bool = True

    def __call__(self, rank: Rank) -> None:
        with (
            mock.patch.object(StagedGloo, "is_late", True),
            mock.patch.object(StagedGloo, "is_waited_for", self.is_waited_for),
        ):
            check_case(self.case, rank)


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_late_streams(rank: Rank, mode: Mode, stage: int, accumulation: int) -> None:
    if not torch.cuda.is_available():
        return  # these streams are a GPU's
    case = Case(4, 2, *mode, stage=stage, overlap=True, accumulation=accumulation, buckets="many")
    WithLateStreams(case)(rank)


def test_values_are_wrong_where_nothing_is_waited_for(place: Place, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--gpu"):
        pytest.skip("needs a GPU: --gpu")
    check = WithLateStreams(Case(4, 2, stage=1, buckets="many"), is_waited_for=False)
    outcome = str(run_ranks(4, [("without", check)], place=place)["without"])
    assert "AssertionError" in outcome or "training has diverged" in outcome


@pytest.mark.world(1, gpu_backend="nccl")
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_one_rank_over_nccl(rank: Rank, mode: Mode) -> None:
    """The reference's values, though there is nobody to send to. A model that is built under Init has the same bits
    each time, and at no time more than 1.05 of what is stored in the end, and a whole layer."""
    check_case(Case(1, 1, *mode, stage=2, overlap=True, accumulation=3, buckets="many"), rank)
    models = []
    for _ in range(2):
        with sdp_deepspeed.Init():
            models.append(llama())
    layer = sum(4 * parameter.numel() for parameter in models[0].get_submodule("model.layers.0").parameters())
    settings = config(coverage=1.0, **mode._asdict()) | {"bf16": {"enabled": True}}
    other = engine_of(settings, models[0])
    on_gpu = other.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    engine = engine_of(settings, models[1])
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    assert_identical(engine.held_tensors(), other.held_tensors())
    assert {tensor.device for tensor in engine.held_tensors().values()} == {torch.device(engine.device)}
    stored = sum(tensor.nbytes for tensor in (*engine.held_tensors().values(), *optimizer_tensors(engine)))
    assert peak <= 1.05 * stored + layer + 2**20, (peak, stored, layer)  # each tensor takes a multiple of 512 bytes


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
