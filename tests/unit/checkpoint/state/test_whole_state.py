"""State of whole tensors on the disk and back, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.checkpoint.load import LoadOptions
from sdp_deepspeed.checkpoint.state.whole_state import moments_by_name
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, named_tensors
from sdp_deepspeed.units import Unit
from tests.helpers.dense_checkpoints import dense_tensors
from tests.helpers.gatherers import Alone
from tests.helpers.rank_models import wrapped
from tests.helpers.trained_states import Trained, checkpointer_of
from tests.helpers.training import assert_identical


def trained(dtype: torch.dtype, stage: int, num_steps: int) -> Trained:
    """Of a matrix, a vector and a number."""
    module = nn.Module()
    for name, shape in {"matrix": (3, 5), "vector": (4,), "number": ()}.items():
        module.register_parameter(name, nn.Parameter(torch.full(shape, 0.5, dtype=dtype)))
    module.register_buffer("num_seen", torch.zeros(1))
    parameters = dict(module.named_parameters())
    inner = torch.optim.Adafactor(parameters.values(), lr=0.1)
    tensors = tuple(TensorInfo(name, tuple(p.shape), dtype) for name, p in parameters.items())
    plan = Plan("forward", "block", 1, 1, 0, (Unit("u", ()),), ((0,),), (0,))
    model = RankModel(plan, tensors, PieceViews(named_tensors(module)))
    world, settings = Communicator(Alone()), OptimizerSettings(stage, clip=0.0, bucket_elements=100, wire_dtype=dtype)
    state = Trained(module, wrapped(inner, model, world, settings=settings), world)
    for _ in range(num_steps):
        state.step()
    return state


@pytest.mark.parametrize(("dtype", "stage"), [(torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 2)])
def test_each_tensor_gets_its_own_back(tmp_path: Path, dtype: torch.dtype, stage: int) -> None:
    """Moments of a number are no step count, and have its shape on the disk."""
    saved, loaded = trained(dtype, stage, 2), trained(dtype, stage, 1)
    checkpointer_of(saved).save(tmp_path, "tag", {})
    checkpointer_of(loaded).load(tmp_path, "tag", LoadOptions())
    assert_identical(loaded.tensors(), saved.tensors())
    shapes: dict[str, Any] = {key: tuple(value.shape) for key, value in dense_tensors(tmp_path / "tag").items()}
    assert shapes["variance/number"] == ()
    assert shapes["variance/vector"] == (4,)
    assert shapes["row_var/matrix"] == (3, 1)
    assert "step/number" not in shapes


def test_names_that_end_alike_have_their_own_moments() -> None:
    stored = ["weight/a.b", "master/b", "variance/b", "exp_avg_sq/a.b", "exp_avg/a.b"]
    assert moments_by_name(stored) == {"a.b": ["exp_avg", "exp_avg_sq"], "b": ["variance"]}
