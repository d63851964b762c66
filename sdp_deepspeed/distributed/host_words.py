"""What errors about the dense model tell people to call: each host spells it in its own way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostWords:
    """DeepSpeed's, unless the host says otherwise.

    Args:
        view: in which every forward pass is the dense model's.
        alone: what to do for generation, or whatever one rank does alone.
        save: what writes the model.
        differentiate: another way than without gradients, after the first.
        inner: another way than the whole model's forward pass, after the first.
        order: what to do where ranks run parts in different orders.
    """

    view: str = "engine.dense()"
    alone: str = "let all ranks enter engine.dense(resident=True), inside which each has the whole model"
    save: str = "engine.save_pretrained"
    differentiate: str = ", or engine.dense(resident=True) with torch.autograd.grad"
    inner: str = ", or inner modules on every rank inside engine.dense(resident=True)"
    order: str = "evaluate inside `with engine.dense(resident=True):`"


DEEPSPEED = HostWords()
