"""DeepSpeed's own engine in teams: what training alone does not show."""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import sdp_deepspeed
from sdp_deepspeed.checkpoint.files import CHECKSUMS
from sdp_deepspeed.init import DeferredWeights
from sdp_deepspeed.teams.attendance import NO_STATE
from tests.helpers.fp16_runs import fp16_is_supported
from tests.helpers.models import LENGTH, SPECIMENS, VOCABULARY, batches, config, llama, loss_of
from tests.helpers.teams import Place, run_teams
from tests.ranks.engine import test_accelerate
from tests.ranks.engine.test_trainer import trainer_of

STEPS, SAVED_AFTER = 8, 5  # H is 2: saved between two meetings
BLOCK: dict[str, Any] = {"coverage": 0.5, "local_steps": {"teams": 2, "every": 2}}


def engine_of(stage: int, model: Any = None, **settings: Any) -> Any:
    block = BLOCK | {"local_steps": {**BLOCK["local_steps"], "outer_lr": 0.7, "outer_momentum": 0.9}}
    settings = config(**block) | {"zero_optimization": {"stage": stage}, **settings}
    model = model or llama()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return engine


def train(place: Place, engine: Any, steps: range) -> None:
    parts = engine.tensor_parallel.shards.size
    data = batches(2 * place.size // parts, 1)
    for step in range(steps.stop):
        (batch,) = next(data)[(place.team * place.size + place.rank) // parts]
        if step in steps:
            engine.backward(loss_of(engine, batch))
            engine.step()


def evaluate(engine: Any) -> None:
    """The module is the dense model of the anchors, and the subnetwork again, to the bit, after an error as well."""
    anchors, batch = engine.team.dense_state_dict(), next(batches(1, 1))[0][0]
    engine.eval()
    subnetwork = loss_of(engine, batch).detach()
    with pytest.raises(RuntimeError, match="weights were changed"), engine.dense(), torch.no_grad():
        engine.module.model.layers[0].mlp.down_proj.weight[0] += 1
    with engine.dense(), torch.no_grad():
        dense = engine.module.state_dict()
        model = llama()
        model.load_state_dict(dense)
        whole = loss_of(model.eval(), batch)  # tensor-parallel ranks add up in another order
        assert abs(loss_of(engine, batch) - whole) <= (1e-6 if engine.autotp_size() > 1 else 0)
        assert whole != subnetwork
        with engine.dense(), pytest.raises(RuntimeError, match="step inside"):
            engine.step()
    assert all(torch.equal(dense[name], value) for name, value in anchors.items())
    assert loss_of(engine, batch) == subnetwork
    engine.train()


def fill_the_disk(place: Place, engine: Any, folder: Path) -> None:
    """On the last rank, for the team's state, and for what DeepSpeed writes."""
    is_full = place.rank == place.size - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if is_full else limits[0], limits[1]))
    with pytest.raises(RuntimeError, match=r"\[on rank 1\]"):
        engine.save_checkpoint(str(folder), "full")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    full = mock.patch.object(TorchCheckpointEngine, "save", side_effect=OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=r"No space left on device \[on rank 1\]"), full if is_full else nullcontext():
        engine.save_checkpoint(str(folder), "full")
    assert (folder / "latest").read_text() == f"global_step{SAVED_AFTER}"


def load_damaged(place: Place, engine: Any, folder: Path) -> None:
    """A state that is damaged on one rank is loaded on none; a checkpoint of the dense model is refused."""
    other = folder.with_name(f"{folder.name}-damaged")
    if place.rank == 0:
        shutil.copytree(folder, other)
        file = other / f"global_step{SAVED_AFTER}" / "team_rank_1.pt"
        file.write_bytes(file.read_bytes()[:-100])
        (other / "whole").mkdir()
        (other / "whole" / CHECKSUMS).touch()
    torch.distributed.barrier()
    assert engine.load_checkpoint(str(other))[0] is not None
    assert (engine.team.version, engine.team.num_steps) == (NO_STATE, 0)
    if place.rank == 0:  # as if a later save under the same tag had been cut off
        shutil.copy(folder / file.parent.name / file.name, file)
        state = torch.load(file.with_name("team_rank_0.pt"))
        torch.save(state | {"engine_steps": SAVED_AFTER + 1}, file.with_name("team_rank_0.pt"))
    torch.distributed.barrier()
    assert engine.load_checkpoint(str(other))[0] is not None
    assert (engine.team.version, engine.team.num_steps) == (NO_STATE, 0)
    if engine.zero_optimization_stage() == 1:
        assert engine.load_checkpoint(str(folder), load_module_only=True)[0] is not None
        assert engine.team.num_steps == SAVED_AFTER
    with pytest.raises(ValueError, match="a checkpoint of the dense model, without teams"):
        engine.load_checkpoint(str(other), "whole")
    if engine.zero_optimization_stage() == 1:  # at stage 3 DeepSpeed's loading is collective itself
        damaged = mock.patch.object(TorchCheckpointEngine, "load", side_effect=OSError("damaged"))
        with pytest.raises(OSError, match=r"damaged \[on rank 1\]"), damaged if place.rank else nullcontext():
            engine.load_checkpoint(str(folder))


