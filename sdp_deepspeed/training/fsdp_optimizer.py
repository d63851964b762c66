"""The optimizer that a DeepSpeed config names, as one of torch's, for `--host fsdp2`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.messages import did_you_mean

if TYPE_CHECKING:
    import torch

_HOW = ("lr", "weight_decay", "foreach", "fused", "maximize")
_OPTIONS = {
    "Adam": (*_HOW, "betas", "eps", "amsgrad"),
    "AdamW": (*_HOW, "betas", "eps", "amsgrad"),
    "SGD": (*_HOW, "momentum", "dampening", "nesterov"),
}
# Of DeepSpeed's Adam: which implementation it takes, and which of both methods.
_OF_DEEPSPEED = ("torch_adam", "adam_w_mode", "bias_correction")


@dataclass(frozen=True)
class OptimizerChoice:
    """
    Args:
        kind: of torch.optim.
        options: of its constructor.
    """

    kind: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> OptimizerChoice:
        """
        Args:
            section: `optimizer` of a DeepSpeed config. As there "Adam" means AdamW, unless `adam_w_mode` is false, and
                weights decay by 0 if it does not say more, but with `torch_adam` by torch's own default.

        Raises:
            ValueError: another optimizer, or an option that torch's does not have.
        """
        name, params = section.get("type"), dict(section.get("params") or {})
        kind = {"adam": "Adam", "adamw": "AdamW"}.get(str(name).lower(), name)
        if kind not in _OPTIONS:
            got = "there is none" if name is None else f"got {name!r}"
            raise ValueError(f"optimizer.type: {got}, expected Adam, AdamW or SGD (others: --host deepspeed)")
        if kind != "SGD":
            kind = _adam(kind, params)
        for option in params:
            if option not in _OPTIONS[kind]:
                raise ValueError(f"optimizer.params.{option}: torch.optim.{kind} here: {_words(option, kind)}")
        return cls(kind, params)

    def build(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """
        Raises:
            ValueError: a value that torch's optimizer refuses.
        """
        import torch

        try:
            optimizer: torch.optim.Optimizer = getattr(torch.optim, self.kind)(groups, **self.options)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ValueError(f"optimizer.params: torch.optim.{self.kind} refuses them: {problem}") from None
        return optimizer


def _adam(kind: str, params: dict[str, Any]) -> str:
    """Which of both it is; takes out of the options what only DeepSpeed's has."""
    is_torch, is_adamw, corrects = (params.pop(name, name != "torch_adam") for name in _OF_DEEPSPEED)
    if corrects is not True:
        raise ValueError("optimizer.params.bias_correction: got false, and torch's Adam always corrects it; remove it")
    if not is_torch:
        params.setdefault("weight_decay", 0.0)
    return "AdamW" if kind == "AdamW" or is_adamw else "Adam"


def _words(option: str, kind: str) -> str:
    return did_you_mean(option, _OPTIONS[kind])
