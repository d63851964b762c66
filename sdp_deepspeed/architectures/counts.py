"""Attributes of an attention body that are in proportion to the heads that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.architectures.branch import InnerLayers, attribute
from sdp_deepspeed.architectures.cut_tensors import CutTensor
from sdp_deepspeed.architectures.layer_code import names_read


def scaled_attributes(root: nn.Module, inner: InnerLayers) -> tuple[str, ...]:
    """Attribute paths to scale: those described, and the number of heads wherever the body, or the module that the
    description names, has it under this name. Whether the forward pass reads it cannot always be told from its code."""
    if not isinstance(inner.heads, str):
        return inner.scaled
    name, number = _name(inner.heads), attribute(root, inner.heads)
    paths = [*inner.scaled, inner.heads]
    modules = dict(root.named_modules())
    owners = [inner.heads.rsplit(".", level)[0] for level in range(1, inner.heads.count(".") + 1)]
    for prefix in dict.fromkeys(["", *(owner for owner in owners if owner in modules)]):
        module = modules[prefix]
        values = {name: vars(module).get(name)}
        values |= {f"{path}.{name}": getattr(value, name, None) for path, value in _objects_read(module).items()}
        paths += [
            f"{prefix}.{path}".lstrip(".") for path, value in values.items() if type(value) is int and value == number
        ]
    return tuple(dict.fromkeys(paths))


def _objects_read(module: Any) -> dict[str, Any]:
    """Attributes of a module that its methods read and that have attributes themselves, such as configs."""
    names = names_read(module.__class__)
    return {
        name: value
        for name, value in vars(module).items()
        if name in names and hasattr(value, "__dict__") and not isinstance(value, nn.Module)
    }


def refuse_unscaled(root_name: str, root: nn.Module, inner: InnerLayers, cut: Sequence[CutTensor], cells: int) -> None:
    """Raise ValueError for an attribute that the body's code reads, and that seems to be in proportion to the heads but
    is not scaled: the body could take its activations for those of all heads, each of them narrower."""
    widths = {tensor.size * share // sum(tensor.shares) for tensor in cut for share in tensor.shares}
    widths_of_cells = {width // cells for width in widths}
    known = {_name(path) for path in (*inner.scaled, *inner.fixed, f"{inner.heads}")}
    for path, value in _counts_read(root, inner).items() if cells > 1 else ():
        name = _name(path)
        is_number = "head" in name and "dim" not in name and value * min(widths_of_cells) in widths - widths_of_cells
        if (value in widths or is_number) and name not in known:
            raise ValueError(
                f"{root_name}.{path} = {value}: read in forward, as large as the heads' number or width; name it in "
                "`scaled` of its InnerLayers, or in `fixed` if it is neither"
            )


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _counts_read(root: nn.Module, inner: InnerLayers) -> dict[str, int]:
    """Integers of the names that methods of a body's modules read, by attribute path; those of a config as
    `config.NAME`. Cut layers have their sizes set from their weights."""
    values: dict[str, Any] = {}
    cut = {cut.module for cut in inner.cuts}
    for prefix, module in root.named_modules():
        names = names_read(module.__class__) if prefix not in cut else frozenset[str]()
        config = getattr(module, "config", None) if "config" in names else None
        for name in sorted(names):
            values[f"{prefix}.{name}".lstrip(".")] = vars(module).get(name)
            values[f"{prefix}.config.{name}".lstrip(".")] = getattr(config, name, None)
    return {path: value for path, value in values.items() if type(value) is int}
