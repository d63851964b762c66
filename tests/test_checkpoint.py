"""Save and resume on the same layout; complete or absent (DESIGN.md section 6)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import config
from ranks import Rank
from torch import nn
from training import assert_identical, dense_state, engine_of, refusal, train

from sdp_deepspeed import checkpoint

WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}}


def settings_of(stage: int = 1, precision: str = "fp32", **block: Any) -> dict[str, Any]:
    result = config(**({"holders": 1} | block)) | {"zero_optimization": {"stage": stage}, "scheduler": WARMUP}
    if precision != "fp32":
        result |= {"bf16": {"enabled": True}}
    if precision == "bf16+fp32":
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def stepped(engine: Any) -> dict[str, torch.Tensor]:
    """Masters, or views of the weights, and the optimizer's state: what this rank steps."""
    optimizer = engine.optimizer.optimizer
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    result = {f"stepped.{i}": tensor.detach().clone() for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        result |= {f"{i}.{key}": value.clone() for key, value in optimizer.state[tensor].items()}
    return result


def draw() -> list[float]:
    """One number from each source of randomness that a checkpoint restores."""
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


def draw_after(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    draw()


def an_interrupted_run_goes_on(rank: Rank) -> None:
    """Bit for bit: losses, weights, moments, masters, schedule, counters, random numbers."""
    cases = [(0, "fp32"), (1, "fp32"), (1, "bf16"), (0, "bf16"), (1, "bf16+fp32")]
    for stage, precision in cases:
        folder = str(rank.folder / f"{stage}{precision}")
        engine = engine_of(settings_of(stage, precision))
        train(engine, num_steps=3)
        draw_after(rank.rank)
        engine.save_checkpoint(folder, client_state={"position": 17, "name": "x"})
        numbers, losses = draw(), train(engine, num_steps=3, first=3)

        resumed = engine_of(settings_of(stage, precision))
        train(resumed, num_steps=1, seed=9)  # its state is not the initial one
        path, client_state = resumed.load_checkpoint(folder)
        assert path == str(Path(folder) / "global_step3")
        assert client_state == {"position": 17, "name": "x"}
        assert (resumed.global_steps, resumed.global_samples) == (3, 3 * 2 * rank.size)
        assert draw() == numbers
        assert train(resumed, num_steps=3, first=3) == losses
        assert resumed.get_lr() == engine.get_lr()
        assert_identical(stepped(resumed), stepped(engine))
        assert_identical(dense_state(resumed), dense_state(engine))


def tags_and_latest(rank: Rank) -> None:
    engine, states = engine_of(settings_of()), {}
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
    assert not [path.name for path in rank.folder.iterdir() if path.name.startswith(".")]


def nothing_to_load(rank: Rank) -> None:
    engine = engine_of(settings_of())
    before = dense_state(engine)
    assert engine.load_checkpoint(str(rank.folder)) == (None, None)
    assert engine.load_checkpoint(str(rank.folder / "nowhere")) == (None, None)
    refusal(ValueError, lambda: engine.load_checkpoint(str(rank.folder), tag="lost"), "no folder", "lost")
    assert_identical(dense_state(engine), before)


def client_state_is_plain(rank: Rank) -> None:
    engine = engine_of(settings_of())
    plain: dict[str, Any] = {"t": torch.arange(3), "nested": [1, {"a": None, "b": (2.5, True)}]}
    engine.save_checkpoint(str(rank.folder), client_state=plain)
    _, loaded = engine.load_checkpoint(str(rank.folder))
    assert loaded is not None
    assert torch.equal(loaded.pop("t"), plain.pop("t"))
    assert loaded == plain
    for strange in (nn.Linear(1, 1), Path("x"), lambda: None):
        save = partial(engine.save_checkpoint, str(rank.folder), tag="no", client_state={"strange": strange})
        refusal(ValueError, save, "client_state")
    assert sorted(path.name for path in rank.folder.iterdir()) == ["global_step0", "latest"]


def parts_of_a_checkpoint(rank: Rank) -> None:
    """bf16: after a load without optimizer states the masters follow the weights, or the next step undoes the load."""
    folder = str(rank.folder)
    for precision in ("fp32", "bf16"):
        saved = engine_of(settings_of(1, precision))
        train(saved, num_steps=3)
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
            for group in engine.optimizer.optimizer.param_groups:
                group["lr"] = 0.0
            engine.lr_scheduler = None
            train(engine, num_steps=1)
            assert_identical(dense_state(engine), weights)
        engine = engine_of(settings_of(1, precision))
        engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert engine.lr_scheduler.last_batch_iteration != 2
        refusal(ValueError, partial(engine.load_checkpoint, folder, load_module_strict=False), "not supported")


def another_layout_is_refused(rank: Rank) -> None:
    folder = str(rank.folder)
    saved = engine_of(settings_of())
    saved.save_checkpoint(folder)
    for word, settings in (
        ("plan", settings_of(holders=2)),
        ("zero_stage", settings_of(stage=0)),
        ("dtype", settings_of(precision="bf16")),
    ):
        engine = engine_of(settings)
        before = dense_state(engine)
        refusal(ValueError, partial(engine.load_checkpoint, folder), "another layout", f"{word} was")
        assert_identical(dense_state(engine), before)


def damaged_files_are_refused(rank: Rank) -> None:
    engine = engine_of(settings_of())
    train(engine, num_steps=1)
    before = dense_state(engine)
    for tag in ("short", "empty", "missing", "exchanged"):
        engine.save_checkpoint(str(rank.folder), tag=tag)
    if rank.rank == 0:
        files = {tag: [rank.folder / tag / f"rank_{r:05d}.pt" for r in (0, 1)] for tag in ("short", "empty", "missing")}
        content = files["short"][1].read_bytes()
        files["short"][1].write_bytes(content[: len(content) // 2])
        files["empty"][1].write_bytes(b"")
        files["missing"][1].unlink()
        one, two = (rank.folder / "exchanged" / f"rank_{r:05d}.pt" for r in (0, 1))
        aside = one.rename(one.with_name("aside"))
        two.rename(one)
        aside.rename(two)
    dist.barrier()
    train(engine, num_steps=1)
    after = dense_state(engine)
    for tag, word in (("short", "damaged"), ("empty", "damaged"), ("missing", "missing"), ("exchanged", "layout")):
        refusal(ValueError, partial(engine.load_checkpoint, str(rank.folder), tag=tag), word)
        assert_identical(dense_state(engine), after)
    assert any(not torch.equal(after[name], before[name]) for name in after)


def a_failing_rank_leaves_the_last_checkpoint(rank: Rank) -> None:
    engine = engine_of(settings_of())
    engine.save_checkpoint(str(rank.folder), tag="good")
    good = dense_state(engine)
    train(engine, num_steps=1)
    write = checkpoint._write

    def full_disk(path: Path, state: Any) -> None:
        path.write_bytes(b"torn")
        raise OSError(28, "No space left on device", str(path))

    for failing in (0, 1):
        checkpoint._write = full_disk if rank.rank == failing else write
        for tag in ("next", "good"):
            refusal(RuntimeError, partial(engine.save_checkpoint, str(rank.folder), tag=tag), "No space left")
        checkpoint._write = write
    dist.barrier()
    assert sorted(path.name for path in rank.folder.iterdir()) == ["good", "latest"]
    path, _ = engine.load_checkpoint(str(rank.folder))
    assert path == str(rank.folder / "good")
    assert_identical(dense_state(engine), good)
    engine.save_checkpoint(str(rank.folder), tag="next")


def a_folder_that_cannot_be_written(rank: Rank) -> None:
    """A file where the folder should be: refused to the superuser too, unlike a folder without permission."""
    engine = engine_of(settings_of())
    blocked = rank.folder / "file"
    if rank.rank == 0:
        blocked.write_text("")
    dist.barrier()
    refusal(RuntimeError, lambda: engine.save_checkpoint(str(blocked)), "checkpoint", "file")
    train(engine, num_steps=1)


def a_leftover_is_never_loaded(rank: Rank) -> None:
    """What a killed process leaves behind: a folder written in part, beside the last good one."""
    engine = engine_of(settings_of())
    engine.save_checkpoint(str(rank.folder), tag="good")
    good = dense_state(engine)
    if rank.rank == 0:
        leftover = rank.folder / ".next.writing"
        leftover.mkdir()
        (leftover / "rank_00000.pt").write_bytes(b"torn")
    dist.barrier()
    train(engine, num_steps=1)
    path, _ = engine.load_checkpoint(str(rank.folder))
    assert path == str(rank.folder / "good")
    assert_identical(dense_state(engine), good)
    refusal(ValueError, lambda: engine.load_checkpoint(str(rank.folder), tag="next"), "no folder")
    engine.save_checkpoint(str(rank.folder), tag="next")
    assert engine.load_checkpoint(str(rank.folder))[0] == str(rank.folder / "next")


def test_a_full_disk_is_named() -> None:
    with pytest.raises(RuntimeError, match="cannot write /dev/full: No space left on device"):
        checkpoint._write(Path("/dev/full"), {"weight": torch.zeros(1000)})


def test_a_replacement_that_was_cut_off_is_undone(tmp_path: Path) -> None:
    replaced = tmp_path / ".step_1.replaced"
    replaced.mkdir()
    checkpoint._bring_back(tmp_path / "step_1")
    assert (tmp_path / "step_1").is_dir()
    assert not replaced.exists()


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        an_interrupted_run_goes_on,
        tags_and_latest,
        nothing_to_load,
        client_state_is_plain,
        parts_of_a_checkpoint,
        another_layout_is_refused,
        damaged_files_are_refused,
        a_failing_rank_leaves_the_last_checkpoint,
        a_folder_that_cannot_be_written,
        a_leftover_is_never_loaded,
    ):
        yield check.__name__, check


@pytest.mark.ranks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
