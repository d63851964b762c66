"""However a caller hands over parameters and optimizers: all are read before units lose their storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import config, family
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

MODES = [(regime, strategy) for regime in ("forward", "backward") for strategy in ("block", "neuron")]
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    """The idiom: read only when somebody asks for the next one."""
    return filter(lambda parameter: parameter.requires_grad, model.parameters())


def groups(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Lazy outside and inside."""
    for is_matrix in (True, False):
        chosen: Any = filter(lambda p, side=is_matrix: p.requires_grad and (p.dim() >= 2) == side, model.parameters())  # type: ignore[arg-type]
        yield {"params": chosen, "weight_decay": 0.1 if is_matrix else 0.0}


def by_function(parameters: Any) -> torch.optim.Optimizer:
    """Filters and sorts by itself."""
    kept = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = {"params": [p for p in kept if p.dim() >= 2], "weight_decay": 0.1}
    return torch.optim.AdamW([decayed, {"params": [p for p in kept if p.dim() < 2], "weight_decay": 0.0}], lr=1e-2)


Idiom = Callable[[nn.Module], dict[str, Any]]
# Each with what must train the same: the parameters in lists that were made before.
FLAT: Mapping[str, Idiom] = {
    "filter": lambda model: {"model_parameters": trainable(model)},
    "generator": lambda model: {"model_parameters": (p for p in model.parameters() if p.requires_grad)},
    "map": lambda model: {"model_parameters": map(model.get_parameter, [name for name, _ in model.named_parameters()])},
    "nothing": lambda model: {"model_parameters": None},
}
GROUPED: Mapping[str, Idiom] = {
    "groups": lambda model: {"model_parameters": groups(model)},
    "function": lambda model: {"model_parameters": None, "optimizer": by_function},
    "function and filter": lambda model: {"model_parameters": trainable(model), "optimizer": by_function},
}


def trained(mode: tuple[str, str], idiom: Idiom) -> dict[str, torch.Tensor]:
    model = family("gpt2")  # biases: some parameters are no matrices
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    settings = config(holders=1, regime=mode[0], strategy=mode[1])
    settings["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
    engine = engine_of(settings, model, **idiom(model))
    train(engine, num_steps=2)
    return dense_state(engine)


def idioms_train_what_lists_do(mode: tuple[str, str], rank: Rank) -> None:
    flat = trained(mode, lambda model: {"model_parameters": list(trainable(model))})
    chosen = FLAT.values() if mode == MODES[0] else [FLAT["filter"]]
    for idiom in chosen:
        assert_identical(trained(mode, idiom), flat)
    grouped = trained(
        mode, lambda model: {"model_parameters": [{**own, "params": list(own["params"])} for own in groups(model)]}
    )
    assert not torch.equal(grouped["transformer.ln_f.weight"], flat["transformer.ln_f.weight"])  # decay shows
    for idiom in GROUPED.values() if mode == MODES[0] else [GROUPED["groups"], GROUPED["function"]]:
        assert_identical(trained(mode, idiom), grouped)


def a_function_that_fails_on_one_rank(rank: Rank) -> None:
    def fails(parameters: Any) -> torch.optim.Optimizer:
        if rank.rank == 1:
            raise ValueError("no such learning rate")
        return by_function(parameters)

    refusal(ValueError, lambda: engine_of(config(holders=1), optimizer=fails), "no such learning rate", "[on rank 1]")


def an_unknown_optimizer_is_refused(rank: Rank) -> None:
    class Mine(torch.optim.SGD):
        pass

    def other(parameters: Any) -> torch.optim.Optimizer:
        return Mine(parameters)

    refusal(ValueError, lambda: engine_of(config(holders=1), optimizer=other), "Mine")


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for mode in MODES:
        yield " ".join(mode), partial(idioms_train_what_lists_do, mode)
    yield "fails on one rank", a_function_that_fails_on_one_rank
    yield "unknown", an_unknown_optimizer_is_refused


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
