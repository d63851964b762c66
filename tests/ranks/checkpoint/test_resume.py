"""Save and resume on the same layout, through DeepSpeed's calls; other layouts are in test_reshard.py."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.checkpointed_runs import names_in, settings_of, stepped
from tests.helpers.models import llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

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
    """Bit for bit: losses, weights, moments, masters, schedule, counters, random numbers."""
    backward, neuron = {"regime": "backward"}, {"strategy": "neuron"}
    client: dict[str, Any] = {"position": 17, "name": "x", "nested": [1, {"a": None, "b": (2.5, True)}]}
    cases: list[tuple[int, str, str, dict[str, Any]]] = [
        (0, "fp32", "AdamW", {}),
        (1, "fp32", "AdamW", backward),
        (1, "bf16", "AdamW", neuron),
        (0, "bf16", "AdamW", backward | neuron),
        (2, "bf16+fp32", "AdamW", {}),
        (2, "fp32", "AdamW", neuron | {"checkpoint": {"asynchronous": True}}),
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


def test_tags_and_latest(rank: Rank) -> None:
    engine, states = engine_of(settings_of(checkpoint={"keep_last": 3})), {}
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


def test_nothing_to_load(rank: Rank) -> None:
    engine = engine_of(settings_of())
    before = dense_state(engine)
    assert engine.load_checkpoint(str(rank.folder)) == (None, None)
    assert engine.load_checkpoint(str(rank.folder / "nowhere")) == (None, None)
    refusal(ValueError, lambda: engine.load_checkpoint(str(rank.folder), tag="lost"), "lost")
    assert_identical(dense_state(engine), before)


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
        assert train(other, num_steps=1, first=2) == train_and_take_back(engine, folder)


def train_and_take_back(engine: Any, folder: str) -> list[float]:
    losses = train(engine, num_steps=1, first=2)
    engine.load_checkpoint(folder, load_module_strict=False)
    return losses


def test_saving_behind_the_training(rank: Rank) -> None:
    """What is saved is the state at the call, whatever steps follow; an error comes with the next call."""
    engine = engine_of(settings_of(1, "bf16", checkpoint={"asynchronous": True}))
    train(engine, num_steps=2)
    expected = dense_state(engine)
    engine.save_checkpoint(str(rank.folder), client_state={"position": 5})
    train(engine, num_steps=2, first=2)
    engine.wait_for_checkpoint()
    assert engine.load_checkpoint(str(rank.folder)) == (str(rank.folder / "global_step2"), {"position": 5})
    assert_identical(dense_state(engine), expected)
    engine.save_checkpoint(str(rank.folder), tag="again")
    assert engine.load_checkpoint(str(rank.folder))[0] == str(rank.folder / "again")


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
