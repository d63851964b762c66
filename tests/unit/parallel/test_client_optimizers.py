"""Which optimizers of a client are known, refused by name, or need permission; which tensors they train, and what they
may bring along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.parallel.optimizer_kinds import check_optimizer
from sdp_deepspeed.parallel.param_groups import param_group_indices


class Mine(torch.optim.SGD):
    """Of a user."""


class Muon(torch.optim.SGD):
    """Of a user too, perhaps with collectives of its own."""


def test_known_ones_need_no_permission() -> None:
    for name in "Adam AdamW SGD RMSprop Adagrad NAdam RAdam Muon".split():  # noqa: SIM905
        check_optimizer(getattr(torch.optim, name), allow=False)
    for name in ("Adam", "AdamW", "Lion", "Adagrad", "Muon"):  # DeepSpeed's `optimizer.type`
        check_optimizer(name, allow=False)


@pytest.mark.parametrize("kind", [Mine, Muon, "MuAdam"])
def test_unknown_ones_need_it(kind: Any) -> None:
    check_optimizer(kind, allow=True)
    with pytest.raises(ValueError, match="set allow_optimizer"):
        check_optimizer(kind, allow=False)


@pytest.mark.parametrize(
    "kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, "OneBitAdam", "Lamb"]
)
def test_what_cannot_be_sharded_is_refused_by_name(kind: Any) -> None:
    for allow in (False, True):
        with pytest.raises(ValueError, match="is not elementwise"):
            check_optimizer(kind, allow=allow)


def _parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(2)) for name in "abcd"}


def test_a_parameter_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3, 2))])
    with pytest.raises(ValueError, match=r"shape \(3, 2\) that the model does not have"):
        param_group_indices(optimizer, _parameters(), dict.fromkeys("abcd", True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_a_stepped_optimizer_is_refused(kind: Any) -> None:
    parameters, trainable = _parameters(), dict.fromkeys("abcd", True)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(parameters.values(), lr=0.1, **options)
    assert param_group_indices(optimizer, parameters, trainable) == dict.fromkeys("abcd", 0)
    parameters["b"].grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(ValueError, match=f"{kind.__name__} already holds state"):
        param_group_indices(optimizer, parameters, trainable)
