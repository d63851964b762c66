"""`Branch`: description of a residual branch of a layer, and of the neurons or heads inside it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CROSS_ATTENTION = "cross_attention"  # type of the branch through which a decoder's loss reaches the encoder
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Cut:
    """A linear layer or convolution in a branch's body, of which a rank keeps the rows or columns of its neurons,
    channels or heads; or a batch norm over them.

    Args:
        module: submodule of the body with a `weight` and optionally a `bias`; or a parameter (the weights of all
            experts in one tensor), whose bias has the same name with the suffix `_bias`. All vectors of a batch norm
            are cut, including running statistics.
        dim: stored dimension of the weight that runs over the neurons or heads. For a bias it is the last dimension.
        blocks: blocks stacked along `dim`, each of which runs over all heads: the number of equal blocks (3 for GPT-2's
            `c_attn`: queries, keys, values); or, if widths differ, for each block a number in proportion to its width
            (Phi-3's `qkv_proj`). A projection that interleaves them per head (GPT-NeoX) is one block.
        is_output: whether this is the branch's output projection, whose bias is shared. Experts and shared experts have
            one each.
    """

    module: str
    dim: int
    blocks: int | tuple[int, ...] = 1
    is_output: bool = False

    def names(self, known: Container[str]) -> tuple[str, str]:
        """Names of the weight and the bias.

        Args:
            known: names of all parameters of the body.
        """
        if self.module in known:
            return self.module, f"{self.module}_bias"
        prefix = f"{self.module}." if self.module else ""
        return f"{prefix}weight", f"{prefix}bias"


@dataclass(frozen=True)
class InnerLayers:
    """The layers that the neuron strategy may cut inside a branch. A cell is a hidden neuron or a head.

    Such as `InnerLayers((Cut("up", dim=0), Cut("down", dim=1, is_output=True)))` for an MLP, whose linear layers store
    weights as [out, in]; with `heads="num_heads"` attention is cut by key/value heads.

    Names are relative to the body, or to the layer if the body consists of several modules.

    Args:
        cuts: all layers that the cells run through, at least the output projection.
        heads: attribute path of the body to the number of cells, which is scaled, or this number. For attention: the
            number of key/value heads; query heads belong to the cell of their key/value head. None if each index of a
            cut is a cell (the neurons of an MLP).
        scaled: further attributes of the body that are proportional to its number of cells, such as GPT-2's
            `split_size`; "OBJECT.NAME" for attributes of an object that layers share, such as "config.NAME".
        tail: submodules that run on the body's output, such as a norm.
        per_head: submodules that are applied to each head, such as Qwen3's norms of queries and keys; their parameters
            are shared. A body may lack them.
        by_head: keyword arguments of the body that are None, or tensors with the model's heads along dim 1.
    """

    cuts: tuple[Cut, ...]
    heads: str | int | None = None
    scaled: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class Zeros:
    """What a body returns if its branch is absent: zeros in the shape of its input, of another size along `dim`.

    Args:
        num_outputs: see `Branch`.
        size: None if it is the input's.
        is_flat: whether all dims but the last are one, as in the output of experts.
        is_tuple: whether a single output is in a tuple.
        like: position or keyword of the input; None if it is the first argument.
    """

    num_outputs: int = 1
    dim: int = -1
    size: int | None = None
    is_flat: bool = False
    is_tuple: bool = False
    like: int | str | None = None


LIKE_INPUT = Zeros()


@dataclass(frozen=True)
class Branch:
    """A branch that a skip connection bypasses: `x + after(body(norm(x)))`.

    Args:
        name: type of the branch: "attention", "mlp", or your own.
        norm: submodule of the layer at the start of the branch, or several that run one after the other, from one
            tensor to one tensor. None without a norm, or if the norm is shared: two branches read it, or it is on the
            residual stream.
        body: submodule of the layer; or several that run one after the other, each on the (first) output of the
            previous one.
        after: submodules between body and addition, such as dropout, from one tensor to one tensor.
        num_outputs: 1 if the (first) body returns a tensor, n if it returns a tuple of n, of which the first is the
            branch's output.
        inner: neurons or heads; None if only the block strategy is possible.
        added_to: position or keyword of the (first) body's argument to which the body adds its output itself (BLOOM).
            None if the layer adds it.
        zeros: what each body returns if the branch is absent, for bodies of which one does not run on just the output
            of the one before. By default, the first returns zeros, and others return their input.
        extra_outputs: keywords or positions of arguments that an absent body returns as its further outputs (T5's
            position bias); other outputs are None.
        parameters: parameters of the layer itself that belong to the branch. A layer may have None there.
        outputs: weights of a derived branch's output projections, behind which no norm runs.
        is_projected: whether matrices run on the skip connection. Then the branch cannot be a block, and can only be
            cut into neurons.
        is_written: whether the layer may write to the branch's output in place, such as `output += x`.
    """

    name: str
    norm: str | tuple[str, ...] | None = None
    body: str | tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    num_outputs: int = 1
    inner: InnerLayers | None = None
    added_to: int | str | None = None
    zeros: tuple[Zeros, ...] = ()
    extra_outputs: tuple[int | str, ...] = ()
    parameters: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    is_projected: bool = False
    is_written: bool = True

    def __post_init__(self) -> None:
        if not self.body:
            raise ValueError(f"branch {self.name!r}: body: name the submodule that computes the branch")
        names = (*self.modules, *self.parameters)
        again = [name for index, name in enumerate(names) if any(is_nested(name, known) for known in names[:index])]
        if again:
            raise ValueError(
                f"branch {self.name!r}: {again[0]!r} is named twice, or inside another named module; norm, body, "
                "after and parameters must not overlap"
            )

    @property
    def norms(self) -> tuple[str, ...]:
        """Submodules of the layer before the bodies, in forward order."""
        return (self.norm,) if isinstance(self.norm, str) else self.norm or ()

    @property
    def bodies(self) -> tuple[str, ...]:
        """Bodies: submodules of the layer, in forward order."""
        return (self.body,) if isinstance(self.body, str) else self.body

    @property
    def root(self) -> str:
        """Submodule of the layer to which names of `inner` are relative; empty for the layer itself."""
        return self.body if isinstance(self.body, str) else ""

    @property
    def modules(self) -> tuple[str, ...]:
        """Submodules of the layer that belong to the branch, in forward order."""
        return (*self.norms, *self.bodies, *self.after)


def attribute(module: nn.Module, path: str) -> Any:
    """Value at an attribute path of a module, such as "config.num_key_value_heads"; AttributeError if there is none."""
    return reduce(getattr, path.split("."), module)


def is_nested(name: str, other: str) -> bool:
    """Whether one of two modules is the other, or inside it, by their names."""
    return is_inside(name, other) or is_inside(other, name)


def is_inside(name: str, other: str) -> bool:
    """Whether a module or tensor is `other`, or inside it, by its name."""
    return f"{name}.".startswith(f"{other}.")
