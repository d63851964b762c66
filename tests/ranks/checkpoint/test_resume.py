"""Save and resume through DeepSpeed's calls: on the same layout, with other param groups, accumulation, precisions, and
with tensors of no elements; other layouts are in test_reshard.py."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import fp16_runs
from tests.helpers.checkpointed_runs import Branch, dense_tensors, names_in, settings_of, stepped
from tests.helpers.gpus import untouched_gpus
from tests.helpers.models import batches, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import (
    SGD,
    assert_identical,
    dense_state,
    engine_of,
    gathered,
    micro_step,
    refusal,
    train,
    without_optimizer,
)

pytestmark = pytest.mark.world(2)


def draw() -> list[float]:
    """One number from each source of randomness that a checkpoint restores."""
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


def draw_after(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    draw()


def started(stage: int, precision: str, optimizer: str, block: dict[str, Any]) -> Any:
    settings, model = settings_of(stage, precision, **block), llama()
    if optimizer == "Muon":
        settings["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "torch_adam": True}}
        for name, parameter in model.named_parameters():
            vars(parameter)["use_muon"] = parameter.dim() == 2 and "layers" in name
    return engine_of(settings, model)


def test_an_interrupted_run_goes_on(rank: Rank) -> None:
    """Bit for bit: losses, weights, moments, masters, schedule, counters, random numbers. What is saved behind the
    training is the state at the call, whatever steps follow."""
    backward, neuron = {"regime": "backward"}, {"strategy": "neuron"}
    behind = {"checkpoint": {"asynchronous": True}}
    client: dict[str, Any] = {"position": 17, "name": "x", "nested": [1, {"a": None, "b": (2.5, True)}]}
    cases: list[tuple[int, str, str, dict[str, Any]]] = [
        (0, "fp32", "AdamW", {}),
        (1, "fp32", "AdamW", backward),
        (1, "bf16", "AdamW", neuron | behind),
        (0, "bf16", "AdamW", backward | neuron),
        (2, "bf16+fp32", "AdamW", {}),
        (2, "fp32", "AdamW", neuron | behind),
        (1, "fp32", "Muon", {}),  # whose matrices are stepped whole
    ]
    for number, case in enumerate(cases):
        folder, engine = str(rank.folder / f"{number}"), started(*case)
        with torch.compiler.set_stance("force_eager"):
            train(engine, num_steps=3)
            draw_after(rank.rank)
            engine.save_checkpoint(folder, client_state=client | {"t": torch.arange(3)})
            numbers, losses = draw(), train(engine, num_steps=3, first=3)
            engine.wait_for_checkpoint()

            resumed = started(*case)
            train(resumed, num_steps=1, seed=9)  # its state is not the initial one
            path, client_state = resumed.load_checkpoint(folder)
            assert path == str(Path(folder) / "global_step3")
            assert torch.equal(client_state.pop("t"), torch.arange(3))
            assert client_state == client
            assert (resumed.global_steps, resumed.global_samples) == (3, 3 * 2 * rank.size)
            assert draw() == numbers
            assert train(resumed, num_steps=3, first=3) == losses
        assert resumed.get_lr() == engine.get_lr()
        assert_identical(stepped(resumed), stepped(engine))
        assert_identical(dense_state(resumed), dense_state(engine))
        resumed.save_checkpoint(folder, tag="again")
        assert resumed.load_checkpoint(folder)[0] == str(Path(folder) / "again"), "which waits for it"


def test_tags_and_latest(rank: Rank) -> None:
    """Where there is nothing to load, nothing is."""
    engine, states = engine_of(settings_of(checkpoint={"keep_last": 3})), {}
    before = dense_state(engine)
    assert engine.load_checkpoint(str(rank.folder)) == (None, None)
    assert engine.load_checkpoint(str(rank.folder / "nowhere")) == (None, None)
    refusal(ValueError, lambda: engine.load_checkpoint(str(rank.folder), tag="lost"), "lost")
    assert_identical(dense_state(engine), before)
    for tag in ("first", "second", "first"):  # the third replaces the first
        train(engine, num_steps=1)
        engine.save_checkpoint(str(rank.folder), tag=tag)
        states[tag] = dense_state(engine)
    train(engine, num_steps=1)
    engine.save_checkpoint(str(rank.folder), tag="third", save_latest=False)
    loads: list[tuple[str | None, str]] = [(None, "first"), ("second", "second"), ("first", "first")]
    for wanted, expected in loads:
        path, client_state = engine.load_checkpoint(str(rank.folder), tag=wanted)
        assert path == str(rank.folder / expected)
        assert client_state == {}
        assert_identical(dense_state(engine), states[expected])
    dist.barrier()
    assert names_in(rank.folder) == ["first", "latest", "second", "third"]
    engine.save_checkpoint(str(rank.folder), tag="again")  # written last, of a step before that of the third
    dist.barrier()
    assert names_in(rank.folder) == ["again", "first", "latest", "third"]


def test_parts_of_a_checkpoint(rank: Rank) -> None:
    """bf16: after a load without optimizer states the masters follow the weights, or the next step undoes the load.
    Earlier versions saved an outer momentum of local steps, which is dropped."""
    folder = str(rank.folder)
    for precision in ("fp32", "bf16"):
        saved = engine_of(settings_of(1, precision))
        train(saved, num_steps=3)
        for parameter, state in saved.optimizer.state.items():
            state["outer_momentum"] = torch.ones_like(parameter)
        saved.save_checkpoint(folder)
        weights = dense_state(saved)
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine = engine_of(settings_of(1, precision))
            train(engine, num_steps=1, seed=4)
            moments = {name: value for name, value in stepped(engine).items() if not name.startswith("stepped")}
            engine.load_checkpoint(folder, **options)
            assert_identical(dense_state(engine), weights)
            after = stepped(engine)
            assert_identical({name: after[name] for name in moments}, moments)
            only = "load_module_only" in options
            assert engine.global_steps == (1 if only else 3)
            assert engine.lr_scheduler.last_batch_iteration == (0 if only else 2)
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0
            engine.lr_scheduler = None
            train(engine, num_steps=1)
            assert_identical(dense_state(engine), weights)
        engine = engine_of(settings_of(1, precision))
        engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert engine.lr_scheduler.last_batch_iteration != 2
        assert not any("outer_momentum" in state for state in engine.optimizer.state.values())
        refusal(ValueError, partial(engine.load_checkpoint, folder, custom_load_fn=print), "custom_load_fn")


def test_frozen_parameters_may_be_left_out(rank: Rank) -> None:
    def with_frozen_embeddings() -> Any:
        model: Any = llama()
        model.get_input_embeddings().weight.requires_grad_(False)
        return engine_of(settings_of(), model)

    engine = with_frozen_embeddings()
    train(engine, num_steps=2)
    expected = dense_state(engine)
    for excluded in (False, True):
        folder = str(rank.folder / f"{excluded}")
        engine.save_checkpoint(folder, exclude_frozen_parameters=excluded)
        other = with_frozen_embeddings()
        train(other, num_steps=1, seed=3)
        if excluded:
            refusal(ValueError, partial(other.load_checkpoint, folder), "it lacks 1 tensors")
        other.load_checkpoint(folder, load_module_strict=not excluded)
        assert_identical(dense_state(other), expected)
        assert train(other, num_steps=1, first=2) == train(engine, num_steps=1, first=2)
        engine.load_checkpoint(folder, load_module_strict=False)


def test_checksums_are_compared_unless_switched_off(rank: Rank) -> None:
    engine = engine_of(settings_of())
    train(engine, num_steps=1)
    engine.save_checkpoint(str(rank.folder), tag="tag")
    file = rank.folder / "tag" / f"__{rank.rank}_0.distcp"
    content, shard = file.read_bytes(), engine.optimizer.sharded.held[0].shard
    first = content.index(shard.detach().numpy().tobytes()[:16])  # of a number of this rank's
    file.write_bytes(content[:first] + bytes([content[first] ^ 1]) + content[first + 1 :])
    dist.barrier()
    load = partial(engine.load_checkpoint, str(rank.folder), tag="tag")
    refusal(ValueError, load, "__0_0.distcp is damaged", "__1_0.distcp is damaged")
    other = engine_of(settings_of(checkpoint={"verify": False}))
    assert other.load_checkpoint(str(rank.folder), tag="tag")[0] is not None


def test_a_group_of_which_a_rank_owns_nothing(rank: Rank) -> None:
    """Rank 0 writes what is one for the run; step counts of a group that it does not step are told by others."""
    for stage, part in itertools.product((0, 1), ("layers.0.self_attn", "layers.1.mlp")):

        def start(part: str = part, stage: int = stage) -> Any:
            model = llama()
            named = dict(model.named_parameters())
            groups: list[Any] = [[p for name, p in named.items() if (part in name) == own] for own in (False, True)]
            optimizer = torch.optim.Adam([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], lr=1e-2)
            settings = without_optimizer(settings_of(stage)) | {"zero_allow_untested_optimizer": True}
            return engine_of(settings, model, optimizer=optimizer)

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


def test_each_rank_s_own_buffers(rank: Rank) -> None:
    """Nobody averages them: on the same layout each rank goes on with its own, on another one with some holder's."""

    def start(holders: int, regime: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Watch(), Branch(Watch()), Branch(Watch()), nn.Linear(6, 2))
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
    settings = without_optimizer(settings_of())
    del settings["scheduler"]
    other = engine_of(settings, model, **own)
    before = dense_state(other)
    load = partial(other.load_checkpoint, str(rank.folder))
    assert not other.lr_scheduler.state_dict().keys() & engine.lr_scheduler.state_dict().keys()
    refusal(ValueError, load, "LR scheduler", "load_lr_scheduler_states=False")
    assert_identical(dense_state(other), before)
    load(load_lr_scheduler_states=False)


@pytest.mark.slow
def test_a_rank_alone_is_told(rank: Rank) -> None:
    """At once where the other goes on with training."""
    engine, folder = engine_of(settings_of()), str(rank.folder)
    for turn, alone in enumerate((0, 0, 1)):  # again, and another one
        if rank.rank == alone:
            with pytest.raises(RuntimeError, match=f"rank {1 - alone} continued training"):
                engine.save_checkpoint(folder)
        else:
            for _ in range(2 * turn + 1):
                engine._core.barrier.record_step()
        dist.barrier()
    assert not names_in(rank.folder)
    engine.save_checkpoint(folder)
