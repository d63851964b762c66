"""What start-up refuses, by name, before any group is made; it reads the support table (table.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.support.conditions import ELEMENTWISE_OPTIMIZERS, is_elementwise
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
    """Refuse Parameters that lie in the same memory without being one object: each would be averaged and stepped by
    owners of its own, and ranks would drift apart.

    Raises:
        ValueError: by both names.
    """
    places = sorted((_memory(p), index, name) for index, (name, p) in enumerate(model.named_parameters()) if p.numel())
    end, before = 0, ""
    last: tuple[object, ...] = ()
    for (*space, start, stop), _, name in places:
        if tuple(space) == last and start < end:
            raise ValueError(
                f"{KEY}: the Parameters {before!r} and {name!r} lie in the same memory, but are two objects: tie them "
                "by assigning the Parameter itself (`b.weight = a.weight`, not `.data`), or give one of them its own "
                "values (`b.weight = nn.Parameter(a.weight.detach().clone())`)"
            )
        if tuple(space) != last or stop > end:
            end, before, last = stop, name, tuple(space)


def _memory(tensor: Any) -> tuple[str, int, int, int]:
    """Where it lies: device, storage if that has no address, first byte, and the byte after its last."""
    storage = 0 if not tensor.is_meta else tensor.untyped_storage()._cdata
    start = tensor.storage_offset() * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), storage, start, start + elements * tensor.element_size()


def refuse_optimizer(name: str, config: SubnetworkConfig) -> None:
    """Refuse an optimizer that is not known to be elementwise.

    Args:
        name: DeepSpeed's `optimizer.type`, or the class name of a client optimizer.
        config: the block.

    Raises:
        ValueError: it is outside the list, and `allow_optimizer` is not set.
    """
    if not config.allow_optimizer and not is_elementwise(name):
        raise ValueError(
            f"optimizer {name!r} is not known to update each element by itself, and each owner steps a flat part of a "
            f"unit; use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}, or set {KEY}.allow_optimizer to true if yours does"
        )


def _refusal(row: Row, value: Any) -> str:
    note = f"; {row.note}" if row.note else ""
    return f"{row.path}: got {value!r}: {row.what} is not possible with {KEY}{note}"
