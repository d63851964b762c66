"""Tensor parallelism on 2 x 2 ranks: training next to the reference, the dense model on disk, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from sdp_deepspeed.checkpoint.files import Reader
from tests.helpers.models import SPECIMENS, config, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.tensor_parallel_models import CASES, EVEN, TP, Divided, Mpu, OwnModel, build, describe_own, mpu
from tests.helpers.training import assert_identical, dense_state, gathered, micro_step, refusal

pytestmark = pytest.mark.world(4)  # two workers of two ranks
BATCH = torch.arange(16).view(2, 8)


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])], ids=str
)
def test_trains_as_the_reference(rank: Rank, case: Divided) -> None:
    case.check(rank)


@pytest.mark.slow
def test_exports_load(rank: Rank) -> None:
    """One folder, written once, from shards of subnetworks; a vocabulary that ranks do not divide, tied or not."""
    for model, strategy in (("llama_tied_61", "neuron"), ("qwen2_61", "mixed")):
        engine = Divided(model=model, strategy=strategy).start()
        micro_step(engine, BATCH)
        folder = rank.folder / model
        with mock.patch.object(engine.module, "save_pretrained", wraps=engine.module.save_pretrained) as spy:
            engine.save_pretrained(folder)
        assert gathered(spy.call_count) == [1, 0, 0, 0]
        engine.save_16bit_model(str(folder), "whole.bin")
        state = dense_state(engine)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert_identical(loaded.state_dict(), state)
        assert_identical(torch.load(folder / "whole.bin", weights_only=True), state)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (model == "llama_tied_61")
        with torch.no_grad():
            expected = loaded.eval()(BATCH)
            engine.eval()
            assert abs(loss_of(engine, BATCH).item() - loss_of(loaded, BATCH).item()) <= 1e-5
            if model == "qwen2_61":  # AutoTP leaves each rank its own part of a tied vocabulary's logits
                torch.testing.assert_close(engine(BATCH).logits, expected.logits)
        engine.train()


def test_state_dicts_are_whole_inside_only(rank: Rank) -> None:
    """bf16 too; also of an inner module, and where nothing is masked. Outside they mean the shard, as in DeepSpeed."""
    for regime, strategy in (("backward", "block"), ("forward", "neuron")):
        case = Divided(regime=regime, strategy=strategy, precision="bf16")
        engine, dense = case.start(), build("llama").to(torch.bfloat16)
        name = "model.layers.0.mlp.down_proj.weight"
        with engine.dense():
            assert_identical(engine.module.state_dict(), dense.state_dict())
            assert_identical(engine.module.model.layers.state_dict(), dense.get_submodule("model.layers").state_dict())
            other = {key: value + 1 for key, value in dense.state_dict().items()}
            engine.module.load_state_dict(other)
        engine.optimizer.refresh_fp32_params()
        assert_identical(dense_state(engine), other)
        if regime == "backward":
            assert engine.module.state_dict()[name].shape == (16, 14)
        micro_step(engine, BATCH)  # agreement is checked


def test_divergence_is_found(rank: Rank) -> None:
    """Of what tensor-parallel ranks have in common."""
    engine = Divided(model="qwen3").start()
    name = "model.layers.0.self_attn.q_norm.weight"
    with torch.no_grad():
        if rank.rank in (1, 3):
            engine.module.get_parameter(name).add_(1)
    words = "tensor-parallel ranks have different values of"
    refusal((RuntimeError, ValueError), partial(micro_step, engine, BATCH), words, name)


def test_checkpoints_resume(rank: Rank) -> None:
    for case in (
        Divided(strategy="neuron", stage=2, optimizer="AdamW"),
        Divided(regime="backward", strategy="neuron", model="own"),
    ):
        first, second = case.start(), case.start()
        micro_step(first, BATCH)
        first.save_checkpoint(str(rank.folder / case.model), client_state={"at": 7})
        _, state = second.load_checkpoint(str(rank.folder / case.model))
        assert state == {"at": 7}
        assert micro_step(first, BATCH) == micro_step(second, BATCH)
        assert_identical(dense_state(first), dense_state(second))
    saved: Any = Reader(rank.folder / "llama" / "global_step1").read_metadata().state_dict_metadata
    assert saved["weight/lm_head.weight"].size[0] == EVEN["vocab_size"], "the dense model's"


def start(model: nn.Module, *, stage: int = 1, tp: int = TP, strategy: str = "block") -> Any:
    settings = config(holders=1, strategy=strategy) | {"zero_optimization": {"stage": stage}}
    settings["tensor_parallel"] = {"autotp_size": tp}
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)


def test_mistakes_are_named(rank: Rank) -> None:
    words = ("got 2", "the 3 key/value heads of 'model.layers.0.attention'")
    refusal(ValueError, lambda: start(SPECIMENS["llama_odd"].build()), *words)
    refusal(ValueError, lambda: start(SPECIMENS["gpt2"].build()), "AutoTP cannot divide a GPT2LMHeadModel", "Qwen3")
    uneven = replace(SPECIMENS["llama"], options={"intermediate_size": 28})
    refusal(ValueError, lambda: start(uneven.build(), stage=2), "'lm_head.weight' evenly", "the vocabulary")
    softmax: Any = build("llama")
    softmax.model.layers[1].mlp.act_fn = torch.nn.Softmax(-1)  # unlike in layer 0, over all neurons
    refusal(ValueError, lambda: start(softmax), "AutoTP would change what 'model.layers.1.mlp'")
    refusal(ValueError, lambda: start(build("llama"), tp=3), "autotp_size: got 3", "does not divide the 4 ranks")
    own = build("llama")
    with torch.no_grad():
        own.get_parameter("model.norm.weight").add_(float(rank.rank))
    refusal(ValueError, lambda: start(own), "different values of model.norm.weight", "same seed")
    refusal(ValueError, lambda: start(own), "an earlier engine divided this model")


def test_mistakes_of_authors_are_named(rank: Rank) -> None:
    describe_own()
    own, settings = partial(OwnModel, mpu().get_model_parallel_group()), config(holders=1)
    for name in ("pipeline_model", "sequence"):
        wrong: Any = Mpu.__new__(Mpu)
        wrong.__dict__["_groups"] = {**mpu().__dict__["_groups"], name: dist.group.WORLD}
        start_with = partial(deepspeed.initialize, model=own(), config=settings, mpu=wrong)
        refusal(ValueError, start_with, f"mpu has 4 {name.removesuffix('_model')}-parallel ranks")
    model = own()  # a parameter outside the described branches
    setattr(model.head.weight, "model_parallel", True)  # noqa: B010 (as in OwnModel)
    start_with = partial(deepspeed.initialize, model=model, config=settings, mpu=mpu())
    refusal(ValueError, start_with, "'head.weight'", "set its attribute partition_dim")
