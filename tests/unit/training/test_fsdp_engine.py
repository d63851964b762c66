"""What `--host fsdp2` makes of its settings; several ranks: tests/launcher/test_pretrain_fsdp.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from sdp_deepspeed.config import KEY
from sdp_deepspeed.training import engines, fsdp_engine
from sdp_deepspeed.training.fsdp_engine import ShardedEngine
from sdp_deepspeed.training.fsdp_settings import FsdpSettings, read_settings
from tests.helpers.models import TOKENS, llama, loss_of

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
BF16 = {"bf16": {"enabled": True}}
PINNED = {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": True}}}


def settings(**given: Any) -> FsdpSettings:
    return read_settings(CONFIG | given, 1)


@pytest.mark.parametrize(
    ("given", "block", "policy", "offload"),
    [
        ({}, {"coverage": 1.0, "granularity": "layer"}, MixedPrecisionPolicy(), OffloadPolicy()),
        ({KEY: {"coverage": 0.5}}, {"coverage": 0.5}, MixedPrecisionPolicy(), OffloadPolicy()),
        (BF16, None, MixedPrecisionPolicy(param_dtype=torch.bfloat16), OffloadPolicy()),
        (
            BF16 | {"communication_data_type": "FP32"},
            None,
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            OffloadPolicy(),
        ),
        (PINNED, None, MixedPrecisionPolicy(), CPUOffloadPolicy(pin_memory=True)),
    ],
)
def test_what_fully_shard_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], block: Any, policy: Any, offload: Any
) -> None:
    class Asked(Exception):
        pass

    def ask(*arguments: Any, **options: Any) -> None:
        raise Asked(arguments[2], options["mp_policy"], options["offload_policy"])

    monkeypatch.setattr(fsdp_engine, "fully_shard", ask)
    with pytest.raises(Asked) as asked:
        ShardedEngine.build(llama(), settings(**given))
    found = asked.value.args
    assert block is None or found[0] == block
    assert found[1:] == (policy, offload)


def test_without_the_block_it_has_no_plan(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = ShardedEngine.build(llama(), settings(gradient_accumulation_steps=2))
        whole = ShardedEngine.build(llama(), settings(**{KEY: {"coverage": 1.0}}))
        assert plain.plan is None
        assert engines.present(plain).label == "FSDP2"
        assert whole.plan is not None
        assert engines.present(whole).label == "SDP 1/1 + FSDP2"
        for step in range(4):
            plain.backward(loss_of(plain, TOKENS))
            plain.step()
            assert plain.global_steps == (step + 1) // 2
    finally:
        dist.destroy_process_group()
