"""Placeholders for partial tensors in state dicts of a subnetwork, which raise when used."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, cast

import torch

T = TypeVar("T", bound="PartialTensor")


class PartialTensor(torch.Tensor):
    """Placeholder in a state dict for a tensor that this rank holds in part, or not at all.

    Creating a state dict does not raise, since hosts create some that nobody reads. Reading, copying or saving this
    tensor raises RuntimeError.
    """

    _refusal: str

    @classmethod
    def of(cls: type[T], refusal: str) -> T:
        """Create a placeholder that raises with this message."""
        made: Any = torch.empty(0, device="meta").as_subclass(cls)
        made._refusal = refusal
        return cast(T, made)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._refusal)

    __reduce_ex__ = __deepcopy__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        every = torch.utils._pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in every if isinstance(leaf, cls))._refuse()
        raise AssertionError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._refusal}>"
