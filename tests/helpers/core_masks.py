"""Models, plans and comparisons for the tests of masks, in one process and without an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import branches_of_units, units_of_branches
from sdp_deepspeed.units import Piece, Regime
from tests.helpers import mixtures, models, more_models
from tests.reference.virtual_workers import scale_branches, zero_absent

NAMES = (*more_models.ALL_SPECIMENS, *mixtures.MIXTURES)
# The rest repeats them with other names of modules.
IN_SHORT = (
    "glm",
    "phi3",
    "t5",
    "gpt2",
    "falcon_grouped",
    "gpt_oss",
    "deepseek_v3",
    "resnet",
    "llama_one_layer",
    "gemma2",
    "bloom",
)
# Narrower products and sums of parts add in another order: at most 61 terms, each rounded by 2**-24 of a partial sum,
# in a few products one after the other.
ROUNDING = 2.0**-16

Gradients = Mapping[str, torch.Tensor]


def families(names: Iterable[str], in_short: Collection[str] = IN_SHORT) -> list[Any]:
    """As parameters of a test, slow if they are not needed in short."""
    return [pytest.param(name, marks=() if name in in_short else pytest.mark.slow) for name in names]


def build(name: str, **options: Any) -> Any:
    """No bias is zero and no norm is one, so that a forgotten one is seen.

    Args:
        options: of the config, beside those of the specimen.
    """
    if name in mixtures.MIXTURES:
        return mixtures.mixture(name, **options)
    return deepcopy(_built(name, tuple(sorted(options.items()))))


@cache
def _built(name: str, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    specimen = more_models.ALL_SPECIMENS[name]
    model = models.scrambled(replace(specimen, options={**specimen.options, **dict(options)}).build())
    # Batch norms over a few pixels blow rounding up, to a percent of the loss in fp32.
    return (model.double() if "resnet" in name else model).train()


def strategy_of(name: str, strategy: str) -> Any:
    """Attention as blocks where its heads cannot be cut."""
    is_cut = strategy == "block" or name not in more_models.UNCUT
    return strategy if is_cut else {"attention": "block", "mlp": "neuron"}


def plan_of(model: nn.Module, regime: Regime, strategy: Any, **choice: Any) -> Plan:
    """Two workers. Each unit is held by one of them in turn, so one has neurons before and after the other's."""
    branches = proven_branches(model, "neuron")
    units = units_of_branches(branches, strategy=strategy, **{"neuron_groups": None, "num_subnetworks": 3, **choice})
    names = branches_of_units(units, branches)
    order = list(dict.fromkeys(names))
    holders = tuple(((order.index(name) + names[:unit].count(name)) % 2,) for unit, name in enumerate(names))
    return Plan(regime, strategy, 2, 0, tuple(units), holders, (0, 1))


def tokens(seed: int = 3) -> torch.Tensor:
    return next(models.batches(1, 1, seed))[0][0]


def run(model: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, logits and gradients, with the same random numbers each time."""
    torch.manual_seed(3)
    output = model(**models.inputs_of(model, tokens()), **inputs)
    output.loss.backward()
    gradients = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), output.logits.detach(), gradients


def expected_of(dense: nn.Module, plan: Plan, rank: int) -> nn.Module:
    """What a rank's subnetwork must compute: the dense model, of the forward regime with its absent pieces zeroed."""
    model = deepcopy(dense)
    if plan.regime == "forward":
        zero_absent(model, plan, rank)
    return model


def mask_of(model: nn.Module, plan: Plan, rank: int, **options: Any) -> Mask:
    return Mask(model, plan, rank, proven_branches(model, plan.strategy), **options)


def masked(dense: nn.Module, plan: Plan, rank: int, **options: Any) -> tuple[Any, Mask]:
    model = deepcopy(dense)
    mask = mask_of(model, plan, rank, **options)
    mask.apply()
    return model, mask


def assert_close(found: torch.Tensor, expected: torch.Tensor, largest: float | None = None) -> None:
    """To rounding of the largest element, of `expected` unless it is given."""
    assert found.shape == expected.shape
    atol = ROUNDING * (float(expected.abs().max()) if largest is None else largest)
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=atol)


def assert_gradients(mask: Mask, found: Gradients, expected: Gradients) -> None:
    """What is trained has the expected gradient, and nothing else has one; what no pass reads has zero or none.

    Sums may cancel (keys' biases): rounding is that of a 64th of the model's largest gradient, if that is more.
    """
    floor = max(float(gradient.abs().max()) for gradient in expected.values()) / 64
    for name, pieces in mask.pieces.items():
        trained = [piece for piece, _ in pieces if mask.is_trained(piece)]
        if name not in found:
            assert not any(piece.narrow(expected[name]).any() for piece in trained if name in expected), name
            continue
        assert trained, f"{name} is absent and has a gradient"
        assert found[name].numel() == sum(piece.num_elements(mask.shapes[name]) for piece in trained), name
        for piece in trained:
            largest = max(floor, float(expected[name].abs().max()))
            assert_close(mask.view(piece, found[name]), piece.narrow(expected[name]), largest)


def assert_masked(
    dense: nn.Module, plan: Plan, rank: int, *, is_scaled: bool = False, **inputs: Any
) -> tuple[Any, Mask]:
    """A subnetwork has the loss, the logits and the gradients that it must have.

    Args:
        is_scaled: whether what its units add is multiplied by 1 / C.
        inputs: of the model, beside tokens and labels.
    """
    expected_model = expected_of(dense, plan, rank)
    multiplied: list[Any] = []
    if is_scaled and plan.regime == "forward":
        multiplied = scale_branches(expected_model, plan, rank, proven_branches(dense, plan.strategy))
    expected_loss, expected_logits, expected = run(expected_model, **inputs)
    for piece, factor in multiplied:
        if piece.parameter in expected:
            piece.narrow(expected[piece.parameter]).mul_(factor)
    model, mask = masked(dense, plan, rank, is_scaled=is_scaled)
    loss, logits, found = run(model, **inputs)
    assert_close(loss, expected_loss)
    assert_close(logits, expected_logits)
    assert_gradients(mask, found, expected)
    return model, mask


def fetch(mask: Mask, dense: nn.Module) -> None:
    """Write what the rank had no values of into an undone mask, as its holders would."""
    values = dict(dense.named_parameters()) | dict(dense.named_buffers())
    for pieces in (*mask.pieces.values(), *mask.buffer_pieces.values()):
        for piece, _ in pieces:
            if not mask.is_held(piece):
                mask.view(piece).copy_(piece.narrow(values[piece.parameter].detach()))


def absent_pieces(mask: Mask) -> list[Piece]:
    pieces = (*mask.pieces.values(), *mask.buffer_pieces.values())
    return [piece for of_tensor in pieces for piece, _ in of_tensor if not mask.is_held(piece)]
