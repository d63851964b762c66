"""What the wrapped optimizer refuses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.gatherers import Alone
from tests.helpers.rank_models import optimizer_of


def one_unit() -> SubnetworkOptimizer:
    weight = nn.Parameter(torch.ones(3))
    return optimizer_of(
        torch.optim.SGD([weight], lr=1.0),
        parameters={"own": weight},
        tensors=[TensorInfo("own", (3,), weight.dtype)],
        plan=Plan("forward", "block", 1, 1, 0, (Unit("unit", (Piece("own", None, 0, 3),)),), ((0,),), (0,)),
        dp_group=Communicator(Alone()),
        settings=OptimizerSettings(1, clip=0.0, bucket_elements=100, wire_dtype=torch.float32),
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state["state"],
        lambda state: state.get("param_groups"),
        lambda state: "state" in state,
        list,
        dict,
        len,
        lambda state: {**state},
        lambda state: list(state.items()),
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda state: torch.save({"optimizer": state}, io.BytesIO()),
    ],
)
def test_a_state_dict_of_its_own_may_only_be_thrown_away(use: Callable[[Any], object]) -> None:
    """It would be one rank's share, of use on the very same layout only."""
    state = one_unit().state_dict()
    with pytest.raises(RuntimeError, match=r"engine\.save_checkpoint"):
        use(state)


def test_a_state_dict_of_its_own_is_not_loaded() -> None:
    optimizer = one_unit()
    with pytest.raises(RuntimeError, match=r"engine\.load_checkpoint"):
        optimizer.load_state_dict({})


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        one_unit().step(lambda: 0.0)  # type: ignore[arg-type]
