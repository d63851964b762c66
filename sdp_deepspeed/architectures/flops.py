"""FLOPs of each weight, from the traced passes of a model (trace.py).

Results are fractions and equal on every rank, since plans are compared by hash. Products without weights (attention
scores) are omitted: they depend on lengths, and affect all attention branches equally.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction

from torch import nn

from sdp_deepspeed.architectures.cells import form
from sdp_deepspeed.architectures.examples import has_sequences, takes_images
from sdp_deepspeed.architectures.streams import layer_of
from sdp_deepspeed.architectures.trace import Node, Trace
from sdp_deepspeed.messages import KEY

Passes = Sequence[tuple[Trace, str]]  # each with the prefix of its names
PassOfLayer = Mapping[str, tuple[Trace, str]]


def count_flops(model: nn.Module, traced: Passes, layers: PassOfLayer, problem: str) -> dict[str, Fraction]:
    """FLOPs per parameter element, by dense name: twice the number of positions where a matrix or kernel is applied.

    They count per example of the batch. If lengths are unknown (`has_sequences`), they count per token of the layer
    that a weight is in, at most once for each use: a weight of an expert by the share of the tokens that use it, a
    matrix outside of traced layers as one for every token.

    Args:
        model: whole, on any device, including meta.
        layers: the pass in which each layer ran.
        problem: why nothing was traced.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if has_sequences(model) or not traced:
        used = {name: Fraction(parameter.dim() > 1) for name, parameter in parameters.items()} | _per_token(layers)
        if takes_images(model) and not traced:
            _warn(problem)
    else:
        used = _per_example(traced)
    for layer, (of_layer, prefix) in layers.items():
        used |= _equal_in_lists(layer, of_layer.model.get_submodule(layer.removeprefix(prefix)), used)
    first = {parameter: name for name, parameter in model.named_parameters()}  # of tied ones
    return {name: 2 * used.get(first[parameter], Fraction(0)) for name, parameter in parameters.items()}


def _per_example(passes: Passes) -> dict[str, Fraction]:
    """Positions per example at which each weight is applied."""
    used: dict[str, Fraction] = {}
    for traced, prefix in passes:
        shapes = [tensor.shape for _, tensor, _ in traced.calls[""][0].inputs]
        num_examples = next((shape[0] for shape in shapes if shape), 1)
        for node in traced.nodes:
            for name, positions in _positions(traced, node).items():
                used[prefix + name] = used.get(prefix + name, Fraction(0)) + positions / num_examples
    return used


def _per_token(layers: PassOfLayer) -> dict[str, Fraction]:
    """Share of the positions of a layer's stream at which each of its weights is applied, for each call of the layer.
    Positions of another sequence (of keys in cross-attention) count as if it had the same length."""
    used: dict[str, Fraction] = {}
    for layer, (traced, prefix) in layers.items():
        relative = layer.removeprefix(prefix)
        unused = {f"{layer}.{name}" for name, _ in traced.model.get_submodule(relative).named_parameters()}
        used |= dict.fromkeys(unused - used.keys(), Fraction(0))
        for call in traced.calls[relative]:
            found = layer_of(traced.model, traced, relative, call)
            assert found is not None
            shape = found.stream[0].shape
            for node in traced.nodes[call.first : call.last]:
                for name, positions in _positions(traced, node).items():
                    share = min(Fraction(1), positions / math.prod(shape[:-1]))
                    used[prefix + name] = used.get(prefix + name, Fraction(0)) + share
    return used


def _equal_in_lists(name: str, layer: nn.Module, used: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """The mean over modules of one form in a list: which experts tokens use depends on weights."""
    means: dict[str, Fraction] = {}
    for path, listed in layer.named_modules(prefix=name):
        children = {key: form(child) for key, child in listed.named_children() if any(True for _ in child.parameters())}
        if isinstance(listed, nn.ModuleList | nn.ModuleDict) and len({*children.values()}) == 1:
            for parameter, _ in listed.get_submodule(next(iter(children))).named_parameters():
                names = [f"{path}.{key}.{parameter}" for key in children]
                total = sum((used.get(expert, Fraction(0)) for expert in names), Fraction(0))
                means |= dict.fromkeys(names, total / len(names))
    return means


def _positions(traced: Trace, node: Node) -> dict[str, Fraction]:
    """Number of positions at which a node applies each weight."""
    sizes = {name: traced.model.get_parameter(name).numel() for name in node.flops}
    return {name: Fraction(flops, 2 * max(1, sizes[name])) for name, flops in node.flops.items()}


def _warn(problem: str) -> None:
    warnings.warn(
        f"FLOPs per layer could not be counted ({problem}), so units are balanced by weights; a plan of "
        f"your own in {KEY}.assignment may be better",
        stacklevel=5,
    )
