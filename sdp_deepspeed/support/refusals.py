"""What start-up refuses, by name, before any group is made; it reads the support table (table.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.support.optimizers import ELEMENTWISE_OPTIMIZERS, is_known
from sdp_deepspeed.support.rows import Row
from sdp_deepspeed.support.table import matching_rows


def refuse_unsupported(config: SubnetworkConfig, ds_config: Mapping[str, Any]) -> None:
    """Refuse, by name, what is not supported together with the block.

    Args:
        config: the parsed block.
        ds_config: the whole DeepSpeed config, loaded.

    Raises:
        ValueError: all unsupported things, each with its JSON path.
    """
    lines = [_refusal(row, value) for row, value in matching_rows(config, ds_config) if row.state == "refused"]
    if len(lines) == 1:
        raise ValueError(lines[0])
    if lines:
        raise ValueError(f"{KEY} does not support {len(lines)} settings:\n" + "\n".join(f"  {line}" for line in lines))


def without_effect(config: SubnetworkConfig, ds_config: Mapping[str, Any]) -> list[str]:
    """Notes about hints to DeepSpeed's own reduction that differ from its defaults and have no effect here."""
    return [
        f"{row.path}: got {value!r}: {row.what}: no effect with {KEY}; {row.note}"
        for row, value in matching_rows(config, ds_config)
        if row.state == "no effect"
    ]


def refuse_modules(model: Any) -> None:
    """Refuse a module whose gradients the exchange could not carry; no config says that a model has one.

    Raises:
        ValueError: by the module's name.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{KEY}: {name!r} ({type(module).__name__}) makes sparse gradients, which is not possible with {KEY}; "
                "build it with sparse=False"
            )
        if "deepspeed.moe.layer" in {base.__module__ for base in type(module).__mro__}:
            raise ValueError(
                f"{KEY}: {name!r} is a mixture of experts of DeepSpeed's, whose expert parallelism is not possible here"
            )


def refuse_shared_memory(model: Any) -> None:
    """Refuse Parameters that have elements in common without being one object: each would be averaged and stepped by
    owners of its own, and ranks would drift apart. What nobody trains may share.

    Raises:
        ValueError: by both names.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
    places = sorted((*_extent(p), index, name) for index, (name, p) in enumerate(parameters.items()))
    before: list[Any] = []  # that reach to where the next one begins, or beyond
    for *space, start, stop, _, name in places:
        before = [other for other in before if other[0] == space and other[1] > start]
        for *_, other_name in before:
            pair = parameters[other_name], parameters[name]
            if any(parameter.requires_grad for parameter in pair) and _overlap(*pair):
                raise ValueError(
                    f"{KEY}: the Parameters {other_name!r} and {name!r} lie in the same memory, but are two objects: "
                    "tie them by assigning the Parameter itself (`b.weight = a.weight`, not `.data`), or give one of "
                    "them its own values (`b.weight = nn.Parameter(a.weight.detach().clone())`)"
                )
        before.append((space, stop, name))


def _extent(tensor: Any) -> tuple[str, int, int, int]:
    """Device, storage if that has no address, first byte, and the byte after the last."""
    storage = 0 if not tensor.is_meta else tensor.untyped_storage()._cdata
    start = tensor.storage_offset() * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), storage, start, start + elements * tensor.element_size()


def _overlap(one: Any, other: Any) -> bool:
    """Whether tensors whose extents overlap have bytes in common; views may lie between each other's elements."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    import torch  # here: the table is read without it

    extents = _extent(one), _extent(other)
    first = min(extent[2] for extent in extents)
    bytes_ = torch.zeros(max(extent[3] for extent in extents) - first, dtype=torch.bool, device="cpu")
    for tensor, extent in zip((one, other), extents, strict=True):
        size = tensor.element_size()
        strides = (*(stride * size for stride in tensor.stride()), 1)
        view = bytes_.as_strided((*tensor.shape, size), strides, extent[2] - first)
        if view.any():
            return True
        view.fill_(True)
    return False


def refuse_optimizer(kind: str | type[Any], config: SubnetworkConfig) -> None:
    """Refuse an optimizer of which nobody knows what it must see of a tensor.

    Args:
        kind: DeepSpeed's `optimizer.type`, or the class of a client optimizer.
        config: the block.

    Raises:
        ValueError: it is outside the lists, and `allow_optimizer` is not set.
    """
    if not config.allow_optimizer and not is_known(kind):
        name = kind if isinstance(kind, str) else kind.__name__
        home = "" if isinstance(kind, str) else f" of {kind.__module__}"
        raise ValueError(
            f"optimizer {name!r}{home} is not known to update each element, or each tensor, by itself, and ranks own "
            f"parts of a unit; use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}, PyTorch's or DeepSpeed's Muon, "
            f"Adafactor, Lamb, or set {KEY}.allow_optimizer to true if yours updates each element by itself, to "
            '"whole_tensors" if it updates each tensor by itself'
        )


def _refusal(row: Row, value: Any) -> str:
    note = f"; {row.note}" if row.note else ""
    return f"{row.path}: got {value!r} ({row.what}), which is not possible with {KEY}{note}"
