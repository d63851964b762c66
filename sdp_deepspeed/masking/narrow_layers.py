"""Neuron strategy, forward regime: stock layers with fewer rows and columns, and their size attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import attribute
from sdp_deepspeed.architectures.counts import scaled_attributes
from sdp_deepspeed.masking.absent_blocks import around
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward
from sdp_deepspeed.masking.split_layers import set_sizes


class _NarrowConfig(SimpleNamespace):
    """A view of a shared config, with a layer's own counts."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_sdp"):  # during copying
            raise AttributeError(name)
        return getattr(self._sdp_config, name)


@dataclass(frozen=True)
class Sizes:
    """Size attributes of the modules of a branch, with the dense model's values.

    Args:
        counts: attributes in proportion to the number of cells, by module and name.
        configs: objects with attributes in proportion to the number of cells, such as configs, with these attributes,
            by module and the object's name.
    """

    layers: tuple[nn.Module, ...]
    counts: Mapping[tuple[nn.Module, str], int]
    configs: Mapping[tuple[nn.Module, str], tuple[Any, Mapping[str, int]]]

    @classmethod
    def of(cls, model: nn.Module, branch: LocatedBranch) -> Sizes:
        """Read the attributes of a dense branch."""
        inner, root = branch.description.inner, model.get_submodule(branch.root)
        assert inner is not None
        layers = dict.fromkeys(model.get_submodule(t.parameter.rpartition(".")[0]) for t in branch.cut_tensors)
        counts: dict[tuple[nn.Module, str], int] = {}
        configs: dict[tuple[nn.Module, str], tuple[Any, dict[str, int]]] = {}
        for path in scaled_attributes(root, inner):
            owner, _, name = path.rpartition(".")
            parent, _, last = owner.rpartition(".")
            if owner and not isinstance(value := attribute(root, owner), nn.Module):
                module = root.get_submodule(parent)
                configs.setdefault((module, last), (value, {}))[1][name] = attribute(root, path)
            else:
                counts[root.get_submodule(owner), name] = attribute(root, path)
        return cls(tuple(layers), counts, configs)

    def set(self, held: int, total: int) -> None:
        """Set the attributes for `held` of `total` cells."""
        for layer in self.layers:
            set_sizes(layer)
        for (module, name), count in self.counts.items():
            setattr(module, name, count * held // total)
        for (module, name), (config, counts) in self.configs.items():
            counts_of_rank = {key: count * held // total for key, count in counts.items()}
            vars(module)[name] = config if held == total else _NarrowConfig(_sdp_config=config, **counts_of_rank)


@dataclass(frozen=True)
class HeldHeads:
    """State of the forward of a body with some of the heads.

    Args:
        by_head: keyword arguments with the model's heads along dim 1.
        num_outputs, extra_outputs: see `Branch`.
    """

    heads: tuple[int, ...]
    num_heads: int
    by_head: tuple[str, ...]
    num_outputs: int
    extra_outputs: tuple[str, ...]


def select_heads(body: nn.Module, branch: LocatedBranch, heads: Sequence[int]) -> None:
    """Make a body select the held heads from its arguments."""
    description = branch.description
    assert description.inner is not None
    by_head, further = description.inner.by_head, description.extra_outputs
    state = HeldHeads(tuple(heads), branch.num_cells, by_head, description.num_outputs, further)
    replace_forward(body, _run_held_heads, state)


def _run_held_heads(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    state: HeldHeads = forward.state
    selected = dict(kwargs)
    for name in state.by_head:
        if isinstance(value := kwargs.get(name), torch.Tensor):
            heads = value.unflatten(1, (state.num_heads, -1))
            selected[name] = torch.cat([heads[:, head] for head in state.heads], 1)
    output = forward.previous(*args, **selected)
    first = output[0] if state.num_outputs > 1 else output
    return around(first, state.num_outputs, state.extra_outputs, kwargs)
