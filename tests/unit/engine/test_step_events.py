"""What goes to monitors, and that other steps pay nothing for it, on an engine that only counts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdp_deepspeed.engine.step_events import RankFigures, events_of, write_step_events

FIGURES = RankFigures(
    loss=2.0,
    gradient_norm=0.5,
    seconds=4.0,
    own_seconds=1.0,
    exchange_seconds=2.0,
    sent=10,
    weights=100,
    gradients=200,
    optimizer=300,
    peak=900,
)


def values(*ranks: RankFigures, **options: Any) -> dict[str, float]:
    events = events_of(ranks, num_samples=64, batch_size=8, **options)
    assert {step for _, _, step in events} == {64}
    return {name.removeprefix("Train/Samples/"): value for name, value, _ in events}


def test_figures_are_those_of_the_rank_with_most() -> None:
    other = replace(FIGURES, loss=4.0, seconds=5.0, own_seconds=3.0, exchange_seconds=0.25, sent=7, weights=101)
    assert values(FIGURES, other, FIGURES) == {
        "train_loss": pytest.approx(8 / 3),
        "gradient_norm": 0.5,
        "step_seconds": 5.0,
        "samples_per_second": 1.6,
        "memory_weights_bytes": 101,
        "memory_gradients_bytes": 200,
        "memory_optimizer_bytes": 300,
        "memory_peak_bytes": 900,
        "sent_bytes": 10,
        "exchange_seconds_least": 0.25,
        "exchange_seconds_most": 2.0,
        "slowest_rank": 1,
        "slowest_over_median": 3.0,
    }


def test_what_is_not_known_is_not_written() -> None:
    plain = replace(FIGURES, loss=None, gradient_norm=None, exchange_seconds=None, sent=None, own_seconds=0.0)
    assert values(plain, plain).keys() == {
        *("step_seconds", "samples_per_second", "slowest_rank"),
        *(f"memory_{kind}_bytes" for kind in ("weights", "gradients", "optimizer", "peak")),
    }


def test_a_loss_says_whose_it_is() -> None:
    assert values(FIGURES, loss_name="subnetwork_loss")["subnetwork_loss"] == 2.0


class Monitor:
    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.written: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        self.written += events


class Engine:
    """Two micro-steps make a step."""

    device = torch.device("cpu")
    plan = SimpleNamespace(trains_subnetworks=True)

    def __init__(self, *, enabled: bool = True, interval: int | None = 2) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.monitor = Monitor(enabled=enabled)
        self.interval = interval
        self.global_steps = self.global_samples = self.micro_steps = 0
        self.calls: list[Any] = []

    def steps_per_print(self) -> int | None:
        return self.interval

    def train_batch_size(self) -> int:
        return 8

    def get_global_grad_norm(self) -> float:
        return 0.25

    def zero_optimization_stage(self) -> int:
        return 1

    def backward(self, loss: Any, *options: Any, **more: Any) -> str:
        self.calls.append(("backward", more))
        return "from backward"

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % 2 == 0:
            self.global_steps += 1
            self.global_samples += 8

    def train(self, mode: bool = True) -> Any:
        self.module.train(mode)
        return self


class Ranks:
    """This rank alone, whose meetings are counted."""

    rank, size, num_meetings = 0, 1, 0

    def gather_objects(self, value: object) -> list[Any]:
        self.num_meetings += 1
        return [value]


def run(engine: Engine, num_steps: int, losses: tuple[float, float] = (1.0, 2.0)) -> None:
    for _ in range(num_steps):
        for loss in losses:
            assert engine.backward(torch.tensor(loss), retain_graph=True) == "from backward"
            engine.step()


def test_every_nth_step_is_written_and_no_other_meets() -> None:
    engine, ranks = Engine(), Ranks()
    assert write_step_events(engine, ranks) is not None
    assert ranks.num_meetings == 1  # on who has a monitor
    run(engine, 1)
    assert not engine.monitor.written
    assert ranks.num_meetings == 1
    run(engine, 2)
    run(engine, 2, losses=(3.0, 5.0))
    assert ranks.num_meetings == 1 + 2
    assert sorted({step for _, _, step in engine.monitor.written}) == [16, 32]
    first, second = ({n: value for n, value, step in engine.monitor.written if step == at} for at in (16, 32))
    losses = [written["Train/Samples/subnetwork_loss"] for written in (first, second)]
    assert losses == [1.5, 4.0], "the mean over the micro-steps of this step alone"
    assert first["Train/Samples/gradient_norm"] == 0.25
    assert first["Train/Samples/memory_weights_bytes"] == 6 * 4
    assert "Train/Samples/sent_bytes" not in first
    assert engine.calls[0] == ("backward", {"retain_graph": True})


@pytest.mark.parametrize(
    ("options", "named", "expected"),
    [
        ((), {"scale_wrt_gas": False}, 3.0),
        ((False, False), {}, 3.0),
        ((True, True), {}, 1.5),
        ((True,), {"scale_wrt_gas": True}, 1.5),
    ],
)
def test_losses_that_the_caller_has_divided_are_summed(
    options: tuple[bool, ...], named: dict[str, bool], expected: float
) -> None:
    engine = Engine(interval=1)
    assert write_step_events(engine, Ranks()) is not None
    for _ in range(2):
        for loss in (1.0, 2.0):
            engine.backward(torch.tensor(loss), *options, **named)
            engine.step()
    assert ("Train/Samples/subnetwork_loss", expected, 16) in engine.monitor.written


def test_without_a_monitor_nothing_is_installed() -> None:
    engine, ranks = Engine(enabled=False), Ranks()
    assert write_step_events(engine, ranks) is None
    assert not {"backward", "step", "train"} & vars(engine).keys()


def test_rank_0_decides() -> None:
    class OfTwo(Ranks):
        rank, size = 1, 2

        def gather_objects(self, value: object) -> list[Any]:
            return [(True, 5), value] if isinstance(value, tuple) else [FIGURES, value]

    engine = Engine(enabled=False)
    events = write_step_events(engine, OfTwo())
    assert events is not None
    assert events.interval == 5
    run(engine, 5)
    assert not engine.monitor.written, "rank 0 writes, nobody else"


@pytest.mark.parametrize("given", [None, float("inf")])
def test_without_an_interval_every_tenth_step(given: Any) -> None:
    """Accelerate sets infinity, so that DeepSpeed prints nothing."""
    events = write_step_events(Engine(interval=given), Ranks())
    assert events is not None
    assert events.interval == 10


def test_an_evaluation_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training goes on, the watch begins again; `train` in the middle of training changes nothing."""
    engine = Engine()
    events = write_step_events(engine, Ranks())
    assert events is not None
    begun: list[int] = []
    monkeypatch.setattr(events._watch, "begin", lambda: begun.append(engine.global_steps))
    run(engine, 1)
    engine.train()
    assert begun == [1]
    engine.module.eval()
    engine.train()
    assert begun == [1, 1]
