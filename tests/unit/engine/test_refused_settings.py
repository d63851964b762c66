"""What an engine refuses by name, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.engine.refused_settings import refuse_settings
from sdp_deepspeed.parallel.refused_models import refuse_model


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "zero_optimization.offload_optimizer"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ValueError, match=rf"^{path}: got ") as caught:
        refuse_settings(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_scatter": False}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zero_hpz_partition_size": 1}},
        {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}, "bf16": {"bf16_optimizer_states": True}},
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"sequence_parallel_size": 1, "expert_parallel": {"enabled": False}, "autotuning": {"enabled": False}},
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        {"gradient_clipping": 0, "zero_optimization": {"stage": 1, "compute_grad_norm": False}},
    ],
)
def test_what_changes_no_result_is_not_refused(config: dict[str, Any]) -> None:
    refuse_settings(config)


def test_modules_whose_gradients_cannot_travel_are_refused() -> None:
    class Experts(torch.nn.Module):
        __module__ = "deepspeed.moe.layer"

    refuse_model(torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"'0' \(Embedding\) produces sparse gradients"):
        refuse_model(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(ValueError, match=r"'1' is a DeepSpeed mixture of experts"):
        refuse_model(torch.nn.Sequential(torch.nn.Identity(), Experts()))


def _tied_by_data(model: Any) -> None:
    model[2].weight.data = model[0].weight.data


def _a_column(model: Any) -> None:
    model[2].weight.data = model[0].weight.data[:, 1:2]


def _behind_a_small_one(model: Any) -> None:
    """That lies between columns of the first, and ends before the third begins."""
    flat = torch.zeros(5, 3, device=model[0].weight.device)
    model[0].weight.data, model[0].bias.data = flat[:, :2], flat[0, 2:]
    model[2].weight.data = flat[3:]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tie", [_tied_by_data, _a_column, _behind_a_small_one])
def test_parameters_in_the_same_memory_are_refused(tie: Any, device: str) -> None:
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    tie(model)
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' share memory.*Parameter itself"):
        refuse_model(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_nobody_trains_twice_is_not_refused(device: str) -> None:
    """One object, parts of one buffer beside or between each other, empty ones, and frozen ones."""
    with torch.device(device):
        model: Any = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(7)])
        model[1].weight = model[0].weight
        flat, rows = torch.zeros(18), torch.zeros(3, 6)
        model[2].weight.data, model[3].weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
        model[4].weight.data, model[5].weight.data = rows[:, ::2], rows[:, 1::2]
        model[0].bias.data = model[1].bias.data = torch.empty(0)
        model[6].bias.data = model[5].bias.data
        model[6].bias.requires_grad_(False)
        model[5].bias.requires_grad_(False)
    refuse_model(model)
    model[3].weight.data = flat[8:17].view(3, 3)  # one element of it is the other's, too
    with pytest.raises(ValueError, match=r"'2\.weight' and '3\.weight' share memory"):
        refuse_model(model)
