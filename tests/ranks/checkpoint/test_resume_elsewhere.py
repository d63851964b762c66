"""Resuming with other param groups, accumulation, precisions, and with tensors of no elements."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from tests.helpers import fp16_runs
from tests.helpers.checkpointed_runs import dense_tensors, settings_of, stepped
from tests.helpers.gpus import untouched_gpus
from tests.helpers.models import batches, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import SGD, assert_identical, dense_state, engine_of, gathered, micro_step, refusal, train

pytestmark = pytest.mark.world(2)


def test_a_group_of_which_a_rank_owns_nothing(rank: Rank) -> None:
    """Rank 0 writes what is one for the run; step counts of a group that it does not step are told by others."""
    for stage, part in itertools.product((0, 1), ("layers.0.self_attn", "layers.1.mlp")):

        def start(part: str = part, stage: int = stage) -> Any:
            model = llama()
            named = dict(model.named_parameters())
            groups: list[Any] = [[p for name, p in named.items() if (part in name) == own] for own in (False, True)]
            optimizer = torch.optim.Adam([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], lr=1e-2)
            settings = settings_of(stage) | {"zero_allow_untested_optimizer": True}
            return engine_of({key: settings[key] for key in settings if key != "optimizer"}, model, optimizer=optimizer)

        engine = start()
        train(engine, num_steps=2)
        folder = str(rank.folder / f"{stage}{part}")
        engine.save_checkpoint(folder)
        resumed = start()
        resumed.load_checkpoint(folder)
        assert train(resumed, num_steps=2, first=2) == train(engine, num_steps=2, first=2)
        assert_identical(stepped(resumed), stepped(engine))


def test_one_more_is_frozen(rank: Rank) -> None:
    """Options of the param groups still are the checkpoint's: what both runs train is grouped alike."""
    settings = settings_of() | {"optimizer": {"type": "Adam", "params": {"lr": 0.03, "torch_adam": True}}}
    del settings["scheduler"]
    engine = engine_of(settings)
    train(engine, num_steps=1)
    engine.save_checkpoint(str(rank.folder))
    model: Any = llama()
    model.model.norm.weight.requires_grad_(False)
    settings["optimizer"]["params"]["lr"] = 0.5
    resumed = engine_of(settings, model)
    resumed.load_checkpoint(str(rank.folder))
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.03]


def test_another_accumulation_begins_a_step(rank: Rank) -> None:
    """As many micro-steps as the new config says, from the first step on."""
    engine = engine_of(settings_of())
    train(engine, num_steps=3)
    engine.save_checkpoint(str(rank.folder))
    resumed = engine_of(settings_of() | {"gradient_accumulation_steps": 2})
    resumed.load_checkpoint(str(rank.folder))
    steps = []
    for batch in itertools.chain(*(step[rank.rank] for step in itertools.islice(batches(rank.size, 2), 2))):
        micro_step(resumed, batch)
        steps.append(resumed.global_steps)
    assert steps == [3, 4, 4, 5]


def test_empty_tensors(rank: Rank) -> None:
    def start() -> Any:
        model = llama()
        model.register_buffer("nothing", torch.empty(0))
        model.register_parameter("none", nn.Parameter(torch.empty(0, 3)))
        return engine_of(settings_of(), model)

    engine, other = start(), start()
    train(engine, num_steps=1)
    engine.save_checkpoint(str(rank.folder))
    other.load_checkpoint(str(rank.folder))
    assert_identical(dense_state(other), dense_state(engine))


class Watch(nn.Module):
    """Remembers what its rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean: torch.Tensor = self.mean.lerp(x.detach().mean(0), 0.1)  # another object
        return x * self.scale


class Branch(nn.Module):
    """`x + body(norm(x))` whose norm remembers what its rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = Watch(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


def test_each_rank_s_own_buffers(rank: Rank) -> None:
    """Nobody averages them: on the same layout each rank goes on with its own, on another one with some holder's."""
    architectures.register(Branch, architectures.Branch("mlp", norm="norm", body="body"))

    def start(holders: int, regime: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Watch(), Branch(), Branch(), nn.Linear(6, 2))
        return engine_of(settings_of(holders=holders, regime=regime), model)

    def step(engine: Any) -> None:
        engine.backward(engine(torch.randn(5, 6)).square().mean())
        engine.step()

    for holders, regime in itertools.product((1, 2), ("forward", "backward")):
        torch.manual_seed(rank.rank)
        engine = start(holders, regime)
        torch.manual_seed(rank.rank)
        step(engine)
        folder = str(rank.folder / f"{holders}{regime}")
        engine.save_checkpoint(folder)
        own = dict(engine.module.named_buffers())
        assert len({float(means.sum()) for means in gathered(own["0.mean"])}) == 2
        resumed = start(holders, regime)
        resumed.load_checkpoint(folder)
        assert_identical(dict(resumed.module.named_buffers()), own)
        other = start(3 - holders, "forward")
        other.load_checkpoint(folder)
        stored = dense_tensors(rank.folder / f"{holders}{regime}" / "global_step1")
        held = {name: value for name, value in other.module.named_buffers() if value.numel()}
        assert_identical(held, {name: stored[f"weight/{name}"] for name in held})


def test_a_run_on_cpus_starts_no_gpu(rank: Rank) -> None:
    """Where the machine has some, a context on one of them would take memory from whoever uses it. PyTorch's own Adam
    starts one in a CUDA build: it asks the current stream whether it is captured. SGD does not."""
    with untouched_gpus():
        engine = engine_of(settings_of() | {"optimizer": SGD})
        train(engine, num_steps=1)
        dense_state(engine)
        engine.save_checkpoint(str(rank.folder))
        engine.load_checkpoint(str(rank.folder))


def test_a_run_in_bf16_goes_on_in_fp16(rank: Rank) -> None:
    """With the new run's loss scale, and weights that are the rounded masters, not rounded twice."""
    adam = {"optimizer": settings_of()["optimizer"]}
    engine = engine_of(settings_of(1, "bf16"))
    train(engine, num_steps=2)
    engine.save_checkpoint(str(rank.folder))
    resumed = fp16_runs.engine_of(fp16_runs.settings_of(1, fp16_runs.DYNAMIC) | adam)
    resumed.load_checkpoint(str(rank.folder))
    assert (resumed.optimizer.loss_scaler.dynamic, resumed.optimizer.loss_scale) == (True, 64)
    stored = dense_tensors(rank.folder / "global_step2")
    for name, weight in dense_state(resumed).items():
        if f"weight/{name}" in stored:
            assert torch.equal(stored[f"weight/{name}"].half(), weight), name
    train(resumed, num_steps=1, first=2)


def test_another_scheduler(rank: Rank) -> None:
    """It would go on from its beginning, or fail when all else is loaded."""
    engine = engine_of(settings_of())
    engine.save_checkpoint(str(rank.folder))
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    own = {"lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), "optimizer": optimizer}
    settings = {key: value for key, value in settings_of().items() if key not in ("scheduler", "optimizer")}
    other = engine_of(settings, model, **own)
    before = dense_state(other)
    load = partial(other.load_checkpoint, str(rank.folder))
    assert not other.lr_scheduler.state_dict().keys() & engine.lr_scheduler.state_dict().keys()
    refusal(ValueError, load, "LR scheduler", "load_lr_scheduler_states=False")
    assert_identical(dense_state(other), before)
    load(load_lr_scheduler_states=False)
