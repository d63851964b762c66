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
from torch import nn

from sdp_deepspeed.__main__ import main as sdp
from sdp_deepspeed.checkpoint.interop.from_zero import convert
from sdp_deepspeed.checkpoint.interop.load_universal import load_universal, universal_tag
from sdp_deepspeed.checkpoint.load import LoadOptions
from tests.helpers.dense_checkpoints import dense_tensors
from tests.helpers.foreign_code import Malicious
from tests.helpers.models import config, llama, two_groups
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.slow

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 9}}
MOMENTS = ("exp_avg", "exp_avg_sq")
FROZEN = "model.layers.0.input_layernorm.weight"
WRITERS = {f"zero{stage}_{precision}": (stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")}
READERS: dict[str, dict[str, Any]] = {
    "dense": {"holders": 2},
    "blocks_stage0": {"stage": 0},
    "neurons_zero2_bf16": {"strategy": "neuron", "stage": 2, "precision": "bf16"},
    "backward": {"regime": "backward", "strategy": "neuron"},
}


def settings_of(stage: int, precision: str, **block: Any) -> dict[str, Any]:
    result = config(**({"holders": 1} | block)) | {"optimizer": ADAM, "scheduler": SCHEDULE}
    result |= {"zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": True}}
    return result | ({"bf16": {"enabled": True}} if precision == "bf16" else {})


def model_with_buffer() -> Any:
    """Tied weights, a frozen one, and a persistent buffer: the formats keep those in other places than the rest."""
    model: Any = llama(tied=True, seed=3)
    frozen = model.get_parameter(FROZEN).requires_grad_(False)
    torch.nn.init.constant_(frozen, 0.5)
    model.register_buffer("a_buffer", torch.arange(5.0))
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return two_groups({name: value for name, value in model.named_parameters() if value.requires_grad})


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Of a stock engine: weights in fp32 and moments, in the keys of our checkpoints."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # stock links them when the first group has its state
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    result: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        result[f"fp32/{name}"] = safe_get_full_fp32_param(parameter).clone()
        for key in MOMENTS:
            result[f"{key}/{name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return {key: value.float() for key, value in result.items()}


def write(name: str, folder: Path, rank: Rank) -> None:
    """Three steps, a checkpoint, and what the fourth step leads to."""
    stage, precision = WRITERS[name]
    settings = settings_of(stage, precision)
    del settings["subnetwork_data_parallel"], settings["checkpoint"]
    model = model_with_buffer()
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups_of(model))
    train(engine, num_steps=3)
    engine.save_checkpoint(str(folder / name), client_state={"position": 3})
    before = full_state(engine)
    train(engine, num_steps=1, first=3)
    after = full_state(engine)
    if rank.rank == 0:
        torch.save({"before": before, "after": after}, folder / f"{name}.pt")


def our_engine(name: str) -> Any:
    """Of a reader, after a step, so that nothing is as it was at the start."""
    model = model_with_buffer()
    with torch.no_grad():
        model.a_buffer.zero_()
        model.get_parameter(FROZEN).fill_(1)
    options: dict[str, Any] = {"stage": 1, "precision": "fp32"} | READERS[name]
    engine = engine_of(settings_of(**options), model, model_parameters=groups_of(model))
    train(engine, num_steps=1, seed=7)
    return engine


def read(name: str, source: str, folder: Path, rank: Rank) -> None:
    """What was loaded is what is saved again; at C = 1 the next step is the stock engine's."""
    expected = torch.load(folder / f"{source}.pt")
    engine = our_engine(name)
    path = folder / "universal" / source
    assert engine.load_checkpoint(str(path)) == (str(path / "global_step3_universal"), {"position": 3})
    assert (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration) == (3, 12, 2)
    again = rank.folder / "again"
    engine.save_checkpoint(str(again))
    assert engine.load_checkpoint(str(again))[0] == str(again / "global_step3")  # ours load with that setting too
    assert_same(dense_tensors(again / "global_step3"), expected["before"])
    assert {float(state["step"]) for state in engine.optimizer.state.values()} <= {3.0}
    train(engine, num_steps=1, first=3)
    if name == "dense" and source.endswith("fp32"):  # bf16 has no such tolerance
        for key, value in dense_state(engine).items():
            if f"fp32/{key}" in expected["after"]:
                torch.testing.assert_close(value, expected["after"][f"fp32/{key}"], rtol=1e-5, atol=1e-6)


def assert_same(saved: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit; weights in fp32 are masters where there are any."""
    exact = {key.replace("weight/", "fp32/"): value for key, value in saved.items() if not key.startswith("master/")}
    exact |= {key.replace("master/", "fp32/"): value for key, value in saved.items() if key.startswith("master/")}
    assert torch.equal(exact.pop("fp32/a_buffer").float(), torch.arange(5.0))
    assert torch.equal(exact.pop(f"fp32/{FROZEN}").float(), torch.full((16,), 0.5))
    assert_identical({key: value.float() for key, value in exact.items()}, expected)


def parts(folder: Path, rank: Rank) -> None:
    """`load_checkpoint`'s options."""
    expected = torch.load(folder / "zero2_fp32.pt")["before"]
    path = folder / "universal" / "zero2_fp32" / "global_step3_universal"
    for options in (
        LoadOptions(module_only=True),
        LoadOptions(optimizer_states=False),
        LoadOptions(lr_scheduler_states=False),
    ):
        engine = our_engine("blocks_stage0")
        moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
        load_universal(engine, path, options)
        for key, value in dense_state(engine).items():
            if f"fp32/{key}" in expected:
                assert torch.equal(value, expected[f"fp32/{key}"])
        same = [torch.equal(a["exp_avg"], b) for a, b in zip(engine.optimizer.state.values(), moments, strict=True)]
        assert all(same) == (options.module_only or not options.optimizer_states)
        assert engine.global_steps == (1 if options.module_only else 3)
        kept = options.module_only or not options.lr_scheduler_states
        assert engine.lr_scheduler.last_batch_iteration == (0 if kept else 2)


def mistakes(folder: Path, rank: Rank) -> None:
    """All ranks say the same, and nothing is changed."""
    engine = our_engine("blocks_stage0")
    before = dense_state(engine)
    for number, (change, words) in enumerate(_damages()):
        path = rank.folder / str(number)
        if rank.rank == 0:
            shutil.copytree(folder / "universal" / "zero3_fp32" / "global_step3_universal", path)
            change(path / "zero" / "model.norm.weight")
        dist.barrier()
        refusal(ValueError, partial(load_universal, engine, path, LoadOptions()), *words)
    other = engine_of(settings_of(1, "fp32"), llama(3))
    path = folder / "universal" / "zero1_fp32" / "global_step3_universal"
    refusal(
        ValueError, partial(load_universal, other, path, LoadOptions()), "another model", "layers.2", "a_buffer", "more"
    )
    assert_identical(dense_state(engine), before)


def _damages() -> Iterator[tuple[Any, list[str]]]:
    yield shutil.rmtree, ["another model", "it lacks 'model.norm.weight'"]
    yield lambda path: (path / "fp32.pt").unlink(), ["fp32.pt is missing"]
    yield lambda path: (path / "exp_avg.pt").write_bytes(b"x"), ["exp_avg.pt is damaged"]
    yield lambda path: torch.save(Malicious(path), path / "fp32.pt"), ["was not loaded", "foreign code"]
    yield lambda path: torch.save(torch.ones(15), path / "fp32.pt"), ["no shape that fits"]
    yield lambda path: torch.save({"param": torch.ones(15)}, path / "fp32.pt"), ["shape [15] there and [16]"]
    yield lambda path: (path.parent / "optimizer_state.pt").unlink(), ["the number of steps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO checkpoints of stock engines, and `universal/` made of them."""
    path = tmp_path_factory.mktemp("zero")
    outcomes = run_ranks(2, [(name, partial(write, name, path)) for name in WRITERS])
    assert not any(outcomes.values()), next(filter(None, outcomes.values()))
    for name in WRITERS:
        assert convert(path / name, path / "universal" / name).name == "global_step3_universal"
    return path


CHECKS = {"parts": parts, "mistakes": mistakes}
PAIRS = [(reader, source) for i, reader in enumerate(READERS) for j, source in enumerate(WRITERS) if (i + j) % 2 == 0]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str | None]:
    checks = [(f"{source}-{reader}", partial(read, reader, source, folder)) for reader, source in PAIRS]
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


def _refused() -> Iterator[tuple[str, Callable[[Path], Any], list[str]]]:
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
        yield zero1, partial(poison, file), [file, "foreign code"]
    yield "zero3_fp32", lambda path: torch.save(Malicious(path), path / optimizer), [optimizer, "foreign code"]
    yield zero1, lambda path: (path / model).unlink(), ["cannot convert"]
    yield zero1, lambda path: (path / optimizer).write_bytes(b"x"), [optimizer, "is damaged"]
    yield zero1, rewritten(model, lambda c: c["param_shapes"][0].update({"../x": torch.Size([1])})), ["paths", "../x"]
    yield zero1, rewritten(optimizer, drop_moment), [optimizer, "only Adam's", "'exp_avg'", "zero_to_fp32"]
    yield zero1, without_optimizer, ["no files *_optim_states.pt"]


def poison(file: str, path: Path) -> None:
    content = torch.load(path / file, weights_only=False)
    torch.save(content | {"x": Malicious(path)}, path / file)


def without_optimizer(path: Path) -> None:
    for file in path.glob("*optim*"):
        file.unlink()


def drop_moment(content: dict[str, Any]) -> None:
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del state["exp_avg_sq"]


def test_what_is_not_converted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, nothing is executed, nothing is left."""
    for number, (source, change, words) in enumerate(_refused()):
        path = tmp_path / str(number)
        shutil.copytree(folder / source, path)
        change(path / "global_step3")
        assert sdp(["checkpoint", "from-zero", str(path), str(tmp_path / "out")]) == 2, words
        text = capsys.readouterr().err
        assert text.splitlines()[-1].startswith("error: ")
        assert all(word in text.splitlines()[-1] for word in words), text
        assert not (path / "global_step3" / "ran").exists()
        assert not list((tmp_path / "out").glob("*"))
        assert not list((tmp_path / "out").glob(".*"))
    assert sdp(["checkpoint", "from-zero", str(tmp_path / "lost"), str(tmp_path / "out")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert (
        sdp(["checkpoint", "from-zero", str(folder / "universal" / "zero1_fp32"), str(tmp_path / "out"), "--tag", "x"])
        == 2
    )


def test_tags(folder: Path, tmp_path: Path) -> None:
    universal = folder / "universal" / "zero1_fp32"
    assert universal_tag(universal, "global_step3_universal") == "global_step3_universal"
    assert universal_tag(folder / "zero1_fp32", "global_step3") is None
    with pytest.raises(ValueError, match="no latest_universal and no checkpoint"):
        universal_tag(tmp_path, None)
    (tmp_path / "latest_universal").write_text("lost")
    with pytest.raises(ValueError, match="names 'lost'"):
        universal_tag(tmp_path, None)
