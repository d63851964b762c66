"""Engines whose dense view is looked at, and the dense model that it must equal."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from sdp_deepspeed.masking.partial import PartialTensor
from tests.helpers.models import VOCABULARY, config
from tests.helpers.ranks import Rank
from tests.helpers.training import dense_state, engine_of


def engine_with(model: nn.Module, *, holders: int = 2, **block: Any) -> Any:
    return engine_of(config(holders=holders, **block), model)


def batch_of(rank: Rank) -> torch.Tensor:
    """Another one on each rank."""
    return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(rank.rank))


@torch.no_grad()
def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch).logits


def whole_copy(engine: Any, like: nn.Module) -> nn.Module:
    result = deepcopy(like).eval()
    result.load_state_dict(dense_state(engine))
    return result


def assert_refused_in_use(state: Mapping[str, torch.Tensor], match: str, kind: type = PartialTensor) -> None:
    """A state dict may be taken and thrown away; each way in which it is used ends in an error, and what is whole in it
    can be used."""
    partial = [value for value in state.values() if isinstance(value, kind)]
    assert partial
    uses: list[Callable[[torch.Tensor], Any]] = [
        torch.clone,
        deepcopy,
        torch.zeros(1).copy_,
        lambda value: value.shape,
        lambda value: value.data_ptr(),
        lambda value: torch.save({"": value}, io.BytesIO()),
        lambda value: save({"": value}),
    ]
    for use, value in itertools.product(uses, partial):
        with pytest.raises(RuntimeError, match=match):
            use(value)
    for value in state.values():
        if not isinstance(value, kind):
            value.clone()


def held_copies(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.held_tensors().items()}
