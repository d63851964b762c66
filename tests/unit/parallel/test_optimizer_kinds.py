"""Which optimizers are known, refused by name, or need permission."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.parallel.optimizer_kinds import check_optimizer


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
