"""What differs between a stock engine and ours, as far as no ranks are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.schedule import Phase
from sdp_deepspeed.training import engines
from sdp_deepspeed.training.user_errors import RunFolderError
from sdp_deepspeed.units import Piece, Unit

BEGINS = "save_pretrained: cannot write"  # an error of the dense export


@dataclass
class StockEngine:
    """What the functions ask of any engine."""

    stage: int = 1
    error: Exception | None = None

    def zero_optimization_stage(self) -> int:
        return self.stage

    def train_micro_batch_size_per_gpu(self) -> int:
        return 4

    def save_checkpoint(self, folder: str, **options: Any) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class OurEngine(StockEngine):
    """With a plan, and checkpoints that may be written in the background."""

    plan: Plan | None = None
    schedule: Any = None
    phase: int = 0

    @property
    def coverage(self) -> float:
        assert self.plan is not None
        return 0.625  # by FLOPs, unlike the plan's own

    def step(self) -> None:
        self.save_checkpoint("")

    def wait_for_checkpoint(self) -> None:
        self.save_checkpoint("")


@dataclass
class FsdpEngine(OurEngine):
    """Which may have no plan."""

    stage: int = 3
    is_fsdp: bool = True


def plan(regime: str = "forward", strategy: Any = "block", holders: int = 1) -> Plan:
    held = tuple(tuple(sorted((i + j) % 2 for j in range(holders))) for i in range(2))
    units = tuple(Unit(f"u{i}", (Piece(f"w{i}", None, 0, 4),)) for i in range(2))
    return Plan(regime, strategy, 2, holders, 0, units, held, (0, 1))


@pytest.mark.parametrize(
    ("engine", "label"),
    [
        (StockEngine(2), "ZeRO-2"),
        (FsdpEngine(), "FSDP2"),
        (FsdpEngine(plan=plan()), "SDP 1/2 + FSDP2"),
        (OurEngine(plan=plan()), "SDP 1/2 + ZeRO-1"),
        (OurEngine(0, plan=plan("backward", "neuron", 2)), "SDP 2/2 backward x neuron + ZeRO-0"),
        (OurEngine(plan=replace(plan(), num_holders=None, holders=((0, 1), (1,)))), "SDP 1-2/2 (mean 1.25) + ZeRO-1"),
        (OurEngine(plan=plan("forward", {"mlp": "neuron"})), "SDP 1/2 forward x mixed + ZeRO-1"),
    ],
)
def test_labels(engine: StockEngine, label: str) -> None:
    assert engines.label(engine) == label


def test_phases_of_a_schedule() -> None:
    """What holds everything is called so there; without a schedule a label says how many hold it."""
    phases = Phase(1, 9, {"coverage": 0.5}), Phase(10, None, {"coverage": 1.0}, micro_batch=2)
    engine = OurEngine(plan=plan(), schedule=SimpleNamespace(phases=phases))
    first = engines.present(engine)
    assert (first.label, first.where, first.last_step) == ("SDP 1/2 + ZeRO-1", "phase 1 of 2", 9)
    assert not engines.has_changed(engine, first)
    engine.plan, engine.phase, engine.stage = plan(holders=2), 1, 2
    assert engines.has_changed(engine, first)
    second = engines.present(engine)
    assert (second.label, second.where, second.last_step) == ("dense + ZeRO-2", "phase 2 of 2", None)
    assert engines.micro_batches(engine) == [2]
    engine.schedule, engine.phase = SimpleNamespace(phases=phases[:1]), 0  # new draws alone
    assert (engines.present(engine).where, engines.micro_batches(engine)) == ("", [])
    without = engines.present(OurEngine(plan=plan(holders=2)))
    assert (without.label, without.where, without.phase) == ("SDP 2/2 + ZeRO-1", "", None)
    assert without.coverage == 0.625
    assert not engines.has_changed(StockEngine(), engines.present(StockEngine()))
    assert engines.micro_batches(StockEngine()) == []


def test_whose_loss_it_is() -> None:
    """A worker that has all units, or runs them all, trains the dense model."""
    assert engines.trains_subnetwork(OurEngine(plan=plan()))
    others = (StockEngine(), OurEngine(plan=plan(holders=2)), OurEngine(plan=plan("backward")))
    assert not any(map(engines.trains_subnetwork, others))


def test_a_checkpoint_that_cannot_be_written_is_no_bug_of_ours(tmp_path: Any) -> None:
    full = OurEngine(error=RuntimeError("checkpoint: no space left"), plan=plan())
    with pytest.raises(RunFolderError, match="checkpoint: no space left; start the same command again"):
        engines.save_checkpoint(full, tmp_path, tag="step_1", client_state={})
    with pytest.raises(RunFolderError, match="no space left"):
        engines.wait_for_checkpoint(full)
    with pytest.raises(RunFolderError, match="no space left"):
        engines.step(full)  # which waits for one where the plan changes
    engines.wait_for_checkpoint(StockEngine(error=RuntimeError("is never called")))
    broken = StockEngine(error=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug") as caught:
        engines.save_checkpoint(broken, tmp_path, tag="step_1", client_state={})
    assert not isinstance(caught.value, RunFolderError)


class Full:
    """A model and its tokenizer on a disk with room for one file."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError(28, "No space left on device")


def test_an_export_that_does_not_fit_leaves_nothing_and_is_no_bug_of_ours(tmp_path: Path) -> None:
    stock: Any = SimpleNamespace(module=Full())
    ours: Any = mock.Mock(save_pretrained=mock.Mock(side_effect=RuntimeError(f"{BEGINS} hf: full")))
    for engine, reason in ((stock, "No space left"), (ours, "full")):
        with pytest.raises(RunFolderError, match=f"{BEGINS} .*hf: .*{reason}.*; start the same command again"):
            engines.save_pretrained(engine, tmp_path / "hf", Full(), OneRank())
    assert not list(tmp_path.iterdir())
