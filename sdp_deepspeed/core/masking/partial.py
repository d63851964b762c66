"""State dicts of a subnetwork: what a rank has a part of raises as soon as anybody uses it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class PartialTensor(torch.Tensor):
    """Stands in a state dict for a tensor that this rank has a part of, or nothing. Hosts take state dicts that nobody
    reads; whoever reads, copies or saves this one gets a RuntimeError."""

    _name: str

    @classmethod
    def of(cls, name: str) -> PartialTensor:
        made: PartialTensor = torch.empty(0, device="meta").as_subclass(cls)
        made._name = name
        return made

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._name}: this rank does not hold all of it, so the state dict is partial; take it inside `with "
            "engine.dense():` on every rank, or use engine.save_checkpoint or engine.save_pretrained"
        )

    __reduce_ex__ = __deepcopy__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        every = torch.utils._pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in every if isinstance(leaf, cls))._refuse()
        raise AssertionError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<partial {self._name}>"