def resume(place: Place, runs: tuple[tuple[int, int], ...], lighthouses: list[str]) -> None:
    addresses = iter(lighthouses)
    for stage, parts in runs:
        divided = {"tensor_parallel": {"autotp_size": parts}} if parts > 1 else {}
        os.environ["TORCHFT_LIGHTHOUSE"] = next(addresses)
        engine = engine_of(stage, **divided)
        train(place, engine, range(SAVED_AFTER))
        folder = place.folder / f"team-{place.team}-{stage}-{parts}"
        engine.save_checkpoint(str(folder))
        with pytest.raises(RuntimeError, match="load before the first step"):
            engine.load_checkpoint(str(folder))
        fill_the_disk(place, engine, folder)
        evaluate(engine)
        train(place, engine, range(SAVED_AFTER, STEPS))
        expected = engine.team.dense_state_dict()
        engine.team.leave()

        os.environ["TORCHFT_LIGHTHOUSE"] = next(addresses)
        again = engine_of(stage, **divided)
        load_damaged(place, again, folder)
        path, _ = again.load_checkpoint(str(folder))
        assert path is not None
        assert again.team.num_steps == SAVED_AFTER
        train(place, again, range(SAVED_AFTER, STEPS))
        dense = again.team.dense_state_dict()
        assert again.team.version == STEPS // 2
        assert all(torch.equal(dense[name], value) for name, value in expected.items())
        again.team.leave()


