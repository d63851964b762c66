"""Runs that go on from DeepSpeed's own ZeRO checkpoints, converted."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from sdp_deepspeed.checkpoint.from_zero import convert
from sdp_deepspeed.cli import main as sdp
from tests.helpers.checkpointed_runs import WARMUP, dense_tensors
from tests.helpers.models import config, llama, two_groups
from tests.helpers.ranks import Rank
from tests.helpers.sharded_runs import ShardedRun
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.world(2)

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
FROZEN = "model.layers.0.input_layernorm.weight"
BF16 = {"bf16": {"enabled": True}}
OPTIMIZER, MODEL = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


def settings_of(stage: int, **options: Any) -> dict[str, Any]:
    result = config(holders=1) | {"optimizer": ADAM, "scheduler": WARMUP, "zero_optimization": {"stage": stage}}
    return result | options


def model_of(*, as_saved: bool) -> Any:
    """Tied weights, a frozen one, and a persistent buffer, which ZeRO keeps in other places than the rest."""
    model: Any = llama(tied=True, seed=3)
    torch.nn.init.constant_(model.get_parameter(FROZEN).requires_grad_(False), 0.5 if as_saved else 1.0)
    model.register_buffer("a_buffer", torch.arange(5.0) if as_saved else torch.zeros(5))
    return model


def groups_of(model: Any) -> list[dict[str, Any]]:
    return two_groups({name: p for name, p in model.named_parameters() if p.requires_grad})


def stock_run(folder: Path, stage: int, more: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A stock engine after three steps and a checkpoint, and what is in that."""
    settings = settings_of(stage, **more)
    del settings["subnetwork_data_parallel"]
    model = model_of(as_saved=True)
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups_of(model))
    train(engine, num_steps=3)
    engine.save_checkpoint(str(folder), client_state={"position": 3})
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # stock links them when the first group has its state
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {"weight/a_buffer": torch.arange(5.0), f"weight/{FROZEN}": torch.full((16,), 0.5)}
    for key, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            expected[f"weight/{key}"] = safe_get_full_fp32_param(parameter).clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                expected[f"{kind}/{key}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    return engine, expected


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `sdp checkpoint`."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = sdp(["checkpoint", *map(str, arguments)])
    return code, output.getvalue()


@pytest.mark.parametrize(
    ("stage", "more", "block"),
    [
        (1, BF16, {"holders": 1, "strategy": "neuron"}),
        (2, {}, {"holders": 2}),
        (3, BF16, {"holders": 1, "regime": "backward"}),
    ],
)
def test_goes_on(rank: Rank, stage: int, more: dict[str, Any], block: dict[str, Any]) -> None:
    """The stock engine's weights and moments are in a checkpoint that all commands and both hosts read. Counters,
    schedule and client state go on; at C = 1 the next step is the stock engine's."""
    source, path = rank.folder / "zero", rank.folder / "converted"
    stock, expected = stock_run(source, stage, more)
    if rank.rank == 0:
        assert command("import", source, path)[0] == command("verify", path)[0] == 0
        assert "step 3, written by 2 ranks" in command("inspect", path)[1]
        assert_identical(dense_tensors(path / "global_step3"), expected)
    dist.barrier()
    model = model_of(as_saved=False)
    settings = settings_of(1) | {"subnetwork_data_parallel": block}
    engine = engine_of(settings, model, model_parameters=groups_of(model))
    train(engine, num_steps=1, seed=7)  # so that nothing is as it was at the start
    assert engine.load_checkpoint(str(path)) == (str(path / "global_step3"), {"position": 3})
    assert (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration) == (3, 12, 2)
    fsdp2 = ShardedRun(model_of(as_saved=False))
    fsdp2.checkpoints.load_checkpoint(path, load_lr_scheduler_states=False)
    assert fsdp2.checkpoints.global_steps == 3
    for name, saves in (("engine", engine), ("fsdp2", fsdp2.checkpoints)):
        saves.save_checkpoint(str(rank.folder / name))
        if rank.rank == 0:
            assert_identical(dense_tensors(rank.folder / name / "global_step3"), expected)
    train(engine, num_steps=1, first=3)
    if block["holders"] == 2:
        train(stock, num_steps=1, first=3)
        # Sums of two ranks in fp32.
        torch.testing.assert_close(dense_state(engine), dense_state(stock), rtol=1e-5, atol=1e-6)


class Malicious:
    """Makes a folder `ran` when it is unpickled by one who runs whatever a file says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path / "ran"),)


class Attribute:
    """Pickled by `getattr`, as Python 3.11.0 to 3.11.3 does with members of enums."""

    def __init__(self, kind: type, name: str) -> None:
        self.of = kind, name

    def __reduce__(self) -> Any:
        return getattr, self.of


def _refused() -> Iterator[tuple[str, Callable[[Path], Any], str]]:
    """A change of a ZeRO checkpoint's folder, and what is said of it."""

    def rewritten(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
        def rewrite(path: Path) -> None:
            content = torch.load(path / file, weights_only=False)
            change(content)
            torch.save(content, path / file)

        return rewrite

    def drop_moment(content: dict[str, Any]) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            del state["exp_avg_sq"]

    for file in (OPTIMIZER, MODEL):
        yield "zero2", partial(poison, file), rf"{file} was not loaded: .* could run code"
    yield "zero2", rewritten(MODEL, lambda c: c.update(x=Attribute(LossScaler, "__init__"))), "could run code"
    yield "zero2", lambda path: (path / MODEL).unlink(), "no files"
    yield "zero2", lambda path: (path / OPTIMIZER).unlink(), "elements are missing"
    yield "zero3", lambda path: (path / OPTIMIZER).unlink(), "elements are missing"
    yield "zero2", lambda path: (path / OPTIMIZER).write_bytes(b"x"), f"{OPTIMIZER} is damaged"
    yield "zero2", lambda path: torch.save([], path / OPTIMIZER), "incomplete or damaged"
    yield "zero2", rewritten(OPTIMIZER, drop_moment), "the state of Adam, got 'exp_avg', 'step'"
    yield "zero2", lambda path: shutil.copy(path / OPTIMIZER, path / OPTIMIZER.replace("_00_", "_01_")), "parallelism"
    yield "zero2", shutil.rmtree, "no files"
    yield "zero2", lambda path: (path.parent / "latest").unlink(), "pass its folder"


def poison(file: str, path: Path) -> None:
    content = torch.load(path / file, weights_only=False)
    torch.save(content | {"x": Malicious(path)}, path / file)


def test_what_is_not_converted(rank: Rank) -> None:
    """Nothing is executed, nothing is left. What to do with such a checkpoint is said on all ranks."""
    for stage in (2, 3):
        stock_run(rank.folder / f"zero{stage}", stage, BF16)
    source, out = rank.folder / "zero2", rank.folder / "out"
    engine = engine_of(settings_of(1), llama(tied=True))
    words = f"sdp checkpoint import {source} OUT --tag global_step3"
    refusal(ValueError, partial(engine.load_checkpoint, str(source)), words)
    if rank.rank == 0:
        for number, (name, change, problem) in enumerate(_refused()):
            path = rank.folder / str(number)
            shutil.copytree(rank.folder / name, path)
            change(path / "global_step3")
            with pytest.raises(ValueError, match=problem):
                convert(path, out)
            assert not (path / "global_step3" / "ran").exists()
            assert not out.exists()
        said = f"error: {rank.folder} already exists; use a new folder\n"
        assert command("import", source, rank.folder) == (2, said)
        file = source / "global_step3" / OPTIMIZER
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"]["zero_stage"] = Attribute(ZeroStageEnum, "weights")
        torch.save(content, file)
        convert(source, out)  # members of enums are no code
    dist.barrier()
