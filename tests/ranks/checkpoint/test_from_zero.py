"""Runs that go on from DeepSpeed's own ZeRO checkpoints, converted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from sdp_deepspeed.checkpoint.from_zero import convert
from sdp_deepspeed.cli import main as sdp
from tests.helpers.checkpointed_runs import dense_tensors
from tests.helpers.foreign_code import Malicious
from tests.helpers.models import config, llama, two_groups
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.sharded_runs import ShardedRun
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 9}}
FROZEN = "model.layers.0.input_layernorm.weight"
BF16 = {"bf16": {"enabled": True}}
WRITERS: dict[str, tuple[int, dict[str, Any]]] = {"zero1": (1, BF16), "zero2": (2, {}), "zero3": (3, BF16)}
READERS: dict[str, dict[str, Any]] = {
    "dense": {"holders": 2},
    "neurons": {"holders": 1, "strategy": "neuron"},
    "backward": {"holders": 1, "regime": "backward"},
}
OPTIMIZER, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


def settings_of(stage: int, **options: Any) -> dict[str, Any]:
    result = config(holders=1) | {"optimizer": ADAM, "scheduler": SCHEDULE, "zero_optimization": {"stage": stage}}
    return result | options


def model_of(*, as_saved: bool) -> Any:
    """Tied weights, a frozen one, and a persistent buffer, which ZeRO keeps in other places than the rest."""
    model: Any = llama(tied=True, seed=3)
    torch.nn.init.constant_(model.get_parameter(FROZEN).requires_grad_(False), 0.5 if as_saved else 1.0)
    model.register_buffer("a_buffer", torch.arange(5.0) if as_saved else torch.zeros(5))
    return model


def groups_of(model: Any) -> list[dict[str, Any]]:
    return two_groups({name: p for name, p in model.named_parameters() if p.requires_grad})


def write(name: str, folder: Path, rank: Rank) -> None:
    """Three steps of a stock engine, a checkpoint, what is in it, and the weights after the fourth step."""
    stage, options = WRITERS[name]
    settings = settings_of(stage, **options)
    del settings["subnetwork_data_parallel"]
    model = model_of(as_saved=True)
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups_of(model))
    train(engine, num_steps=3)
    engine.save_checkpoint(str(folder / name), client_state={"position": 3})
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # stock links them when the first group has its state
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {"weight/a_buffer": torch.arange(5.0), f"weight/{FROZEN}": torch.full((16,), 0.5)}
    for key, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            expected[f"weight/{key}"] = safe_get_full_fp32_param(parameter).clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                expected[f"{kind}/{key}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    if rank.rank == 0:
        torch.save(expected, folder / f"{name}.pt")
    if name == "zero2":
        train(engine, num_steps=1, first=3)
        if rank.rank == 0:
            torch.save(dense_state(engine), folder / f"{name}_next.pt")


def go_on(reader: str, source: str, folder: Path, rank: Rank) -> None:
    """Counters, schedule and client state go on; at C = 1 the next step is the stock engine's."""
    model = model_of(as_saved=False)
    engine = engine_of(
        settings_of(1) | {"subnetwork_data_parallel": READERS[reader]}, model, model_parameters=groups_of(model)
    )
    train(engine, num_steps=1, seed=7)  # so that nothing is as it was at the start
    path = folder / "converted" / source
    assert engine.load_checkpoint(str(path)) == (str(path / "global_step3"), {"position": 3})
    assert (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration) == (3, 12, 2)
    again = rank.folder / "again"
    engine.save_checkpoint(str(again))
    if rank.rank == 0:
        assert_identical(dense_tensors(again / "global_step3"), dense_tensors(path / "global_step3"))
    train(engine, num_steps=1, first=3)
    if reader == "dense" and source == "zero2":
        expected = torch.load(folder / "zero2_next.pt")
        for key, value in dense_state(engine).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)  # sums of two ranks in fp32


