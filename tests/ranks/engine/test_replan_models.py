"""`engine.replan` of other models, precisions and optimizers: as in test_replan.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.fp16_runs import DYNAMIC, fp16_is_supported
from tests.helpers.mixtures import MIXTURES, mixture, neurons_of
from tests.helpers.models import llama, two_groups
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, Sequence_, check_sequence
from tests.helpers.whole_tensors import muon

Check = Callable[[Rank], None]
NEURON, BACKWARD = {"strategy": "neuron"}, {"regime": "backward"}
SCALED = {"dense_branch_scale": "coverage"}


def checkpointed(use_reentrant: bool) -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


def adapted() -> nn.Module:
    """Most is frozen; what trains is of two kinds."""
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "norm" in name)
    return model


def muons(model: nn.Module) -> torch.optim.Optimizer:
    return muon(two_groups(dict(model.named_parameters())))


def around(neuron: Any = "neuron") -> list[Phase]:
    cut = {"strategy": neuron}
    return [Phase({}, 1), Phase(BACKWARD | cut), Phase(cut, 2), Phase({"holders": 2}), Phase(BACKWARD, 0)]


AROUND = around()
SEQUENCES = {
    "checkpointed": Sequence_(2, AROUND, model=partial(checkpointed, use_reentrant=False)),
    "checkpointed_reentrant": Sequence_(2, AROUND, "bf16", model=partial(checkpointed, use_reentrant=True)),
    "adapted": Sequence_(2, AROUND, "bf16", model=adapted),
    "muon": Sequence_(2, [Phase({}, 2), Phase(BACKWARD), Phase({"holders": 2}, 1), Phase({}, 0)], optimizer=muons),
    "scaled": Sequence_(2, [Phase({}, 1), Phase(SCALED), Phase(SCALED | NEURON), Phase(NEURON)]),
    "accumulated": Sequence_(
        2, AROUND, "bf16", model=partial(checkpointed, use_reentrant=False), config={"gradient_accumulation_steps": 2}
    ),
} | {f"mixture_{name}": Sequence_(2, around(neurons_of(name)), model=partial(mixture, name)) for name in MIXTURES}


def fp16(rank: Rank) -> None:
    config = {"fp16": {"enabled": True} | DYNAMIC, "bf16": {"enabled": False}}
    with fp16_is_supported():
        check_sequence(Sequence_(2, AROUND, config=config), rank)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for name, run in SEQUENCES.items():
        yield name, partial(check_sequence, run)
    yield "fp16", fp16


@pytest.mark.checks(2, _cases)
def test_replan_models(outcome: str | None) -> None:
    assert outcome is None, outcome