@pytest.mark.parametrize("stages", [((3, 1), (1, 2)), pytest.param(((1, 1), (3, 2)), marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_uninterrupted_one(stages: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """With parts of AutoTP; those last, since DeepSpeed keeps its groups for the process."""
    run_teams(tmp_path, resume, 2, 2, stages, runs=2 * len(stages))


HALF: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def mixed(place: Place, lighthouses: list[str]) -> None:
    """Half weights with fp32 masters, accumulation and clipping: masters are the anchors after a meeting."""
    for dtype, address in zip(HALF, lighthouses[:-2], strict=True):
        os.environ["TORCHFT_LIGHTHOUSE"] = address
        with fp16_is_supported():
            with pytest.raises(ValueError, match=f"{dtype} at stage 0"):
                engine_of(0, **HALF[dtype])
            engine = engine_of(2, gradient_accumulation_steps=2, gradient_clipping=1.0, **HALF[dtype])
        data = batches(2 * place.size, 2)
        for _ in range(2):
            for batch in next(data)[place.team * place.size + place.rank]:
                engine.backward(loss_of(engine, batch))
                engine.step()
        assert engine.team.version == 1
        dense = engine.team.dense_state_dict()
        for name, parameter in engine.module.named_parameters():
            master = deepspeed.utils.safe_get_full_fp32_param(parameter)
            if dense:
                assert torch.equal(master, dense[name])
                assert torch.equal(parameter, dense[name].to(parameter.dtype))
        engine.save_pretrained(place.folder / f"export-{dtype}")
        if dense:
            torch.save(dense, place.folder / f"dense-{dtype}-{place.team}.pt")
        engine.team.leave()
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouses[-2]
    pretrained(place)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouses[-1]
    under_init()
    with pytest.raises(ValueError, match=r"autotp_size: got 2, which does not divide the 3 key/value heads"):
        engine_of(1, SPECIMENS["llama_odd"].build(), tensor_parallel={"autotp_size": 2})


def pretrained(place: Place) -> None:
    """At stage 3, as with the Trainer, `from_pretrained` divides the model among the ranks: none ever has all of it."""
    settings = config() | {"zero_optimization": {"stage": 3}}
    under_init = HfDeepSpeedConfig(settings)
    model: Any = LlamaForCausalLM.from_pretrained(place.folder / "pretrained")
    del under_init
    assert not any(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"got 1, but deepspeed\.zero\.Init has divided the model"):
        engine_of(1, model)
    with pytest.raises(ValueError, match=r"needs whole weights; build the model without deepspeed\.zero\.Init"):
        engine_of(3, model, tensor_parallel={"autotp_size": 2})
    engine = engine_of(3, model)
    assert not any(parameter.numel() for parameter in model.parameters())
    engine.team.start()
    dense = engine.team.dense_state_dict()
    expected = load_file(place.folder / "pretrained" / "model.safetensors")
    assert all(torch.equal(dense[name], expected[name]) for name in dense)
    train(place, engine, range(2))
    assert engine.team.version == 1
    engine.team.leave()


def under_init() -> None:
    """Of GPT-2, whose blocks have constants as buffers; half weights, divided afterwards."""
    model, weights = deferred_gpt2(), DeferredWeights(deferred_gpt2())
    engine = engine_of(3, model, bf16={"enabled": True})
    engine.team.start()
    dense = engine.team.dense_state_dict()
    for name, value in dense.items():
        factor = 0.5 if name.endswith("c_proj.weight") else 1.0
        assert torch.equal(value, factor * weights.value(name, 3).bfloat16().float()), name
    with engine.dense(), torch.no_grad():
        assert loss_of(engine, next(batches(1, 1))[0][0]).isfinite()
    engine.team.leave()


def deferred_gpt2() -> Any:
    torch.manual_seed(3)
    with sdp_deepspeed.Init():
        return SPECIMENS["gpt2"].build()


def test_half_precision_with_accumulation(tmp_path: Path) -> None:
    whole: Any = llama(seed=1)
    whole.save_pretrained(tmp_path / "pretrained")
    run_teams(tmp_path, mixed, 2, 2, runs=len(HALF) + 2)
    for dtype in HALF:
        first, second = (torch.load(tmp_path / f"dense-{dtype}-{number}.pt") for number in range(2))
        exported = LlamaForCausalLM.from_pretrained(tmp_path / f"export-{dtype}").state_dict()
        for name, value in first.items():
            assert torch.equal(second[name], value)
            assert torch.equal(exported[name], value)


def by_trainer(place: Place, lighthouses: list[str]) -> None:
    """Straight, resumed from a checkpoint between two meetings, and with an older one of team 1, which skips a step."""
    models = []
    for number, address in enumerate(lighthouses[:-1]):
        os.environ |= {"TORCHFT_LIGHTHOUSE": address, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        folder = place.folder / f"trainer-{place.team}"
        generator = torch.Generator().manual_seed(place.team)
        tokens = torch.randint(0, VOCABULARY, (32, LENGTH), generator=generator)
        data = [{"input_ids": row, "labels": row} for row in tokens]
        options: dict[str, Any] = {"data": data, "evaluated": data[:8], "per_device_eval_batch_size": 8}
        options |= {"save_strategy": "no" if number == 2 else "steps", "save_steps": 1}
        trainer = trainer_of(folder, BLOCK, learning_rate=1e-2, **options)
        step = 1 if (number, place.team) == (2, 1) else 3
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}") if number else None)
        team, engine = trainer.model_wrapped.team, trainer.model_wrapped
        assert team.version == 2
        assert trainer.state.global_step == engine.global_steps == engine.lr_scheduler.last_epoch == 4
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        logged = next(entry for entry in trainer.state.log_history[::-1] if "subnetwork_loss" in entry)
        assert (logged["meetings"], logged["teams"]) == (2, 2)
        assert 0 < logged["bytes_sent"] < team.bytes_sent, "an evaluation came after it"
        losses[0] = trainer.predict(data[:8]).metrics["test_loss"]
        trainer.save_model(str(folder / "final"))
        with torch.no_grad():
            dense = LlamaForCausalLM.from_pretrained(folder / "final")(tokens[:8], labels=tokens[:8]).loss
        assert set(losses) == {float(dense)}
        models.append(load_file(folder / "final" / "model.safetensors"))
        trainer.model_wrapped.team.leave()
    by_accelerate(place, lighthouses[-1])
    straight, resumed, _ = models
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())
    if place.rank == 0:
        torch.save(straight, place.folder / f"saved-{place.team}.pt")


def by_accelerate(place: Place, address: str) -> None:
    """A loop of one's own, with an optimizer that was made of the whole model."""
    os.environ["TORCHFT_LIGHTHOUSE"] = address
    accelerator, engine, *rest = test_accelerate.prepared(BLOCK, accumulation=1)
    before = {name: value.clone() for name, value in engine.module.named_parameters()}
    test_accelerate.train(accelerator, engine, *rest)
    assert engine.team.version == 4
    assert not any(torch.equal(before[name], value) for name, value in engine.module.named_parameters())
    state = accelerator.get_state_dict(engine)
    with engine.dense():
        dense = accelerator.unwrap_model(engine).state_dict()
        assert all(torch.equal(state[name], value) for name, value in dense.items())
    engine.team.leave()


def test_trainer_and_accelerate(tmp_path: Path) -> None:
    run_teams(tmp_path, by_trainer, 2, 1, runs=4, GLOO_SOCKET_IFNAME="lo")
    first, second = (torch.load(tmp_path / f"saved-{number}.pt") for number in range(2))
    dense = {name: parameter.shape for name, parameter in llama().named_parameters()}
    assert {name: value.shape for name, value in first.items()} == dense
    assert all(torch.equal(second[name], value) for name, value in first.items())
