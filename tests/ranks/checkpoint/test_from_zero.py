"""An engine that starts from DeepSpeed's own ZeRO checkpoints. What is read: test_universal.py."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.cli import main as sdp
from tests.helpers.models import config, llama, two_groups
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 9}}
WRITERS = {"zero2": (2, {}), "zero3_bf16": (3, {"bf16": {"enabled": True}})}
READERS: dict[str, dict[str, Any]] = {
    "dense": {"holders": 2},
    "neurons": {"holders": 1, "strategy": "neuron"},
    "backward": {"holders": 1, "regime": "backward"},
}


def settings_of(stage: int, **options: Any) -> dict[str, Any]:
    result = config(holders=1) | {"optimizer": ADAM, "scheduler": SCHEDULE, "zero_optimization": {"stage": stage}}
    return result | {"checkpoint": {"load_universal": True}} | options


def groups_of(model: Any) -> list[dict[str, Any]]:
    return two_groups(dict(model.named_parameters()))


def write(name: str, folder: Path, rank: Rank) -> None:
    """Three steps, a checkpoint, and the weights after the fourth step."""
    stage, options = WRITERS[name]
    settings = settings_of(stage, **options)
    del settings["subnetwork_data_parallel"], settings["checkpoint"]
    model: Any = llama(tied=True, seed=3)
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups_of(model))
    train(engine, num_steps=3)
    engine.save_checkpoint(str(folder / name), client_state={"position": 3})
    if stage < 3:
        train(engine, num_steps=1, first=3)
        if rank.rank == 0:
            torch.save(dense_state(engine), folder / f"{name}.pt")


def our_engine(stage: int = 1, accumulation: int = 1, **block: Any) -> Any:
    """After a step, so that nothing is as it was at the start."""
    model: Any = llama(tied=True)
    settings = settings_of(stage, gradient_accumulation_steps=accumulation)
    settings["subnetwork_data_parallel"] = {"holders": 1} | block
    engine = engine_of(settings, model, model_parameters=groups_of(model))
    train(engine, num_steps=1, accumulation=accumulation, seed=7)
    return engine


def go_on(reader: str, source: str, folder: Path, rank: Rank) -> None:
    """Counters, schedule and client state go on; at C = 1 the next step is the stock engine's."""
    engine = our_engine(**READERS[reader])
    path = folder / "universal" / source
    assert engine.load_checkpoint(str(path)) == (str(path / "global_step3_universal"), {"position": 3})
    assert (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration) == (3, 12, 2)
    loaded = dense_state(engine)
    again = rank.folder / "again"
    engine.save_checkpoint(str(again))
    train(engine, num_steps=1, first=3)
    if reader == "dense" and source == "zero2":
        expected = torch.load(folder / "zero2.pt")
        for key, value in dense_state(engine).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)  # sums of two ranks in fp32
    assert engine.load_checkpoint(str(again))[0] == str(again / "global_step3")  # ours load with that setting too
    assert_identical(dense_state(engine), loaded)


def options(folder: Path, rank: Rank) -> None:
    path = str(folder / "universal" / "zero2")
    expected: dict[str, torch.Tensor] | None = None
    for chosen, steps, iteration in (
        ({"load_module_only": True}, 1, 0),
        ({"load_optimizer_states": False}, 3, 2),
        ({"load_lr_scheduler_states": False}, 3, 0),
    ):
        engine = our_engine()
        engine.load_checkpoint(path, tag="global_step3_universal", **chosen)
        assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (steps, iteration)
        expected = expected or dense_state(engine)
        assert_identical(dense_state(engine), expected)
    engine = our_engine(accumulation=2)  # a step begins anew, in as many micro-batches as here
    engine.load_checkpoint(path)
    assert engine.micro_steps == 6
    engine = our_engine(schedule=[{"until_step": 2}, {"holders": 2}])
    engine.load_checkpoint(path)
    assert engine.plan.is_whole  # step 4 is in the second phase
    train(engine, num_steps=1)


def mistakes(folder: Path, rank: Rank) -> None:
    """All ranks say the same, and nothing is changed."""
    engine = our_engine()
    before = dense_state(engine)
    refusal(ValueError, partial(engine.load_checkpoint, str(rank.folder)), "latest_universal", "import")
    refusal(
        ValueError,
        partial(engine.load_checkpoint, str(folder / "zero2"), tag="global_step3"),
        f"sdp checkpoint import {folder / 'zero2'} OUT --tag global_step3",
    )
    if rank.rank == 0:
        shutil.copytree(folder / "universal" / "zero2", rank.folder / "damaged")
        file = rank.folder / "damaged" / "global_step3_universal" / "zero" / "model.norm.weight" / "exp_avg.pt"
        file.write_bytes(b"x")
    dist.barrier()
    refusal(ValueError, partial(engine.load_checkpoint, str(rank.folder / "damaged")), "exp_avg.pt is damaged")
    if rank.rank == 0:
        (rank.folder / "latest_universal").write_text("lost")
    dist.barrier()
    refusal(ValueError, partial(engine.load_checkpoint, str(rank.folder)), "names 'lost'")
    assert_identical(dense_state(engine), before)
    settings = settings_of(1)
    del settings["checkpoint"]
    plain = engine_of(settings, llama(tied=True))
    refusal(ValueError, partial(plain.load_checkpoint, str(folder / "zero2")), "sdp checkpoint import")
    universal = partial(plain.load_checkpoint, str(folder / "universal" / "zero2"), tag="global_step3_universal")
    refusal(ValueError, universal, "set checkpoint.load_universal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO checkpoints of stock engines, and `universal/` made of them by the command."""
    path = tmp_path_factory.mktemp("zero")
    outcomes = run_ranks(2, [(name, partial(write, name, path)) for name in WRITERS])
    assert not any(outcomes.values()), next(filter(None, outcomes.values()))
    for name in WRITERS:
        assert sdp(["checkpoint", "import", str(path / name), str(path / "universal" / name)]) == 0
    return path


CHECKS = {"options": options, "mistakes": mistakes}
PAIRS = [(reader, source) for reader in READERS for source in WRITERS]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str | None]:
    checks: list[Any] = [(f"{source}-{reader}", partial(go_on, reader, source, folder)) for reader, source in PAIRS]
    checks += [(name, partial(check, folder)) for name, check in CHECKS.items()]
    return run_ranks(2, checks)


@pytest.mark.parametrize("name", [*(f"{source}-{reader}" for reader, source in PAIRS), *CHECKS])
def test_start(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


def test_what_is_not_converted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line; nothing is left."""
    for arguments, words in (
        ([tmp_path / "lost"], "lost"),
        ([folder / "universal" / "zero2", "--tag", "x"], "no files"),
        ([folder / "zero2", "--tag", "x"], "no files"),
    ):
        assert sdp(["checkpoint", "import", *map(str, arguments[:1]), str(tmp_path / "out"), *arguments[1:]]) == 2
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert text.count("\n") == 1
        assert words in text
        assert not (tmp_path / "out").exists()
