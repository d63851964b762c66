"""Every key of DeepSpeed's config that the optimizer reads reaches it; each one's effect is tested where it acts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import config
from ranks import Rank
from training import assert_identical, dense_state, engine_of, train

from sdp_deepspeed.stepping import Offload

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CPU = {"device": "cpu", "pin_memory": True}


def settings_of(engine_config: dict[str, Any], **zero: Any) -> Any:
    settings = config(holders=1) | {"zero_force_ds_cpu_optimizer": False} | engine_config
    settings["zero_optimization"] = {"stage": 2} | zero
    return engine_of(settings).optimizer.settings


def what_the_config_says(rank: Rank) -> None:
    plain = settings_of({})
    assert (plain.stage, plain.max_in_flight, plain.offload, plain.needs_norm) == (2, 0, None, True)
    assert (plain.wire_dtype, plain.accumulate_in_fp32, plain.skip_overflow) == (torch.float32, False, True)
    assert settings_of({}, stage=0).stage == 0
    assert settings_of({}, overlap_comm=True).max_in_flight == 1
    sizes = settings_of({}, reduce_bucket_size=1234, allgather_bucket_size=4321)
    assert (sizes.bucket_elements, sizes.return_bucket_elements) == (1234, 4321)
    assert settings_of({}, offload_optimizer=CPU).offload == Offload(pin_memory=True)
    assert settings_of({}, offload_optimizer=CPU | {"pin_memory": False}).offload == Offload(pin_memory=False)
    assert settings_of({"gradient_clipping": 0.0}, compute_grad_norm=False).needs_norm is False
    assert settings_of({"gradient_clipping": 0.25}).clip == 0.25
    assert settings_of({"communication_data_type": "bf16"}).wire_dtype == torch.bfloat16
    for checks in (False, True):
        bf16 = {"enabled": True, "check_grad_overflow": checks}
        assert settings_of({"bf16": bf16}).skip_overflow is checks
    assert settings_of(BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}).accumulate_in_fp32 is True


def checkpoints_of_other_buckets_go_on(rank: Rank) -> None:
    """Buckets decide who owns what, in which order: states of the same size would land on other elements."""
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
        shared = {"stage": 1, "reduce_bucket_size": 10**6} | zero
        engines = []
        for sizes in ({}, {"allgather_bucket_size": 3000}, {"reduce_bucket_size": 3000}):
            settings = config(holders=1) | {"zero_force_ds_cpu_optimizer": False} | BF16
            engines.append(engine_of(settings | {"zero_optimization": shared | sizes}))
        first, *others = engines
        train(first, num_steps=1)
        folder = str(rank.folder / f"buckets_{len(zero)}")
        first.save_checkpoint(folder)
        train(first, num_steps=1, first=1)
        for other in others:
            other.load_checkpoint(folder)
            train(other, num_steps=1, first=1)
            assert_identical(dense_state(other), dense_state(first))


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (what_the_config_says, checkpoints_of_other_buckets_go_on):
        yield check.__name__, check


@pytest.mark.ranks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
