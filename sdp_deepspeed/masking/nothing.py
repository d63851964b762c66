"""The output of a lacking branch: the neutral element of addition."""

from __future__ import annotations

from functools import partial
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
_RECTIFIERS = frozenset({"relu", "relu_"})
# What gives the elements other places: windows, images in place of tokens.
_MOVES = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
        *("transpose", "permute", "movedim", "roll", "flip", "narrow"),
    }
)
_FACTS = ("shape", "dtype", "device", "ndim", "size", "dim", "numel")
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_REFUSED = (
    *("sub", "rtruediv", "matmul", "rmatmul", "pow", "mod", "pos"),
    *("abs", "floordiv", "rfloordiv", "rmod", "rpow", "and", "or", "round", "eq", "ne", "lt", "le", "gt", "ge"),
    *("setitem", "iter", "len", "bool", "float", "int"),
)

_OF_TUPLES = ("__iter__", "__getitem__", "__len__")


class Nothing:
    """What any tensor can be added to: `x + nothing` is `x` itself, at no cost, or its copy.

    What keeps a zero a zero keeps nothing what it is: a factor, a divisor, a sign, dropout, ReLU, another dtype, which
    layers apply to a branch on its way to the addition. So does another shape, where the shape is known (`like`):
    views, transpositions, shifts and slices, and what asks for the shape. All else is an error that says what to write
    instead.

    Args:
        branch: that lacks, for messages.
        copies: make `x + nothing` a copy of `x`, for a model that may change it in place.
        facts: shape, dtype and device of the tensor that it stands for; None if they are not known.
    """

    __slots__ = ("_branch", "_copies", "_facts")

    def __init__(
        self, branch: str, *, copies: bool = False, facts: tuple[torch.Size, torch.dtype, torch.device] | None = None
    ) -> None:
        self._branch = branch
        self._copies = copies
        self._facts = facts

    def like(self, value: Any) -> Nothing:
        """Nothing in the place of a tensor like `value`, which is not kept; itself if that is no tensor."""
        if not isinstance(value, torch.Tensor):
            return self
        return Nothing(self._branch, copies=self._copies, facts=(value.shape, value.dtype, value.device))

    def handed_on(self, value: Any) -> Any:
        """What a lacking branch gives back of its input."""
        return value.clone() if self._copies and isinstance(value, torch.Tensor) else value

    __add__ = __radd__ = __rsub__ = handed_on

    def unchanged(self, *_: Any, **__: Any) -> Nothing:
        """What a factor or a divisor makes of it."""
        return self

    __mul__ = __rmul__ = __truediv__ = __neg__ = unchanged
    mul = multiply = div = divide = true_divide = neg = relu = relu_ = contiguous = unchanged

    def to(self, *args: Any, **kwargs: Any) -> Nothing:
        """With another dtype or device."""
        dtype: Any = None
        device: Any = None
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, torch.device | str):
                device = value
            elif isinstance(value, torch.Tensor):
                dtype, device = value.dtype, value.device
        return self._with(dtype=dtype, device=device)

    type = to

    def __getitem__(self, key: Any) -> Nothing:
        """Some of it. With a number alone it is refused, as that may be asked of a tuple."""
        if self._facts is None or isinstance(key, int):
            raise TypeError(self._refusal("__getitem__"))
        return self._moved(torch.Tensor.__getitem__, key)

    def __repr__(self) -> str:
        return f"<nothing: this rank lacks {self._branch}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # whoever asks for that tries what we are
            raise AttributeError(name)
        if name in _CASTS:
            return partial(self._with, dtype=_CASTS[name])
        if self._facts is not None:
            if name in _MOVES:
                return partial(self._moved, getattr(torch.Tensor, name))
            if name in _FACTS:
                return self._facts[2] if name == "device" else getattr(self._meta(), name)
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
        if is_new and (name in _FACTORS or (first and name in _QUOTIENTS | _DROPOUTS | _RECTIFIERS)):
            return nothing
        if name in _MOVES and nothing._facts is not None and args and args[0] is nothing:
            return nothing._moved(function, *args[1:], **named)
        # PyTorch takes a TypeError of `x *= nothing` for leave to compute `x = x * nothing`.
        raise (RuntimeError if name.endswith("_") else TypeError)(nothing._refusal(name))

    def _meta(self) -> torch.Tensor:
        """A tensor like what it stands for, without storage."""
        assert self._facts is not None
        shape, dtype, _ = self._facts
        return torch.empty(shape, dtype=dtype, device="meta")

    def _moved(self, function: Any, *args: Any, **kwargs: Any) -> Nothing:
        """Nothing of the shape that `function` gives a tensor like it."""
        return self._with(shape=function(self._meta(), *args, **kwargs).shape)

    def _with(self, *, shape: Any = None, dtype: Any = None, device: Any = None) -> Nothing:
        if self._facts is None:
            return self
        old_shape, old_dtype, old_device = self._facts
        facts = (
            old_shape if shape is None else shape,
            old_dtype if dtype is None else dtype,
            old_device if device is None else torch.device(device),
        )
        return Nothing(self._branch, copies=self._copies, facts=facts)

    def _refusal(self, what: str) -> str:
        tuples = "A body that returns a tuple needs `num_outputs` in its Branch. " if what in _OF_TUPLES else ""
        return (
            f"{self._branch}: this rank lacks the branch, so its output can only be added, scaled, dropped, cast, "
            f"rectified or given another shape, and {what!r} was asked of it. {tuples}Whatever else lies between the "
            "branch's body and the addition must be a submodule of the layer, named in the branch's `after` "
            "(sdp_deepspeed/architectures/README.md); hooks must let pass what is no tensor"
        )


def _refusing(name: str) -> Any:
    def refuse(self: Nothing, *_: Any) -> NoReturn:
        raise TypeError(self._refusal(name))

    return refuse


for _name in _REFUSED:
    setattr(Nothing, f"__{_name}__", _refusing(f"__{_name}__"))
