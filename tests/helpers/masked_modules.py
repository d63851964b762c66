"""Masked modules without an engine, and what is measured on them: FLOPs, saved bytes, gradients by pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units, locate_branches, units_of_branches
from sdp_deepspeed.core.masking import Mask
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from sdp_deepspeed.units import Piece
from tests.helpers import models

NUM_GROUPS = 3  # of an MLP's neurons, for two workers: one has two groups with a gap between them, the other one
NAMES = (*models.FAMILIES, "llama_biases", "llama_odd")
RANKS = (0, 1)
NUM_TOKENS = 2 * models.LENGTH
# Products of narrower matrices, and two sums where the dense layer has one, may add in another order: at most 61 terms
# (the vocabulary), each partial sum rounded by 2**-24 of itself, so 2**-18 of the largest term; layers and the loss
# make a few such products one after the other.
ROUNDING = 2.0**-16


def build(name: str, num_layers: int = 1) -> nn.Module:
    """A family, or a Llama with all biases, or one with 6 query heads on 3 key/value heads and 29 neurons.

    Weights are large enough for attention to be far from uniform; no bias is zero and no norm is one.
    """
    return deepcopy(_built(name, num_layers))


@cache
def _built(name: str, num_layers: int) -> nn.Module:
    if name in models.FAMILIES:
        model = models.family(name, num_layers)
    else:
        specimen = models.SPECIMENS[name]
        model = replace(specimen, options={**specimen.options, "num_hidden_layers": num_layers}).build()
    return models.scrambled(model)


def tokens(seed: int = 3) -> torch.Tensor:
    return next(models.batches(1, 1, seed))[0][0]


def infos(model: nn.Module) -> list[TensorInfo]:
    return [TensorInfo(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]


def plan_of(model: nn.Module, regime: str = "forward", strategy: Any = "neuron", **choice: Any) -> Plan:
    """Two workers, each unit held by one of them in turn.

    Args:
        choice: of `units_of_branches`, such as `shared` or `granularity`.
    """
    branches = locate_branches(model)
    units = units_of_branches(branches, strategy=strategy, num_subnetworks=NUM_GROUPS, **choice)
    names = branches_of_units(units, branches)
    order = list(
        dict.fromkeys(names)
    )  # of each branch the units in turn, of the next one beginning with the other worker
    holders = tuple(((order.index(name) + names[:unit].count(name)) % 2,) for unit, name in enumerate(names))
    return Plan(regime, strategy, 2, 1, 0, tuple(units), holders, RANKS)


def masked(model: nn.Module, plan: Plan, rank: int) -> tuple[Any, Mask]:
    """A copy of `model` as rank `rank` has it."""
    result = deepcopy(model)
    mask = Mask(result, plan, rank)
    mask.apply()
    return result, mask


def held_pieces(model: nn.Module, plan: Plan, rank: int) -> dict[str, list[Piece]]:
    """Per parameter of the dense `model` the pieces that `rank` holds, in dense order; none where it lacks all."""
    pieces = pieces_by_tensor(infos(model), plan)
    return {
        name: [piece for piece, ranks in pieces["parameter", name] if rank in ranks]
        for name, _ in model.named_parameters()
    }


def cut_names(plan: Plan) -> set[str]:
    return {piece.parameter for unit in plan.units for piece in unit.pieces if piece.dim is not None}


def loss_and_gradients(model: Any, batch: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**models.inputs_of(model, batch), **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, largest: float | None = None) -> None:
    """Equal to rounding of the largest element, of `expected` unless it is given."""
    assert found.shape == expected.shape
    atol = ROUNDING * (float(expected.detach().abs().max()) if largest is None else largest)
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=atol)


def assert_held_gradients(
    mask: Mask,
    pieces: Mapping[str, Sequence[Piece]],
    gradients: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> None:
    """All `pieces` have a gradient, at their place, equal to that of the dense model; nothing else has one."""
    assert gradients.keys() == {name for name, held in pieces.items() if held}
    for name, gradient in gradients.items():
        assert gradient.numel() == sum(piece.num_elements(expected[name].shape) for piece in pieces[name])
        for piece in pieces[name]:
            largest = float(expected[name].abs().max())
            assert_close(mask.view(piece, gradient), piece.narrow(expected[name]), largest=largest)


def assert_same_as_zeroed(
    model: nn.Module,
    plan: Plan,
    rank: int,
    *,
    assert_gradients: Callable[..., None] = assert_held_gradients,
    **inputs: Any,
) -> None:
    """Loss, and gradients of all that `rank` holds, piece by piece at its place."""
    zeroed, pieces = deepcopy(model), held_pieces(model, plan, rank)
    zero_lacking(zeroed, plan, rank)
    expected_loss, expected = loss_and_gradients(zeroed, tokens(), **inputs)
    module, mask = masked(model, plan, rank)
    loss, gradients = loss_and_gradients(module, tokens(), **inputs)
    assert_close(loss, expected_loss)
    assert_gradients(mask, pieces, gradients, expected)


def layer_of(branch: LocatedBranch, index: int) -> str:
    """Name of the first (0) or last (-1) linear layer of a branch."""
    assert branch.description.inner is not None
    return f"{branch.root}.{branch.description.inner.cuts[index].module}"


def linear_weights(model: nn.Module, pieces: dict[str, list[Piece]] | None = None) -> int:
    """Elements of all matrices that are multiplied with (not of look-up tables), or of `pieces` of them."""
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | Conv1D)}
    matrices = {name: p for name, p in model.named_parameters() if id(p) in multiplied}
    if pieces is None:
        return sum(p.numel() for p in matrices.values())
    return sum(piece.num_elements(p.shape) for name, p in matrices.items() for piece in pieces[name])


class Products:
    """Matrix products (mm, addmm) inside a `with` block: FLOPs and number of calls. Attention's own are not counted."""

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self.num_calls = 0

    def __enter__(self) -> Products:
        self._counter.__enter__()
        count = self._counter._count_flops

        def counted(func: Any, *rest: Any) -> Any:
            self.num_calls += func in _PRODUCTS
            return count(func, *rest)

        self._counter._count_flops = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)

    @property
    def flops(self) -> int:
        return sum(self._counter.get_flop_counts().get("Global", {}).get(kind, 0) for kind in _PRODUCTS)


