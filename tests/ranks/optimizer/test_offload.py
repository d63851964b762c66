"""`offload_optimizer: cpu`: masters, moments and the step are in host memory, once; the numbers stay."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.models import batches, config, llama, loss_of, without_block
from tests.helpers.oracle_grid import PRECISIONS
from tests.helpers.ranks import Rank
from tests.helpers.training import dense_state, engine_of, micro_step, own_batches, refusal, train

pytestmark = pytest.mark.world(2)

TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
CPU_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}  # with offload DeepSpeed takes its DeepSpeedCPUAdam


def settings_of(stage: int, *, device: str = "cpu", pin: bool = False, **block: Any) -> dict[str, Any]:
    settings = config(**({"holders": 1, "check_agreement": True} | block)) | {"optimizer": TORCH_ADAMW}
    settings |= {"gradient_clipping": 0.5, "zero_force_ds_cpu_optimizer": False, "gradient_accumulation_steps": 2}
    settings["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 2000}
    if device == "cpu":
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    return settings


def test_one_copy_in_host_memory(rank: Rank) -> None:
    """Shards are fp32 in memory of their own, apart from the weights also when these are fp32, with two moments."""
    for stage, precision in ((1, "fp32"), (2, "bf16"), (2, "bf16+fp32")):
        engine = engine_of(settings_of(stage, pin=stage == 2) | PRECISIONS[precision])
        train(engine, num_steps=1, accumulation=2)
        weights = {tensor.untyped_storage().data_ptr() for tensor in engine.module.parameters()}
        shards = [shard for group in engine.optimizer.param_groups for shard in group["params"]]
        for shard in shards:
            assert (shard.dtype, shard.device.type) == (torch.float32, "cpu")
            assert shard.untyped_storage().data_ptr() not in weights
            moments = [value for value in engine.optimizer.state[shard].values() if value.shape == shard.shape]
            assert [(value.dtype, value.device.type) for value in moments] == [(torch.float32, "cpu")] * 2
            assert shard.grad is None
        assert set(engine.optimizer.state) == set(shards)


def test_as_stock_zero_with_cpu_adam(rank: Rank) -> None:
    """At C = 1, DeepSpeedCPUAdam in both; it vectorizes its steps, so that they round otherwise than torch's."""
    settings = settings_of(2, holders=2) | {"optimizer": CPU_ADAMW, "zero_force_ds_cpu_optimizer": True}
    plain = without_block(settings)
    engines = [engine_of(settings), engine_of(plain)]
    assert [type(e.optimizer.optimizer).__name__ for e in engines] == ["DeepSpeedCPUAdam"] * 2
    start = llama().state_dict()
    for step in itertools.islice(batches(rank.size, 2), 5):
        for batch in step[rank.rank]:
            ours, expected = (micro_step(engine, batch) for engine in engines)
            assert abs(ours - expected) <= 1e-5, (ours, expected)
        norm, wanted = (float(engine.get_global_grad_norm()) for engine in engines)
        assert abs(norm - wanted) <= 1e-5 * wanted
    states = [dense_state(engine) for engine in engines]
    differences = torch.stack([(states[0][name] - states[1][name]).norm() for name in start])
    moves = torch.stack([(states[1][name] - start[name]).norm() for name in start])
    assert differences.norm() <= 1e-5 * moves.norm(), (differences.norm(), moves.norm())


class SometimesUnused(torch.nn.Module):
    """A small Llama with a parameter that is in the loss of some micro-steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.llama, self.extra = llama(), torch.nn.Parameter(torch.ones(3))

    def forward(self, input_ids: torch.Tensor, *, uses: bool) -> torch.Tensor:
        loss: torch.Tensor = self.llama(input_ids=input_ids, labels=input_ids).loss
        return loss + self.extra.sum() if uses else loss


def test_unused_parameters(rank: Rank) -> None:
    """`ignore_unused_parameters: false`, on one rank as well; an error as in DeepSpeed, with CPU offload under ZeRO."""
    (batch,) = own_batches(rank, 1)
    for stage, ignores in ((0, False), (1, False), (2, False), (2, True)):
        settings = settings_of(stage)
        settings["zero_optimization"]["ignore_unused_parameters"] = ignores
        engine = engine_of(settings, SometimesUnused())
        step = partial(one_step, engine, batch)
        step(uses=(True, False))
        step(uses=(False, True))
        if ignores or stage == 0:
            step(uses=(False, False))
        else:
            words = ("'extra'", "ignore_unused_parameters")
            refusal(AssertionError, lambda step=step: step(uses=(rank.rank == 1, False)), *words)


def one_step(engine: Any, batch: torch.Tensor, *, uses: tuple[bool, bool]) -> None:
    for each in uses:
        engine.backward(engine(batch, uses=each))
        engine.step()


def test_weights_from_outside(rank: Rank) -> None:
    """The next step starts from them, in fp32 too; else the old masters would come back."""
    for more in (PRECISIONS["fp32"], PRECISIONS["bf16"]):
        settings = settings_of(1) | more | {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        engine = engine_of(settings | {"zero_allow_untested_optimizer": True})
        for value, change in enumerate((_held_tensors, _resident_weights, _resident_state_dict, _module_state_dict)):
            change(engine, float(value))
            engine.backward(loss_of(engine, next(batches(rank.size, 1))[rank.rank][0]))
            engine.optimizer.step()
            assert all(bool((tensor == value).all()) for tensor in dense_state(engine).values()), change


def test_a_refresh_keeps_what_was_not_changed(rank: Rank) -> None:
    """Masters continue from their bits, unless a weight is no longer their rounding."""
    for device in ("none", "cpu"):
        settings = settings_of(1, device=device, regime="backward", strategy="neuron") | PRECISIONS["bf16"]
        engines = [engine_of(settings) for _ in range(2)]
        for first in (0, 1):
            for engine in engines:
                train(engine, num_steps=1, accumulation=2, first=first)
            engines[1].optimizer.refresh_fp32_params()
        pairs = zip(*(engine.optimizer.param_groups[0]["params"] for engine in engines), strict=True)
        for expected, found in pairs:
            assert torch.equal(found, expected)
            assert not torch.equal(found, found.bfloat16().float())


def _held_tensors(engine: Any, value: float) -> None:
    with torch.no_grad():
        for tensor in engine.held_tensors().values():
            tensor.fill_(value)
    engine.optimizer.refresh_fp32_params()


def _resident_weights(engine: Any, value: float) -> None:
    with engine.dense(), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(value)


def _resident_state_dict(engine: Any, value: float) -> None:
    with engine.dense():
        state = engine.module.state_dict()
        engine.module.load_state_dict({name: torch.full_like(tensor, value) for name, tensor in state.items()})


def _module_state_dict(engine: Any, value: float) -> None:
    state = {name: torch.full_like(tensor, value) for name, tensor in dense_state(engine).items()}
    with engine.dense():
        engine.load_module_state_dict({"module": state})
