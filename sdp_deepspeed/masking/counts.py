"""What the modules of a narrowed body say of their sizes: widths of layers, numbers of heads and neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import BATCH_NORMS, CONVOLUTIONS, attribute
from sdp_deepspeed.plan.tensors import named_tensors

_OF_LAYERS = (".weight", ".running_mean")  # batch norms may have no weights


class NarrowConfig:
    """A config that layers share, with other counts for one of them."""

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        self.__dict__.update(counts)
        self.__dict__["_sdp_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name == "_sdp_config" or name.startswith("__"):  # it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["_sdp_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_sdp_config"], name, value)


class Counts:
    """The counts of a branch's bodies; those of the dense model when it is made.

    Args:
        branch: whose neurons or heads are cut.
        bodies: the modules that do its work, whole.
    """

    def __init__(self, branch: LocatedBranch, bodies: Sequence[nn.Module]) -> None:
        inner = branch.description.inner
        assert inner is not None, "units of neurons come from a description of them"
        self._first = branch.cut_tensors[0]
        self._parameter = place(branch, self._first.parameter.removeprefix(branch.root).removeprefix("."))
        paths = (tensor.cut.module for tensor in branch.cut_tensors if tensor.parameter.endswith(_OF_LAYERS))
        self._layers = list(dict.fromkeys(place(branch, path) for path in paths))
        self._depthwise = [place for place in self._layers if _groups(bodies[place[0]].get_submodule(place[1])) > 1]
        places = [place(branch, path) for path in inner.scaled]
        self._dense = {(body, path): attribute(bodies[body], path) for body, path in places}
        self._configs = {body: attribute(bodies[body], "config") for body, path in places if path.startswith("config.")}

    def set(self, bodies: Sequence[nn.Module]) -> None:
        """Make what `bodies`, or copies of them, say of their sizes true."""
        for body, path in self._layers:
            layer = bodies[body].get_submodule(path)
            _set_sizes(layer)
            if (body, path) in self._depthwise:
                layer.groups = layer.in_channels = layer.out_channels
        body, path = self._parameter
        width = named_tensors(bodies[body])[path].shape[self._first.dim]
        counts = {key: count * width // self._first.size for key, count in self._dense.items()}
        for (body, path), count in counts.items():
            if not path.startswith("config."):
                owner, _, name = path.rpartition(".")
                setattr(bodies[body].get_submodule(owner), name, count)
        for body, config in self._configs.items():
            own = {
                path.removeprefix("config."): n for (b, path), n in counts.items() if b == body and "config." in path
            }
            is_whole = width == self._first.size
            bodies[body].__dict__["config"] = config if is_whole else NarrowConfig(config, own)


def place(branch: LocatedBranch, path: str) -> tuple[int, str]:
    """Which of a branch's bodies a path of its description's `inner` is in, and the path from there."""
    for index, body in enumerate(branch.bodies):
        inside = body.removeprefix(branch.root).removeprefix(".")
        if not inside or f"{path}.".startswith(f"{inside}."):
            return index, path.removeprefix(inside).removeprefix(".")
    raise ValueError(
        f"{branch.name}: {path!r} is in none of {list(branch.description.bodies)}: correct its description"
    )


def _groups(layer: Any) -> int:
    return layer.groups if isinstance(layer, CONVOLUTIONS) else 1


def _set_sizes(layer: Any) -> None:
    """Linear layers and convolutions say how wide they are, batch norms how many features they have; Conv1D computes
    with it."""
    if isinstance(layer, BATCH_NORMS):
        layer.num_features = len(layer.running_mean if layer.weight is None else layer.weight)
    elif isinstance(layer, CONVOLUTIONS):
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    elif hasattr(layer, "nf"):
        layer.nx, layer.nf = layer.weight.shape
    elif hasattr(layer, "out_features"):
        layer.out_features, layer.in_features = layer.weight.shape
