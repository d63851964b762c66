"""Neuron strategy, forward regime: size attributes of the modules of a cut branch, whose weights `Mask` cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import attribute
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
        for path in (*inner.scaled, *([inner.heads] if isinstance(inner.heads, str) else [])):
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
