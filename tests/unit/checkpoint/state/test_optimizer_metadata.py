"""What a checkpoint says of an optimizer beside its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.checkpoint.state.optimizer_metadata import (
    as_optimizer_counts,
    counts_of,
    highest,
    kind_of,
    refuse_another_kind,
    same_counts,
)


def optimizer(kind: type[torch.optim.Optimizer]) -> Any:
    return kind([torch.zeros(2, requires_grad=True)], lr=0.1)  # type: ignore[call-arg]


class OwnAdam(torch.optim.Adam):
    """Somebody's, elsewhere than torch's."""


def test_optimizers_that_keep_the_same_state_are_one_kind() -> None:
    assert kind_of(optimizer(torch.optim.AdamW)) == kind_of(optimizer(torch.optim.Adam)) == "Adam"
    refuse_another_kind({"kind": "Adam"}, optimizer(torch.optim.AdamW))
    refuse_another_kind({}, optimizer(torch.optim.SGD))  # it does not say
    with pytest.raises(ValueError, match=r"is of Adam, and the optimizer here is SGD; load it with load_optimizer"):
        refuse_another_kind({"kind": "Adam"}, optimizer(torch.optim.SGD))


def test_counts_come_back_as_the_optimizer_keeps_them() -> None:
    count = as_optimizer_counts(optimizer(torch.optim.Adam), {"step": 3})["step"]
    assert (count.dtype, count.item()) == (torch.float32, 3.0)
    assert as_optimizer_counts(optimizer(OwnAdam), {"step": 3}) == {"step": 3}
    assert torch.is_tensor(as_optimizer_counts(optimizer(OwnAdam), {"step": 3.0})["step"])
    assert as_optimizer_counts(optimizer(torch.optim.Adam), None) == {}


def test_the_highest_of_numbers_stays_what_it_is() -> None:
    assert repr(highest([1, 2])) == "2"
    assert repr(highest([1, 2.0])) == repr(highest([torch.tensor(1), torch.tensor(2.0)])) == "2.0"


def test_counts_of_tensors() -> None:
    metadata = {"groups": {"a": 0, "b": 1}, "counts": [{"step": 2.0}, None]}
    assert [counts_of(name, metadata) for name in "abc"] == [{"step": 2.0}, {}, {}]
    assert same_counts([{"step": 2.0}, {"step": 2.0}], ["a", "b"]) == {"step": 2.0}
    with pytest.raises(ValueError, match="step counts of 'a' and others of its optimizer param group are not alike"):
        same_counts([{"step": 2.0}, {"step": 1.0}], ["a", "b"])
