"""Start from DeepSpeed's own checkpoints: ZeRO 1, 2, 3, converted to the universal format, loaded on other layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from sdp_deepspeed.checkpoint.boxes import written_state
from sdp_deepspeed.checkpoint.universal import convert, load_universal
from tests.helpers.core_training import Layout, dense_of, training
from tests.helpers.foreign_code import Malicious
from tests.helpers.models import config, llama
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.training import assert_identical, gathered, refusal, train

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 9}}
FROZEN = "model.layers.0.input_layernorm.weight"
WRITERS = {f"zero{stage}_{precision}": (stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")}
READERS = {
    "dense": Layout(2, block={"holders": 2}),
    "blocks_stage0": Layout(2, stage=0),
    "neurons_zero2_bf16": Layout(2, stage=2, dtype=torch.bfloat16, block={"strategy": "neuron"}),
    "backward": Layout(2, block={"regime": "backward", "strategy": "neuron"}),
}


def model_with_buffer(*, as_saved: bool = True) -> Any:
    """Tied weights, a frozen one, and a persistent buffer: the formats keep those in other places than the rest."""
    model: Any = llama(tied=True, seed=3)
    frozen = model.get_parameter(FROZEN).requires_grad_(False)
    torch.nn.init.constant_(frozen, 0.5 if as_saved else 1.0)
    model.register_buffer("a_buffer", torch.arange(5.0) if as_saved else torch.zeros(5))
    return model


def write(name: str, folder: Path, rank: Rank) -> None:
    """Three steps of a stock engine, and a checkpoint."""
    stage, precision = WRITERS[name]
    settings = config() | {"optimizer": ADAM, "scheduler": SCHEDULE, "zero_optimization": {"stage": stage}}
    settings |= {"bf16": {"enabled": True}} if precision == "bf16" else {}
    del settings["subnetwork_data_parallel"]
    model = model_with_buffer()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if (p.dim() < 2) == flat], "weight_decay": 0.0 if flat else 0.01}
        for flat in (False, True)
    ]
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups)
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
        torch.save({key: value.float() for key, value in expected.items()}, folder / f"{name}.pt")


def read(name: str, source: str, folder: Path, rank: Rank) -> None:
    """Weights, masters, moments and step counts are those of the stock engine."""
    expected = torch.load(folder / f"{source}.pt")
    with training(READERS[name], model=model_with_buffer(as_saved=False)) as run:
        run.train(1, seed=7)
        common = load_universal(run.state, folder / "universal" / source / "global_step3_universal")
        assert common["counters"] == {"global_steps": 3, "global_samples": 12, "skipped_steps": 0}
        assert (common["client_state"], common["lr_scheduler"]["last_batch_iteration"]) == ({"position": 3}, 2)
        parts = gathered(written_state(run.state))
        if rank.rank == 0:
            assert_identical({key: value.float() for key, value in dense_of(parts).items()}, expected)
        assert {float(own["step"]) for own in run.optimizer.optimizer.state.values()} <= {3.0}
        run.train(1)


def without_optimizer_states(folder: Path, rank: Rank) -> None:
    path = folder / "universal" / "zero2_fp32" / "global_step3_universal"
    with training(READERS["blocks_stage0"], model=model_with_buffer()) as run:
        run.train(1, seed=7)
        before = run.tensors()
        load_universal(run.state, path, optimizer_states=False)
        after = run.tensors()
        for key in before:
            assert torch.equal(before[key], after[key]) or not key.startswith(("exp_avg", "step")), key
        expected = torch.load(folder / "zero2_fp32.pt")
        parts = gathered(written_state(run.state))
        if rank.rank == 0:
            found = dense_of(parts)
            assert_identical(*({k: v for k, v in t.items() if k.startswith("weight")} for t in (found, expected)))


def mistakes(folder: Path, rank: Rank) -> None:
    """All ranks say the same, and nothing is changed."""
    with training(READERS["blocks_stage0"], model=model_with_buffer()) as run:
        before = run.tensors()
        for number, (change, words) in enumerate(_damages()):
            path = rank.folder / str(number)
            if rank.rank == 0:
                shutil.copytree(folder / "universal" / "zero3_fp32" / "global_step3_universal", path)
                change(path / "zero" / "model.norm.weight")
            dist.barrier()
            refusal(ValueError, partial(load_universal, run.state, path), *words)
        assert_identical(run.tensors(), before)
    with training(Layout(2), model=llama(3)) as run:
        path = folder / "universal" / "zero1_fp32" / "global_step3_universal"
        refusal(ValueError, partial(load_universal, run.state, path), "another model", "a_buffer")


def _damages() -> Iterator[tuple[Any, list[str]]]:
    yield shutil.rmtree, ["another model", "'weight/model.norm.weight'"]
    yield lambda path: (path / "fp32.pt").unlink(), ["fp32.pt is missing"]
    yield lambda path: (path / "exp_avg.pt").write_bytes(b"x"), ["exp_avg.pt is damaged"]
    yield lambda path: torch.save(Malicious(path), path / "fp32.pt"), ["was not loaded", "could run code"]
    yield lambda path: torch.save(torch.ones(15), path / "fp32.pt"), ["no shape that fits"]
    yield (
        lambda path: torch.save({"param": torch.ones(15)}, path / "fp32.pt"),
        ["has shape (15,)", "(16,) in the model"],
    )
    yield lambda path: (path.parent / "optimizer_state.pt").unlink(), ["no step count"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO checkpoints of stock engines, and `universal/` made of them."""
    path = tmp_path_factory.mktemp("zero")
    outcomes = run_ranks(2, [(name, partial(write, name, path)) for name in WRITERS])
    assert not any(outcomes.values()), next(filter(None, outcomes.values()))
    for name in WRITERS:
        assert convert(path / name, path / "universal" / name).name == "global_step3_universal"
    return path


