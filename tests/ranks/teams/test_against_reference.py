"""Teams of each host against the reference of local steps, DiLoCo by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import sdp_deepspeed
from sdp_deepspeed.estimate.forecast import forecast, model_of
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.teams.team import Team
from tests.helpers import more_models, tensor_parallel_models
from tests.helpers.models import LENGTH, MIXED, batches, config, llama, loss_of
from tests.helpers.teams import Place, run_teams
from tests.helpers.tensor_parallel_models import OwnModel, describe_own, mpu
from tests.reference.local_steps import LocalReference, LocalSteps
from tests.reference.virtual_workers import Reference

STEPS = 6  # H is 2 or 3: two or three meetings
# Sums in another order, over the ranks of a team and over teams; relative to the largest value and 1.
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Case:
    """Teams of `size` ranks, of which `tensor_parallel` together have a model."""

    host: str
    num_teams: int
    size: int
    block: dict[str, Any] = field(default_factory=dict)
    outer: tuple[float, float] = (0.7, 0.9)
    every: int = 3
    model: str = "llama"
    tensor_parallel: int = 1
    under_init: bool = False  # of DeepSpeed

    def build(self) -> nn.Module:
        if self.tensor_parallel > 1:
            return tensor_parallel_models.build(self.model)
        return llama() if self.model == "llama" else more_models.ALL_SPECIMENS[self.model].build()

    @property
    def data_parallel(self) -> int:
        """Workers with other batches in each team."""
        return self.size // self.tensor_parallel

    @property
    def lr(self) -> float:
        return 0.1 if self.model == "llama" else 0.01

    @property
    def whole_block(self) -> dict[str, Any]:
        steps = {
            "teams": self.num_teams,
            "every": self.every,
            "outer_lr": self.outer[0],
            "outer_momentum": self.outer[1],
        }
        return {"coverage": 0.5, **self.block, "local_steps": steps}


NEURON: dict[str, Any] = {"strategy": "neuron"}
BACKWARD: dict[str, Any] = {"regime": "backward"}
MEANS = (1.0, 0.0)  # the weights' own
CASES = {
    "bare": Case("bare", 4, 1, outer=MEANS),
    "DiLoCo": Case("ddp", 2, 2, {"coverage": 1.0}, every=2),
    "fully_shard": Case("fully_shard", 2, 2),
    "bare, backward, batch norms": Case("bare", 4, 1, BACKWARD, model="resnet_bottleneck"),
    "ZeRO-3": Case("zero3", 2, 2),
    "ZeRO-1, backward, neurons": Case("zero1", 2, 2, BACKWARD | NEURON, MEANS),
    "bare, channels with batch norms": Case("bare", 4, 1, NEURON, model="resnet_bottleneck"),
    "DDP, batch norms": Case("ddp", 2, 2, model="resnet_bottleneck"),
    "ZeRO-3, Init, neurons": Case("zero3", 2, 2, NEURON, every=2, under_init=True),
    # AutoTP last: DeepSpeed keeps its groups until the process ends.
    "ZeRO-2, AutoTP, neurons": Case("zero2", 2, 2, NEURON, every=2, model="qwen3", tensor_parallel=2),
}
BACKWARD_MIXED = BACKWARD | {"strategy": MIXED}
FURTHER = {  # other hosts of the modes above
    "fully_shard, backward": Case("fully_shard", 2, 2, BACKWARD_MIXED),
    "ZeRO-3, Init, backward": Case("zero3", 2, 2, BACKWARD_MIXED, under_init=True),
    "ZeRO-3, AutoTP, backward": Case("zero3", 2, 2, BACKWARD_MIXED, model="qwen2_61", tensor_parallel=2),
    "mpu": Case("zero1", 2, 2, NEURON, model="own", tensor_parallel=2),
    "ZeRO-1, 2 x 2": Case("zero1", 2, 4, NEURON, model="qwen3", tensor_parallel=2),
    "ZeRO-3, 2 x 2": Case("zero3", 2, 4, model="llama_tied_61", tensor_parallel=2),
    "ZeRO-0, 2 x 2, backward": Case("zero0", 2, 4, BACKWARD | NEURON, model="qwen3", tensor_parallel=2),
}


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def wrapped(host: str, model: Any) -> Any:
    if host == "ddp":
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    if host == "fully_shard":
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer)
        return torch.distributed.fsdp.fully_shard(model)
    return model


def by_pytorch(case: Case, model: nn.Module) -> Callable[[torch.Tensor], Team]:
    team = sdp_deepspeed.join(model, case.whole_block)
    run = wrapped(case.host, model)
    optimizer = sgd((p for p in run.parameters() if p.requires_grad), case.lr)
    team.start()

    def take_step(batch: torch.Tensor) -> Team:
        loss_of(run, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if case.host == "fully_shard":
            with torch.no_grad():
                loss_of(run, batch)  # leaves the modules with whole copies of weights
        team.step()
        return team

    return take_step


def by_deepspeed(case: Case, model: nn.Module) -> Callable[[torch.Tensor], Team]:
    settings = config(**case.whole_block) | {
        "optimizer": {"type": "SGD", "params": {"lr": case.lr, "momentum": 0.9}},
        "zero_optimization": {"stage": int(case.host[-1])},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    options: dict[str, Any] = {}
    if case.under_init:
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    if case.model == "own":
        options["mpu"] = mpu()
    elif case.tensor_parallel > 1:
        settings["tensor_parallel"] = {"autotp_size": case.tensor_parallel}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings, **options)

    def take_step(batch: torch.Tensor) -> Team:
        engine.backward(loss_of(engine, batch))
        engine.step()
        team: Team = engine.team
        return team

    return take_step


def train(place: Place, cases: list[Case], lighthouses: list[str]) -> None:
    """Train each case, one after the other; rank 0 of each team saves the dense model."""
    describe_own()
    for index, case in enumerate(cases):
        os.environ["TORCHFT_LIGHTHOUSE"] = lighthouses[index]
        model = OwnModel(mpu().get_model_parallel_group()) if case.model == "own" else case.build()
        take_step = (by_deepspeed if case.host.startswith("zero") else by_pytorch)(case, model)
        data, before = batches(case.num_teams * case.data_parallel, 1), 0
        worker = (place.team * place.size + place.rank) // case.tensor_parallel
        for _ in range(STEPS):
            (batch,) = next(data)[worker]
            team = take_step(batch)
            sent = team.bytes_sent - before
            with team.dense():
                shown = {name: value.clone() for name, value in model.state_dict().items()}
            before = team.bytes_sent
        assert team.version == STEPS // case.every
        dense = team.dense_state_dict()
        assert bool(dense) == (place.rank == 0)
        assert shown.keys() == case.build().state_dict().keys()
        if case.tensor_parallel == 1:
            assert all(torch.equal(shown[name], value) for name, value in dense.items())
        if place.rank == 0:
            anchors = sum(team.state_dict()[name].nbytes for name in ("anchors", "momentum"))
            weights = sum(p.nbytes for p in model.parameters())
            torch.save((weights, anchors, sent), place.folder / f"{index}-{place.team}-bytes.pt")
        if place.rank == place.team == 0:
            team.plan.save(place.folder / f"{index}.json")
        if index == 0:
            team.save_pretrained(place.folder / "export")
        if dense:
            torch.save(dense, place.folder / f"{index}-{place.team}.pt")
        with torch.no_grad():
            for parameter in model.parameters():
                getattr(parameter, "_local_tensor", parameter).data.mul_(1.1)  # of FSDP2
        is_seen = case.host != "zero3"  # which has its weights in other tensors
        with pytest.raises(RuntimeError, match="weights were changed") if is_seen else nullcontext():
            for _ in range(case.every):
                take_step(batch)
        team.leave()


def expected(case: Case, plan: Plan) -> dict[str, torch.Tensor]:
    model = case.build()
    steps = LocalSteps(case.every, *case.outer)
    ranks = tuple(rank // case.data_parallel for rank in range(case.num_teams * case.data_parallel))
    plan = replace(plan, subnetwork_of_rank=ranks)

    def make_team(model: nn.Module, ranks: Any) -> Reference:
        optimizer = lambda named: sgd(named.values(), case.lr)  # noqa: E731
        is_scaled = case.block.get("branch_scale") != "none"
        return Reference(model, plan, optimizer, loss_of, ranks=ranks, is_scaled=is_scaled)

    reference = LocalReference(model, plan, steps, make_team)
    data = batches(len(ranks), 1)
    for _ in range(STEPS):
        reference.step(next(data))
    buffers = {name: value for name, value in reference.dense_buffers().items() if name in model.state_dict()}
    return {**{name: anchor.detach() for name, anchor in reference.anchors.items()}, **buffers}


def check_estimate(case: Case, team: int, measured: tuple[int, int, int]) -> None:
    """Bytes of weights, below stage 3, of anchors with momentum, and of the last meeting, of rank 0 of a team."""
    settings = config(**case.whole_block) | {"zero_optimization": {"stage": int(case.host[-1])}}
    model = model_of(vars(llama())["config"].to_dict(), settings, sequence_length=LENGTH)
    figures = forecast(model, settings, num_ranks=case.size, rank=team)
    weights, anchors, sent = measured
    assert (figures.anchors, figures.sent_per_meeting) == (anchors, sent)
    if "backward" not in case.whole_block.values() and case.host != "zero3":
        assert abs(figures.rank.weights - weights) < 4 * 2 * case.size, "padding"


def check(folder: Path, cases: Sequence[Case]) -> None:
    describe_own()
    run_teams(folder, train, cases[0].num_teams, cases[0].size, cases, runs=len(cases))
    for index, case in enumerate(cases):
        plan = Plan.load(folder / f"{index}.json")
        wanted, before = expected(case, plan), case.build().state_dict()
        assert max((wanted[key] - before[key]).abs().max() for key in wanted) > 1e-2
        for team in range(case.num_teams):
            dense = torch.load(folder / f"{index}-{team}.pt")
            assert dense.keys() == wanted.keys()
            if case.host.startswith("zero") and case.model == "llama" and case.tensor_parallel == 1:
                check_estimate(case, team, torch.load(folder / f"{index}-{team}-bytes.pt"))
            if index == 0:
                exported = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
                assert all(torch.equal(exported[key], value) for key, value in dense.items())
            for key, value in wanted.items():
                difference = (dense[key] - value).abs().max()
                assert difference < TOLERANCE * (1 + value.abs().max()), (case, team, key, difference)


@pytest.mark.parametrize("size", [1, 2])
def test_teams_are_diloco_by_hand(size: int, tmp_path: Path) -> None:
    check(tmp_path, [case for case in CASES.values() if case.size == size])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_so_are_further_ones(size: int, tmp_path: Path) -> None:
    check(tmp_path, [case for case in FURTHER.values() if case.size == size])
