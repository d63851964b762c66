"""What a checkpoint says of an optimizer beside its tensors: its kind, its param groups' options and step counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Counts = Mapping[str, float]
# Optimizers that keep the same state for an element, so that one goes on with another's.
_ALIKE = {
    "AdamW": "Adam",
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "DeepSpeedCPUAdagrad": "Adagrad",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
}


def kind_of(optimizer: Any) -> str:
    """Of those that keep the same state."""
    name = type(optimizer).__name__
    return _ALIKE.get(name, name)


def refuse_another_kind(metadata: Mapping[str, Any], optimizer: Any) -> None:
    """ValueError if the state that was saved is of another kind of optimizer; who does not say it is of this one."""
    here = kind_of(optimizer)
    if (kind := metadata.get("kind", here)) != here:
        raise ValueError(
            f"checkpoint: its optimizer state is of {kind}, and the optimizer here is {here}; load it with "
            "load_optimizer_states=False, or train with the optimizer that wrote it"
        )


def as_optimizer_counts(optimizer: Any, counts: Counts | None) -> dict[str, Any]:
    """PyTorch's optimizers count in tensors, DeepSpeed's in integers, others as they did when they were saved."""
    home = type(getattr(optimizer, "aux_optimizer", None) or optimizer).__module__  # Muon counts in its Adam only
    if home.startswith("deepspeed"):
        return {key: int(value) for key, value in (counts or {}).items()}
    keeps = not home.startswith("torch.")
    return {k: v if keeps and isinstance(v, int) else _count(v) for k, v in (counts or {}).items()}


def _count(value: float) -> torch.Tensor:
    """As PyTorch's optimizers count: exact also where the user's default is a dtype of 16 bits."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def highest(values: Sequence[Any]) -> float:
    """The host waits once for all: with a fused kernel each tensor has its count on the GPU. An integer stays one."""
    if all(map(torch.is_tensor, values)):
        return float(torch.stack([value.to(values[0].device).reshape(()) for value in values]).max())
    result = max(values)
    return result if isinstance(result, int) else float(result)


def counts_of(name: str, metadata: Mapping[str, Any]) -> Counts:
    """Of one dense tensor; none if no optimizer had it."""
    group = metadata["groups"].get(name)
    return {} if group is None else metadata["counts"][group] or {}


def same_counts(counts: Sequence[Counts], names: Sequence[str]) -> dict[str, float] | None:
    """Those that all of `names` have; ValueError if they differ."""
    common = same({tuple(sorted(of_tensor.items())) for of_tensor in counts}, names, "step counts")
    return None if common is None else dict(common)


def same(values: set[Any], names: Sequence[str], what: str) -> Any:
    """The one value; ValueError if there are several."""
    if len(values) > 1:
        raise ValueError(
            f"checkpoint: {what} of {names[0]!r} and others of its optimizer param group are not alike in it (some "
            "were frozen, or in another group); load it with load_optimizer_states=False, or use its param groups"
        )
    return next(iter(values), None)