CHECKS = {"without_optimizer_states": without_optimizer_states, "mistakes": mistakes}
PAIRS = [(reader, source) for i, reader in enumerate(READERS) for j, source in enumerate(WRITERS) if (i + j) % 2 == 0]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str | None]:
    checks: list[Any] = [(f"{source}-{reader}", partial(read, reader, source, folder)) for reader, source in PAIRS]
    checks += [(name, partial(check, folder)) for name, check in CHECKS.items()]
    return run_ranks(2, checks)


@pytest.mark.parametrize("name", [*(f"{source}-{reader}" for reader, source in PAIRS), *CHECKS])
def test_universal(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


def test_what_a_conversion_leaves(folder: Path) -> None:
    made = folder / "universal" / "zero1_bf16"
    assert sorted(path.name for path in made.iterdir()) == ["global_step3_universal", "latest_universal"]
    assert (made / "latest_universal").read_text() == "global_step3_universal"
    assert sorted(path.name for path in (made / "global_step3_universal").iterdir()) == [
        "mp_rank_00_model_states.pt",
        "zero",
    ]


def _refused() -> Iterator[tuple[str, Callable[[Path], Any], str]]:
    """A change of a ZeRO checkpoint's folder, and what is said of it."""
    zero1, optimizer = "zero1_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    model = "mp_rank_00_model_states.pt"

    def rewritten(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
        def rewrite(path: Path) -> None:
            content = torch.load(path / file, weights_only=False)
            change(content)
            torch.save(content, path / file)

        return rewrite

    for file in (optimizer, model):
        yield zero1, partial(poison, file), rf"{file} was not loaded: .* could run code"
    yield "zero3_fp32", lambda path: torch.save(Malicious(path), path / optimizer), "could run code"
    yield zero1, lambda path: (path / model).unlink(), "cannot convert"
    yield zero1, lambda path: (path / optimizer).write_bytes(b"x"), f"{optimizer} is damaged"
    yield zero1, rewritten(model, lambda c: c["param_shapes"][0].update({"../x": torch.Size([1])})), "paths: '../x'"
    yield zero1, rewritten(optimizer, drop_moment), "Adam's state only, got 'exp_avg', 'step'"
    yield zero1, without_optimizer, "no files"


def poison(file: str, path: Path) -> None:
    content = torch.load(path / file, weights_only=False)
    torch.save(content | {"x": Malicious(path)}, path / file)


def without_optimizer(path: Path) -> None:
    for file in path.glob("*optim*"):
        file.unlink()


def drop_moment(content: dict[str, Any]) -> None:
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del state["exp_avg_sq"]


def test_what_is_not_converted(folder: Path, tmp_path: Path) -> None:
    """Nothing is executed, nothing is left."""
    for number, (source, change, words) in enumerate(_refused()):
        path = tmp_path / str(number)
        shutil.copytree(folder / source, path)
        change(path / "global_step3")
        with pytest.raises(ValueError, match=words):
            convert(path, tmp_path / "out")
        assert not (path / "global_step3" / "ran").exists()
        assert not list((tmp_path / "out").glob("*"))
    with pytest.raises(ValueError, match="no files"):
        convert(tmp_path / "lost", tmp_path / "out")
