"""Which optimizer param group each dense tensor is in, agreed on by all ranks before the first exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.optimizer.learning_rates import refuse_rates
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.optimizer.stepped_group import check_fresh
from sdp_deepspeed.optimizer.whole_tensors import mark_whole
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo


def agree_on_groups(
    optimizer: torch.optim.Optimizer, model: RankModel, dp_group: Communicator, *, settings: OptimizerSettings
) -> RankModel:
    """The model with the param groups of its tensors; every rank calls it. Layouts that differ would abort or
    corrupt the exchange.

    Args:
        settings: what else the layout depends on.

    Raises:
        ValueError: on all ranks, what one rank's optimizer has wrong.
        RuntimeError: on all ranks, naming the first tensor that two ranks would lay out differently.
    """

    def lay_out() -> list[TensorInfo]:
        check_fresh(optimizer)
        refuse_rates(optimizer, settings.lr_by_coverage)
        grouped = _with_groups(model.tensors, model.parameters(), optimizer)
        return mark_whole(grouped, model, optimizer, every_group=settings.whole_tensors)

    tensors = run_on_all_ranks(dp_group, lay_out)
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    texts = [repr(settings), f"{type(optimizer).__name__} {options}", *map(repr, tensors)]
    digests = dp_group.gather_objects(hashlib.sha256("\n".join(texts).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise RuntimeError(_difference(dp_group.gather_objects(texts)))
    return replace(model, tensors=tuple(tensors))


@contextmanager
def as_given(model: RankModel) -> Iterator[None]:
    """Parameters that this rank lacks require gradients if they did before units were dropped: who sorts them into
    param groups (DeepSpeed's Muon) must do it alike on all ranks."""
    parameters = model.parameters()
    lacking = [p for info in model.tensors if info.trainable and not (p := parameters[info.name]).requires_grad]
    for parameter in lacking:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in lacking:
            parameter.requires_grad_(False)


def _with_groups(
    tensors: Sequence[TensorInfo], parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[TensorInfo]:
    """Tensors with the index of their optimizer param group.

    Raises:
        ValueError: the optimizer has a parameter that the model does not have.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    group_of: dict[str, int] = {}
    for index, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"optimizer param group {index} has a parameter of shape {tuple(parameter.shape)} that the model "
                    "does not have; build the optimizer from this model's parameters"
                )
            group_of[names[id(parameter)]] = index
    return [replace(info, group=_group(info, group_of)) for info in tensors]


def _difference(facts: Sequence[Sequence[str]]) -> str:
    """The first fact on which a rank differs from rank 0."""
    rank = next(rank for rank, own in enumerate(facts) if own != facts[0])
    pairs = zip(facts[0], facts[rank], strict=False)
    first, other = next((pair for pair in pairs if pair[0] != pair[1]), ("fewer tensors", "more tensors"))
    return (
        f"rank {rank} would lay out its gradients differently than rank 0: {other} there, {first} on rank 0. Give all "
        "ranks the same config, param groups and requires_grad"
    )


def _group(info: TensorInfo, group_of: Mapping[str, int]) -> int:
    return group_of.get(info.name, NOT_OPTIMIZED) if info.trainable else NOT_OPTIMIZED
