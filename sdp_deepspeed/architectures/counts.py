"""Attributes of an attention body that are in proportion to the heads that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.architectures.branch import InnerLayers
from sdp_deepspeed.architectures.cut_tensors import CutTensor
from sdp_deepspeed.architectures.own_forward import names_read


def scaled_attributes(root: nn.Module, inner: InnerLayers) -> tuple[str, ...]:
    """Attribute paths to scale: those described, and the number of heads where the body reads it."""
    heads = [path for path in _counts_read(root, inner) if path == inner.heads or path == _name(inner.heads or "")]
    return tuple(dict.fromkeys((*inner.scaled, *heads)))


def refuse_unscaled(root_name: str, root: nn.Module, inner: InnerLayers, cut: Sequence[CutTensor], cells: int) -> None:
    """Raise ValueError for an attribute that the body's code reads, and that seems to be in proportion to the heads but
    is not scaled: the body could take its activations for those of all heads, each of them narrower."""
    widths = {tensor.size * share // sum(tensor.shares) for tensor in cut for share in tensor.shares}
    widths_of_cells = {width // cells for width in widths}
    known = {_name(path) for path in (*inner.scaled, *inner.fixed, inner.heads or "")}
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
