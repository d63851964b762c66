"""Optimizers that update each tensor by itself: DeepSpeed's Muon, PyTorch's Adafactor, and small ones of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.optimization import Adafactor

Groups = Sequence[dict[str, Any]]


def deepspeeds_muon() -> type[Any]:
    """Its class, which nothing else needs to import."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    kind: type[Any] = MuonWithAuxAdam
    return kind


def muon(groups: Groups, *, ns_method: str = "gram", **adam: Any) -> torch.optim.Optimizer:
    """DeepSpeed's, with matrices in the groups that decay. Its default iteration, which is fp32 on a CPU."""
    given = []
    for group in groups:
        if all(parameter.dim() > 1 for parameter in group["params"]):
            given.append(dict(group) | {"use_muon": True, "lr": 0.02, "ns_method": ns_method})
        else:
            given.append(dict(group) | {"use_muon": False, "lr": 1e-2, "eps": 1e-4})
    made: torch.optim.Optimizer = deepspeeds_muon()(given, **adam)
    return made


def muon_and_torch_adam(groups: Groups) -> torch.optim.Optimizer:
    """As DeepSpeed builds it from JSON with `torch_adam`."""
    return muon(groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"foreach": None})


class Lamb(torch.optim.Optimizer):
    """Adam whose step has the length of the tensor."""

    def __init__(self, params: Any, lr: float = 1e-2, max_grad_norm: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "average": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
                state["step"] += 1
                state["average"].lerp_(parameter.grad, 0.1)
                state["square"].lerp_(parameter.grad.square(), 0.01)
                mean, square = (
                    state[key] / (1 - beta ** state["step"]) for key, beta in (("average", 0.9), ("square", 0.99))
                )
                update = mean / (square.sqrt() + 1e-4) + group["weight_decay"] * parameter
                parameter.sub_(update * (parameter.norm() / update.norm()), alpha=group["lr"])


class Momentum8bit(torch.optim.Optimizer):
    """Momentum that is kept in 8 bits, in blocks of five elements of a tensor with a scale each, and a table that all
    tensors have, as bitsandbytes' optimizers keep theirs."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        table = torch.arange(256).sub(127) / 128
        for group in self.param_groups:
            for parameter in group["params"]:
                size, state = parameter.numel(), self.state[parameter]
                if not state:
                    codes = torch.full_like(parameter, 127, dtype=torch.uint8)
                    state |= {"step": 0, "codes": codes, "scales": torch.zeros(-(-size // 5)), "table": table}
                assert state["codes"].dtype == torch.uint8  # a kernel reads bytes
                state["step"] += 1
                scales = state["scales"].repeat_interleave(5)[:size]
                average = state["table"][state["codes"].view(-1).int()] * scales
                average = 0.9 * average + parameter.grad.reshape(-1)
                padded = torch.nn.functional.pad(average, (0, -size % 5)).view(-1, 5)
                state["scales"] = padded.abs().amax(1)
                codes = (127 * padded / state["scales"].clamp(min=1e-30)[:, None]).round().add(127).to(torch.uint8)
                state["codes"] = codes.view(-1)[:size].view(parameter.shape)
                parameter.sub_(average.view(parameter.shape), alpha=group["lr"])


WHOLE_TENSORS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "Muon": muon,
    "Muon+AdamW": muon_and_torch_adam,
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "Transformers' Adafactor": lambda groups: Adafactor(groups, lr=1e-2, relative_step=False),
    "Lamb": Lamb,
    "Momentum8bit": Momentum8bit,
}
