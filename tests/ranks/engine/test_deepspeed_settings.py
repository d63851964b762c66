"""Every key of DeepSpeed's config that the optimizer reads reaches it; each one's effect is tested where it acts."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from sdp_deepspeed.deferred_init.materialize import default_dtype
from sdp_deepspeed.exchange.exchange import Steps
from sdp_deepspeed.optimizer.settings import Offload
from tests.helpers.checkpointed_runs import stepped
from tests.helpers.models import config, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, micro_step, own_batches, train

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


def gradients_travel_in_their_dtype(rank: Rank) -> None:
    """First all gradients, then all weights that return, which have their own dtype."""
    dtypes: dict[str | None, torch.dtype] = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for stage, (name, dtype) in itertools.product((0, 1, 2), dtypes.items()):
        settings = config(holders=1) | {"zero_optimization": {"stage": stage}}
        engine = engine_of(settings | ({} if name is None else {"communication_data_type": name}))
        sent = list[torch.dtype]()
        engine.dp_group.all_to_all = _noting_dtypes(engine.dp_group.all_to_all, sent)
        train(engine, num_steps=1)
        assert sent == [dtype, torch.float32], (stage, name)


def _noting_dtypes(all_to_all: Callable[..., Any], sent: list[torch.dtype]) -> Callable[..., Any]:
    def noting(received: torch.Tensor, out: torch.Tensor, *splits: Any) -> Any:
        sent.append(out.dtype)
        return all_to_all(received, out, *splits)

    return noting


def weights_return_one_behind_the_other(rank: Rank) -> None:
    """With overlap_comm the next bucket travels while one is unpacked."""
    for overlap in (False, True):
        zero = {"stage": 1, "allgather_bucket_size": 500, "overlap_comm": overlap}
        engine = engine_of(config(holders=1) | {"zero_optimization": zero})
        returning, calls = engine.optimizer.weight_exchange, list[str]()
        returning.distribute = _noted(returning.distribute, calls)
        train(engine, num_steps=1)
        assert len(calls) > 6
        assert (calls[:2] == ["begins", "begins"]) is overlap, calls[:4]


def _noted(distribute: Callable[..., Steps], calls: list[str]) -> Callable[..., Steps]:
    def noted(*arguments: Any, **options: Any) -> Steps:
        calls.append("begins")
        yield from distribute(*arguments, **options)
        calls.append("ends")

    return noted


def hints_are_told_at_start(rank: Rank) -> None:
    """GPUs that torch cannot use, too, on each node that has some: this run is on the CPU, perhaps not by its user's
    will."""
    too_old = "the driver is too old"
    with (
        mock.patch("sdp_deepspeed.engine.start.log_dist") as log,
        mock.patch("sdp_deepspeed.engine.start.logger") as node_log,
        mock.patch("sdp_deepspeed.engine.start.unusable_gpus", return_value=too_old),
    ):
        engine_of(config(holders=1) | {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}})
    told = [call.args[0] for call in log.call_args_list if call.kwargs.get("level") == logging.WARNING]
    assert any("elastic_checkpoint" in text and "any layout" in text for text in told), told
    said = [call.args[0] for call in node_log.warning.call_args_list]
    assert said.count(too_old) == (os.environ["LOCAL_RANK"] == "0"), said


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


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """A user's: a GPU, for which "meta" stands here since a tensor there has no values either, and a dtype."""
    with default_dtype(dtype), torch.device("meta"):
        yield


def defaults_of_torch_do_no_harm(rank: Rank) -> None:
    """A tensor of ours that took the default device would have no values, one that took the dtype wrong ones."""
    for stage in (0, 1, 2):
        settings = config(holders=1) | {"zero_optimization": {"stage": stage}}
        folder = str(rank.folder / f"defaults_{stage}")
        model = llama()
        engine = engine_of(settings, llama())
        with defaults(torch.bfloat16):
            other = engine_of(settings, model)
        train(engine, num_steps=1)
        for state in engine.optimizer.optimizer.state.values():
            state["step"].fill_(257.0)  # which bf16 has not
        (batch,) = own_batches(rank, 1)
        with defaults(torch.bfloat16):
            engine.save_checkpoint(folder, client_state={"seen": 3})
            assert other.load_checkpoint(folder)[1] == {"seen": 3}
            dense = dense_state(other)
        assert_identical(dense, dense_state(engine))
        assert_identical(stepped(other), stepped(engine))
        micro_step(engine, batch)
        with defaults(torch.bfloat16):
            micro_step(other, batch)
        assert_identical(dense_state(other), dense_state(engine))


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        what_the_config_says,
        gradients_travel_in_their_dtype,
        weights_return_one_behind_the_other,
        hints_are_told_at_start,
        checkpoints_of_other_buckets_go_on,
        defaults_of_torch_do_no_harm,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