def flops(model: nn.Module) -> tuple[Products, Products]:
    """Of the forward pass, and of the backward pass."""
    with Products() as forward:
        loss = models.loss_of(model, tokens())
    with Products() as backward:
        loss.backward()
    return forward, backward


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


class Saved:
    """What autograd keeps inside a `with` block, each storage once, weights left out.

    Attributes:
        tensors: as they were saved, which also keeps addresses from being used twice.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.tensors: list[torch.Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in self._weights:
            self.tensors.append(tensor)
        return tensor

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def num_bytes(self) -> int:
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the values of `tensor` are among what was saved."""
        return any(
            saved.numel() == tensor.numel() and torch.equal(saved.reshape(-1), tensor.reshape(-1))
            for saved in self.tensors
            if saved.dtype == tensor.dtype
        )


def saved_of(model: Any, *, extra: Iterable[torch.Tensor] = ()) -> Saved:
    """Of a forward pass without a key/value cache, which would copy values.

    Args:
        extra: weights besides the model's parameters.
    """
    with Saved([*model.parameters(), *extra]) as saved:
        model(input_ids=tokens(), labels=tokens(), use_cache=False)
    return saved


@contextmanager
def counted_attention() -> Iterator[list[tuple[int, int]]]:
    """Calls of scaled dot product attention: numbers of query heads and of key heads."""
    calls: list[tuple[int, int]] = []
    original = nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append((query.shape[1], key.shape[1]))
        return original(query, key, *rest, **options)

    nn.functional.scaled_dot_product_attention = counting
    try:
        yield calls
    finally:
        nn.functional.scaled_dot_product_attention = original
