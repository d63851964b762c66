"""What is mixed into the classes of a masked module's modules, and how a copy of such a module is one of its own.

A copy (`copy.deepcopy`, and so `torch.optim.swa_utils.AveragedModel`) has the weights that the module has at that
moment, and nothing that leads back to the original: no view, no part, no hook of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from sdp_deepspeed.masking.own_forward import settle_forward

CUT = "_sdp_cut"  # attribute of a model of which ranks hold parts only, and of its modules of which they do
_LEADS_BACK = ("_sdp_view", "_sdp_part", "_sdp_export")  # attributes of a module that know the model
_OWN = (*_LEADS_BACK, "_sdp_outputs", "_sdp_nothing")
_MIXED: WeakValueDictionary[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = WeakValueDictionary()


def mixed_in(mixin: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """A class like `base`, with its name, whose `mixin` comes first; one for each pair, as long as it is used."""
    if (mixed := _MIXED.get((mixin, base))) is None:
        mixed = type(base.__name__, (mixin, base), {"__module__": base.__module__})
        _MIXED[mixin, base] = mixed
    return mixed


def unmixed(kind: type[nn.Module]) -> type[nn.Module]:
    """Inverse of `mixed_in`, however often it was used."""
    while kind in _MIXED.values():
        kind = kind.__bases__[1]
    return kind


def unmix(model: nn.Module) -> None:
    """Make all modules of the classes that they were before anything was mixed in, and forget what was noted on them;
    their hooks stay."""
    for module in model.modules():
        kind = unmixed(type(module))
        if kind is not type(module):
            module.__class__ = kind
        for name in (*_OWN, CUT):
            vars(module).pop(name, None)


def changed_classes(model: nn.Module) -> list[str]:
    """Names of modules into whose class somebody else mixed another after us, so that `unmix` could not."""
    return [name or "the model" for name, module in model.named_modules() if issubclass(unmixed(type(module)), Mixin)]


def mix_in(mixin: type[nn.Module], module: nn.Module) -> None:
    """Have the `forward` of `mixin` come first when a module runs."""
    settle_forward(module)
    module.__class__ = mixed_in(mixin, type(module))


def is_cut(model: nn.Module) -> bool:
    """Whether ranks hold only parts of it, or of a module in it."""
    return any(CUT in vars(module) for module in model.modules())


class Mixin(nn.Module):
    """Base of what is mixed in."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        for name in _LEADS_BACK:
            if name in vars(self):
                memo[id(vars(self)[name])] = _ORIGINAL
        inherited = getattr(super(), "__deepcopy__", None)
        copied: nn.Module = _copy(self, memo) if inherited is None else inherited(memo)
        for name in _OWN:
            vars(copied).pop(name, None)
        copied.__class__ = unmixed(type(self))
        self._sdp_finish(copied)
        return copied

    def _sdp_finish(self, copied: nn.Module) -> None:
        """Make a plain copy what it must be."""


class Copied:
    """The part of a branch's modules in a copy of a subnetwork, which never is the dense model."""

    dense = False


_ORIGINAL = object()  # stands in a copy for what belongs to the original


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """As `copy.deepcopy` copies a module that does not say how."""
    reduced: Any = module.__reduce_ex__(4)
    rebuild, args, state = reduced[:3]
    copied: nn.Module = rebuild(*args)
    memo[id(module)] = copied
    copied.__setstate__(deepcopy(state, memo))
    return copied


class Hook:
    """A hook of a module that its copies do not have."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook


def no_hook(*args: Any) -> None:
    """What a copy has instead."""


class RefusePartial:
    """A hook after state dicts of a module that is not whole here: what they have of it is refused when it is used.

    Not before, since hosts take state dicts that they throw away (Lightning's callbacks, say).

    Args:
        name: of its part, for the message.
        is_dense: whether it is whole for the moment.
        way: what to do instead.
    """

    def __init__(self, name: str, is_dense: Callable[[], bool], way: str) -> None:
        self._name = name
        self._is_dense = is_dense
        self._way = way

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._is_dense():
            return
        text = f"this rank does not hold all of {self._name}, so its state dict would be partial. {self._way}"
        for name in (*module._parameters, *module._buffers):
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = PartialTensor.of(text)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook if self._is_dense() else RefusePartial(self._name, never, _WAY_OF_A_COPY)


class PartialTensor(torch.Tensor):
    """Stands in a state dict for a tensor that this rank has a part of, or nothing: whatever is done with it raises."""

    _refusal: str

    @classmethod
    def of(cls, refusal: str) -> PartialTensor:
        """One that raises RuntimeError with this text."""
        made: PartialTensor = torch.empty(0, dtype=torch.float32, device="meta").as_subclass(cls)
        made._refusal = refusal
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        leaves = tree_leaves((args, kwargs))
        raise RuntimeError(next(leaf for leaf in leaves if isinstance(leaf, cls))._refusal)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._refusal}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(self._refusal)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(self._refusal)


_WAY_OF_A_COPY = (
    "It is a copy of a subnetwork: for a whole one copy engine.module inside `with engine.dense(resident=True):`, on "
    "every rank"
)


def never() -> bool:
    """A copy is not the dense model for a while."""
    return False
