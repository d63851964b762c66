"""Short trainings of an engine that several tests share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import sdp_deepspeed  # noqa: F401  (installs the import hook)
from tests.helpers.models import batches, config, llama, loss_of
from tests.helpers.ranks import Rank


def engine_of(settings: Mapping[str, Any], model: nn.Module | None = None, **options: Any) -> Any:
    """An engine of a small Llama; JSON optimizers get the model's parameters."""
    model = llama() if model is None else model
    options.setdefault("model_parameters", list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, config=dict(settings), **options)
    return engine


def own_batches(rank: Rank, num: int) -> list[torch.Tensor]:
    """This rank's micro-batches of the first step."""
    return next(batches(rank.size, num))[rank.rank]


def micro_step(engine: Any, batch: torch.Tensor) -> float:
    loss = loss_of(engine, batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine: Any, *, num_steps: int, accumulation: int = 1, seed: int = 1, first: int = 0) -> list[float]:
    """This rank's losses of steps [first, first + num_steps) of the endless batches of `seed`, which tensor-parallel
    ranks have in common."""
    group = engine.seq_data_parallel_group
    steps = itertools.islice(batches(dist.get_world_size(group), accumulation, seed), first, first + num_steps)
    return [micro_step(engine, batch) for step in steps for batch in step[dist.get_rank(group)]]


def dense_state(engine: Any) -> dict[str, torch.Tensor]:
    """The whole model on every rank (a collective); a plain engine's own weights."""
    if not hasattr(engine, "plan"):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    with engine.dense():
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def assert_identical(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """The same names and the same bits."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def gathered(value: Any) -> list[Any]:
    """A small object of every rank, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refusal(kinds: type[BaseException] | tuple[type[BaseException], ...], work: Any, *words: str) -> str:
    """The message with which `work` fails on every rank, all of one of `kinds`, with `words` in it."""
    try:
        work()
    except kinds as error:
        text: str | None = str(error)
    else:
        text = None
    texts: Sequence[str | None] = gathered(text)
    assert None not in texts, f"no error on some ranks: {texts}"
    own = texts[dist.get_rank()]
    assert own is not None
    missing = [word for word in words if word not in own]
    assert not missing, (missing, own)
    return own


def without_optimizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """For a client's."""
    return {key: value for key, value in settings.items() if key != "optimizer"}


SGD = {"type": "SGD", "params": {"lr": 0.1}}


def sgd(accumulation: int = 1, *, stage: int = 1, clip: float = 0.0, **block: Any) -> dict[str, Any]:
    """SGD without momentum: a step shows its gradient as it is."""
    result = config(**({"holders": 1} | block)) | {"optimizer": SGD, "gradient_clipping": clip}
    return result | {"gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": stage}}
