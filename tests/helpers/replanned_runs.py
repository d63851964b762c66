"""Runs whose plan changes while they train, next to engines that load what they saved: the same bits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.checkpoint.random_state import random_state
from tests.helpers.checkpointed_runs import settings_of, stepped
from tests.helpers.models import batches, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.tensor_parallel_models import build
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered

# Of what one plan says and the next one does not.
DEFAULTS: dict[str, Any] = {
    "regime": "forward",
    "strategy": "block",
    "granularity": "sublayer",
    "subnetworks": "auto",
    "assignment": "auto",
    "seed": 0,
    "neuron_groups": None,
    "branch_scale": "training",
}


def language_model() -> nn.Module:
    return build("llama_tied")


def tokens_loss(engine: Any, generator: torch.Generator) -> torch.Tensor:
    return loss_of(engine, next(batches(1, 1, seed=int(torch.randint(10**6, (), generator=generator))))[0][0])


@dataclass(frozen=True)
class Phase:
    """From one re-plan to the next.

    Args:
        block: of the config; what it does not say is the default.
        stage: None leaves it.
    """

    block: Mapping[str, Any]
    stage: int | None = None


@dataclass(frozen=True)
class Sequence_:
    """A run of several phases.

    Args:
        phases: the first is how it starts, with its stage.
    """

    size: int
    phases: Sequence[Phase]
    precision: str = "fp32"
    model: Callable[[], nn.Module] = language_model
    loss: Callable[[Any, torch.Generator], torch.Tensor] = tokens_loss
    config: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, phase: Phase, stage: int) -> Any:
        settings = settings_of(stage, self.precision, **(DEFAULTS | dict(phase.block))) | dict(self.config)
        settings["zero_optimization"] = {**settings["zero_optimization"], "stage": stage}
        if "coverage" in phase.block or str(phase.block.get("assignment", "")).endswith(".json"):
            del settings["subnetwork_data_parallel"]["holders"]
        return engine_of(settings, self.model())

    def train(self, engine: Any, num_steps: int) -> list[float]:
        """Each rank's own batches, the same for an engine that stands at the same step."""
        losses = []
        for _ in range(num_steps):
            seed = 1000 * engine.global_steps + dist.get_rank(engine.seq_data_parallel_group)
            loss = self.loss(engine, torch.Generator().manual_seed(seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses


def check_sequence(run: Sequence_, rank: Rank) -> None:
    """Each re-plan is a checkpoint saved before it and loaded in an engine of the new plan, bit for bit."""
    stage = run.phases[0].stage or 0
    engine = run.engine(run.phases[0], stage)
    run.train(engine, 2)
    for number, phase in enumerate(run.phases[1:]):
        stage = stage if phase.stage is None else phase.stage
        folder = str(rank.folder / str(number))
        engine.save_checkpoint(folder)
        replanned(engine, phase)
        other = run.engine(phase, stage)
        other.load_checkpoint(folder)
        assert_same_run(engine, other)
        assert run.train(engine, 2) == run.train(other, 2)
        assert_same_run(engine, other)
        assert_identical(dense_state(engine), dense_state(other))
    again = run.engine(run.phases[-1], stage)
    engine.save_checkpoint(str(rank.folder / "last"))
    engine.wait_for_checkpoint()
    again.load_checkpoint(str(rank.folder / "last"))
    assert_same_run(engine, again)


def replanned(engine: Any, phase: Phase) -> None:
    """Re-plan, and look whether objects, counters and random numbers stay."""
    objects, counters, numbers = objects_of(engine), counters_of(engine), random_numbers()
    block = DEFAULTS | {"holders": 1} | dict(phase.block)
    if "coverage" in phase.block:
        del block["holders"]
    result = engine.replan(block, stage=phase.stage)
    assert all(map(operator.is_, objects, objects_of(engine))), "other objects"
    assert counters_of(engine) == counters
    assert random_numbers() == numbers
    assert len(set(gathered(result))) == 1


def random_numbers() -> list[Any]:
    """The state of this rank's generators: PyTorch's, NumPy's and Python's."""
    state = random_state()
    kind, keys, *position = state["numpy"]
    return [state["torch"].tolist(), kind, keys.tolist(), position, state["python"]]


def objects_of(engine: Any) -> list[object]:
    """What users have references to."""
    inner = engine.optimizer.optimizer
    objects = [engine.module, engine.optimizer, inner, engine.basic_optimizer, engine.lr_scheduler, inner.param_groups]
    return [*objects, *inner.param_groups, *engine.module.parameters()]


def counters_of(engine: Any) -> list[Any]:
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    counts = [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps]
    return [*counts, scheduler, engine.get_lr(), engine.optimizer.loss_scale]


def assert_same_run(one: Any, other: Any) -> None:
    """Weights, masters, moments, counts, options: the same bits on this rank."""
    assert one.plan.hash == other.plan.hash
    assert one.zero_optimization_stage() == other.zero_optimization_stage()
    assert_identical(stepped(one), stepped(other))
    held, expected = one.held_tensors(), other.held_tensors()
    assert_identical({k: v.detach() for k, v in held.items()}, {k: v.detach() for k, v in expected.items()})
    assert [list(_strides(one))] == [list(_strides(other))]
    options, expected_options = ([_options(g) for g in e.optimizer.param_groups] for e in (one, other))
    assert options == expected_options, (options, expected_options)
    assert [p.requires_grad for p in one.module.parameters()] == [p.requires_grad for p in other.module.parameters()]
    assert one.global_steps == other.global_steps


def _strides(engine: Any) -> Iterator[Any]:
    for name, tensor in engine.held_tensors().items():
        yield name, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
