"""The output of a lacking branch: the neutral element of addition."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

_IN_PLACE = frozenset({"add_", "__iadd__", "sub_", "__isub__"})
_ADDITIONS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_SUBTRACTIONS = frozenset({"sub", "subtract", "__sub__", "sub_", "__isub__"})
# Linear in nothing, which stays nothing, as zero stays zero in the dense model.
_FACTORS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
_QUOTIENTS = frozenset({"div", "divide", "true_divide", "__truediv__", "neg", "negative", "__neg__"})
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d"})
_REFUSED = (
    *("sub", "rtruediv", "matmul", "rmatmul", "pow", "mod", "pos"),
    *("abs", "floordiv", "rfloordiv", "rmod", "rpow", "and", "or", "round", "eq", "ne", "lt", "le", "gt", "ge"),
    *("getitem", "setitem", "iter", "len", "bool", "float", "int"),
)

_OF_TUPLES = ("__iter__", "__getitem__", "__len__")


class Nothing:
    """What any tensor can be added to: `x + nothing` is `x` itself, at no cost, or its copy.

    What keeps a zero a zero keeps nothing as it is: a factor, a divisor, a sign, dropout, another dtype, which layers
    apply to a branch on its way to the addition. All else is an error that says what to write instead.

    Args:
        branch: that lacks, for messages.
        copies: make `x + nothing` a copy of `x`, for a model that may change it in place.
    """

    __slots__ = ("_branch", "_copies")

    def __init__(self, branch: str, *, copies: bool = False) -> None:
        self._branch = branch
        self._copies = copies

    def handed_on(self, value: Any) -> Any:
        """What a lacking branch gives back of its input."""
        return value.clone() if self._copies and isinstance(value, torch.Tensor) else value

    __add__ = __radd__ = __rsub__ = handed_on

    def unchanged(self, *_: Any, **__: Any) -> Nothing:
        """What a factor, a divisor or another dtype makes of it."""
        return self

    __mul__ = __rmul__ = __truediv__ = __neg__ = unchanged
    to = type = float = double = half = bfloat16 = contiguous = unchanged

    def __repr__(self) -> str:
        return f"<nothing: this rank lacks {self._branch}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # whoever asks for that tries what we are
            raise AttributeError(name)
        raise AttributeError(self._refusal(f".{name}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        named = kwargs or {}
        values = (*args, *named.values())
        nothing = next((leaf for leaf in tree_leaves(values) if isinstance(leaf, cls)), None)
        if nothing is None:
            raise TypeError(name)
        first, is_new = isinstance(values[0], cls), named.get("out") is None
        if (name in _ADDITIONS or (name in _SUBTRACTIONS and not first)) and is_new and named.get("alpha", 1) == 1:
            other = next((value for value in values[:2] if not isinstance(value, cls)), nothing)
            return other if name in _IN_PLACE else nothing.handed_on(other)
        if is_new and (name in _FACTORS or (first and name in _QUOTIENTS | _DROPOUTS)):
            return nothing
        # PyTorch takes a TypeError of `x *= nothing` for leave to compute `x = x * nothing`.
        raise (RuntimeError if name.endswith("_") else TypeError)(nothing._refusal(name))

    def _refusal(self, what: str) -> str:
        tuples = "A body that returns a tuple needs `num_outputs` in its Branch. " if what in _OF_TUPLES else ""
        return (
            f"{self._branch}: this rank lacks the branch, so its output can only be added, scaled, dropped or cast, "
            f"and {what!r} was asked of it. {tuples}Whatever else lies between the branch's body and the addition must "
            "be a submodule of the layer, named in the branch's `after` (sdp_deepspeed/architectures/README.md); hooks "
            "must let pass what is no tensor"
        )


def _refusing(name: str) -> Any:
    def refuse(self: Nothing, *_: Any) -> NoReturn:
        raise TypeError(self._refusal(name))

    return refuse


for _name in _REFUSED:
    setattr(Nothing, f"__{_name}__", _refusing(f"__{_name}__"))