def go_on_with_fsdp2(folder: Path, rank: Rank) -> None:
    run, path = ShardedRun(model_of(as_saved=False)), folder / "converted" / "zero3"
    run.checkpoints.load_checkpoint(path, load_lr_scheduler_states=False)
    assert run.checkpoints.global_steps == 3
    run.checkpoints.save_checkpoint(rank.folder)
    if rank.rank == 0:
        assert_identical(dense_tensors(rank.folder / "global_step3"), dense_tensors(path / "global_step3"))
    run.train(rank, 1)


def unconverted(folder: Path, rank: Rank) -> None:
    """What to do is said on all ranks."""
    engine = engine_of(settings_of(1), llama(tied=True))
    command = f"sdp checkpoint import {folder / 'zero2'} OUT --tag global_step3"
    refusal(ValueError, partial(engine.load_checkpoint, str(folder / "zero2")), command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO checkpoints of stock engines, and `converted/` made of them by the command."""
    path = tmp_path_factory.mktemp("zero")
    outcomes = run_ranks(2, [(name, partial(write, name, path)) for name in WRITERS])
    assert not any(outcomes.values()), next(filter(None, outcomes.values()))
    for name in WRITERS:
        assert sdp(["checkpoint", "import", str(path / name), str(path / "converted" / name)]) == 0
    return path


CHECKS = {"go_on_with_fsdp2": go_on_with_fsdp2, "unconverted": unconverted}
PAIRS = [(reader, source) for reader in READERS for source in WRITERS]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str | None]:
    checks: list[Any] = [(f"{source}-{reader}", partial(go_on, reader, source, folder)) for reader, source in PAIRS]
    checks += [(name, partial(check, folder)) for name, check in CHECKS.items()]
    return run_ranks(2, checks)


@pytest.mark.parametrize("name", [*(f"{source}-{reader}" for reader, source in PAIRS), *CHECKS])
def test_going_on(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.parametrize("source", WRITERS)
def test_converted_checkpoint(source: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stock engine's weights and moments, in a checkpoint that all commands read."""
    path = folder / "converted" / source
    assert_identical(dense_tensors(path / "global_step3"), torch.load(folder / f"{source}.pt"))
    assert sdp(["checkpoint", "verify", str(path)]) == sdp(["checkpoint", "inspect", str(path)]) == 0
    assert "step 3, written by 2 ranks" in capsys.readouterr().out


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
    yield "zero3", lambda path: (path / f"bf16_{OPTIMIZER}").unlink(), "elements are missing"
    yield "zero2", lambda path: (path / OPTIMIZER).write_bytes(b"x"), f"{OPTIMIZER} is damaged"
    yield "zero2", lambda path: torch.save([], path / OPTIMIZER), "incomplete or damaged"
    yield "zero2", rewritten(OPTIMIZER, drop_moment), "the state of Adam, got 'exp_avg', 'step'"
    yield "zero2", lambda path: shutil.copy(path / OPTIMIZER, path / OPTIMIZER.replace("_00_", "_01_")), "parallelism"
    yield "zero2", shutil.rmtree, "no files"
    yield "zero2", lambda path: (path.parent / "latest").unlink(), "pass its folder"


def poison(file: str, path: Path) -> None:
    content = torch.load(path / file, weights_only=False)
    torch.save(content | {"x": Malicious(path)}, path / file)


def test_what_is_not_converted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is executed, nothing is left."""
    for number, (source, change, words) in enumerate(_refused()):
        path = tmp_path / str(number)
        shutil.copytree(folder / source, path)
        change(path / "global_step3")
        with pytest.raises(ValueError, match=words):
            convert(path, tmp_path / "out")
        assert not (path / "global_step3" / "ran").exists()
        assert not (tmp_path / "out").exists()
    assert sdp(["checkpoint", "import", str(folder / "zero2"), str(folder / "converted")]) == 2
    assert capsys.readouterr().err == f"error: {folder / 'converted'} already exists; use a new folder\n"


def test_members_of_enums(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "zero2", tmp_path / "zero2")
    file = tmp_path / "zero2" / "global_step3" / OPTIMIZER
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["zero_stage"] = Attribute(ZeroStageEnum, "weights")
    torch.save(content, file)
    convert(tmp_path / "zero2", tmp_path / "out")
