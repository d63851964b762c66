"""The layers of a body that are cut: they leave the module tree, and come back for the dense model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.masking.part import replace_data


class SharedBias(nn.Module):
    """Stands in the place of an output projection whose weight is in pieces: it has the bias, which the sum adds."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the weight of this layer is in pieces: it runs in the dense model only")


class WholeLayers:
    """What is cut of a body.

    Layers without anything left are no children of the body any more, so that who goes through its modules (to
    initialize them, say) meets none without a weight.

    Args:
        body: whole.
        cut: by path in the body the dense names of parameters that are cut.
    """

    def __init__(self, body: nn.Module, cut: Mapping[str, str]) -> None:
        self._body = body
        self._cut = dict(cut)
        self._trainable = {path: body.get_parameter(path).requires_grad for path in cut}
        self.shapes = {name: body.get_parameter(path).shape for path, name in cut.items()}
        owners = dict.fromkeys(path.rpartition(".")[0] for path in cut)
        self._layers = {path: body.get_submodule(path) for path in owners if path}
        self._classes: dict[str, type[nn.Module]] = {}
        # What such a layer has besides is an output's bias.
        self.bias_paths = [
            f"{path}.{name}"
            for path, layer in self._layers.items()
            for name, _ in layer.named_parameters()
            if f"{path}.{name}" not in cut
        ]
        parents = {path.rpartition(".")[0] for path in self._layers}
        self._orders = {parent: [name for name, _ in body.get_submodule(parent).named_children()] for parent in parents}

    def biases(self) -> list[torch.Tensor]:
        """Of output projections, as they are now."""
        return [self._body.get_parameter(path) for path in self.bias_paths]

    def remove(self) -> None:
        """Take what is cut out of the body; whoever still knows the parameters finds them empty."""
        for path in self._cut:
            owner, _, name = path.rpartition(".")
            layer = self._body.get_submodule(owner)
            drop(layer.get_parameter(name))
            layer.register_parameter(name, None)
        kept = {path.rpartition(".")[0] for path in self.bias_paths}
        for path, layer in self._layers.items():
            parent, _, name = path.rpartition(".")
            if path in kept:
                self._classes[path] = type(layer)
                layer.__class__ = SharedBias
            else:
                delattr(self._body.get_submodule(parent), name)

    def give(self, values: Mapping[str, torch.Tensor]) -> None:
        """Put it back, with whole parameters by dense name."""
        for path, kind in self._classes.items():
            self._layers[path].__class__ = kind
        for path, layer in self._layers.items():
            parent, _, name = path.rpartition(".")
            self._body.get_submodule(parent)._modules[name] = layer
        for parent, order in self._orders.items():
            modules = self._body.get_submodule(parent)._modules
            ordered = {name: modules[name] for name in (*order, *modules) if name in modules}
            modules.clear()
            modules.update(ordered)
        for path, dense_name in self._cut.items():
            owner, _, name = path.rpartition(".")
            parameter = nn.Parameter(values[dense_name], requires_grad=self._trainable[path])
            self._body.get_submodule(owner).register_parameter(name, parameter)


def drop(parameter: torch.Tensor) -> None:
    """Give its storage back."""
    replace_data(parameter, torch.empty(0, dtype=parameter.dtype, device=parameter.device))
