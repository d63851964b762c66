"""Branches of a model, derived from passes over it, and over its parts that these do not run, such as the vision tower
of a language model."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from sdp_deepspeed.architectures.branch import Branch, is_inside
from sdp_deepspeed.architectures.derive import derive
from sdp_deepspeed.architectures.examples import Example, example_of, given_example, with_encoder_states
from sdp_deepspeed.architectures.flops import count_flops
from sdp_deepspeed.architectures.likeness import likeness
from sdp_deepspeed.architectures.narrow import narrow_pass
from sdp_deepspeed.architectures.trace import Trace, trace_pass


@dataclass(frozen=True, eq=False)
class Derivation:
    """What was derived of a model, and of all that are like it.

    Args:
        branches: of each layer, by dense name, in forward order.
        passes: the traced pass in which a layer ran, and the prefix of the layer's name, by dense name of the layer.
        replays: the same for proofs, which may be of a narrow copy of a large model, with the layer's branches there.
        traced: all passes, each with the prefix of its names.
        reasons: why further branches of a layer cannot be units, by dense name.
        flops: per parameter element, by dense name (flops.py).
        problem: why nothing could be traced; empty if it could.
    """

    branches: dict[str, list[Branch]]
    passes: dict[str, tuple[Trace, str]]
    replays: dict[str, tuple[Trace, str, list[Branch]]]
    traced: list[tuple[Trace, str]]
    reasons: dict[str, str]
    flops: dict[str, Fraction]
    problem: str = ""


# Cached by model: a masked model, or one on other devices, would run differently.
_Modules = tuple[tuple[str, type, object], ...]
_KNOWN: WeakKeyDictionary[nn.Module, tuple[_Modules, Example | None, Derivation]] = WeakKeyDictionary()
_OF_MODELS_LIKE: OrderedDict[Hashable, Derivation] = OrderedDict()  # for copies and further models of a config
_NUM_KEPT = 16


def derivation_of(model: nn.Module) -> Derivation:
    """Derive the branches of a model, once for its current modules. Not collective; all ranks get the same result."""
    modules = tuple((name, type(module), _unmasked_forward(module)) for name, module in model.named_modules())
    given = given_example(model)
    known = _KNOWN.get(model)
    if known is None or known[0] != modules or known[1] is not given:
        key = likeness(model)
        derivation = _OF_MODELS_LIKE.pop(key, None)
        if derivation is None:
            with known_random_numbers(), _disable_current_modes(), torch.device("cpu"):
                derivation = _derive(model)
        _OF_MODELS_LIKE[key] = derivation
        if len(_OF_MODELS_LIKE) > _NUM_KEPT:
            _OF_MODELS_LIKE.popitem(last=False)
        known = _KNOWN[model] = modules, given, derivation
    return known[2]


def last_derivation(model: nn.Module) -> Derivation:
    """What `derivation_of` returned for a model that a host may have changed since, if its parameters have the same
    names."""
    known = _KNOWN.get(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return known[2] if known is not None and known[2].flops.keys() == names else derivation_of(model)


def flops_per_element(model: nn.Module) -> Mapping[str, Fraction]:
    """FLOPs per parameter element, by dense name (flops.py). Not collective; all ranks get the same result.

    Args:
        model: on any device, including meta; whole, or masked or divided if it was whole in an earlier call.
    """
    return last_derivation(model).flops


def _unmasked_forward(module: nn.Module) -> object:
    """The forward of a module, of its class or its own, without those that masks have put around it."""
    forward: Any = module.forward
    while (previous := getattr(getattr(forward, "__self__", None), "previous", None)) is not None:  # ReplacedForward
        forward = previous
    return getattr(forward, "__func__", forward)


@contextmanager
def known_random_numbers() -> Iterator[None]:
    """Context in which random numbers on the CPU are the same on all ranks; afterwards they go on as before."""
    state, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(of_numpy)


def _derive(model: nn.Module) -> Derivation:
    """Derive the branches of a model, then those of its parts that have not run."""
    result = Derivation({}, {}, {}, [], {}, {})
    problem = ""
    ran: set[str] = set()
    for name, module in model.named_modules():
        is_part = hasattr(module, "main_input_name") and hasattr(module, "config")
        if name and (not is_part or any(is_inside(path, name) for path in ran)):
            continue
        example = example_of(module)
        if example is None:
            problem = problem or "its inputs are not known"
            continue
        try:
            example, traced = _traced(module, example)
        except Exception as error:  # of user code, on an example that may not suit it
            problem = problem or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        prefix = f"{name}." if name else ""
        ran |= {f"{prefix}{path}" for path in traced.calls}
        _add_pass(result, module, example, traced, prefix)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    ordered = {layer: result.branches[layer] for layer in sorted(result.branches, key=lambda layer: order[layer])}
    flops = count_flops(model, result.traced, result.passes, problem)
    return replace(result, branches=ordered, flops=flops, problem=problem)


def _add_pass(result: Derivation, module: nn.Module, example: Example, traced: Trace, prefix: str) -> None:
    """Add the branches of a traced pass of a model, or of one of its parts."""
    result.traced.append((traced, prefix))
    branches, reasons = derive(module, traced)
    narrow, of_narrow = narrow_pass(module, example, traced, branches)
    branches = _also_in_training(module, example, branches, reasons)
    result.branches.update({prefix + layer: found for layer, found in branches.items()})
    result.passes.update({prefix + layer: (traced, prefix) for layer in branches})
    result.replays.update({prefix + layer: (narrow, prefix, of_narrow[layer]) for layer in branches})
    result.reasons.update({prefix + layer: reason for layer, reason in reasons.items()})


def _traced(module: nn.Module, example: Example) -> tuple[Example, Trace]:
    """A traced pass; with states of an encoder if more modules run then."""
    traced = trace_pass(module, example)
    leaves = {name for name, leaf in module.named_modules() if any(True for _ in leaf.parameters(recurse=False))}
    further = with_encoder_states(module, example) if leaves - traced.calls.keys() else None
    if further is not None and given_example(module) is None:
        try:
            other = trace_pass(module, further)
        except Exception:  # of user code, which may take none
            return example, traced
        if other.calls.keys() > traced.calls.keys():
            return further, other
    return example, traced


def _also_in_training(
    module: nn.Module, example: Example, branches: Mapping[str, list[Branch]], reasons: dict[str, str]
) -> dict[str, list[Branch]]:
    """Those branches that a pass in training mode has, too, if there is one with this example: further losses may use
    what they compute. Adds reasons for the others."""
    try:
        traced = trace_pass(module, example, is_training=True)
    except Exception:  # of user code, such as one that needs labels in training mode only
        return dict(branches)
    in_training, why = derive(module, traced)
    result: dict[str, list[Branch]] = {}
    for layer, of_layer in branches.items():
        same = [{*branch.modules, *branch.parameters} for branch in in_training.get(layer, ())]
        left = [
            branch
            for branch in of_layer
            if f"{layer}.{branch.bodies[0]}" not in traced.calls  # left out at random
            or {*branch.modules, *branch.parameters} in same
        ]
        if len(left) < len(of_layer):
            reasons[layer] = f"in training mode: {why.get(layer, 'it computes something else')}"
        if left:
            result[layer] = left
    return result
