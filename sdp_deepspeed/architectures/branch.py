"""Description of one residual branch of a layer, and of the neurons or heads inside it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Cut:
    """A linear layer or convolution in a branch's body, of which a worker keeps only the rows or columns of its
    neurons, channels or heads; or a batch norm over them.

    Args:
        module: submodule of the body, with a `weight` and perhaps a `bias`; or a parameter (the weights of all experts
            in one tensor), whose bias is the parameter of that name with `_bias`. Of a batch norm all vectors are cut,
            its running statistics too.
        dim: stored dimension of the weight that runs over the neurons or heads. A bias runs over them with its last.
        blocks: blocks stacked along `dim`, each of which runs over all heads: the number of equal ones (3 for GPT-2's
            `c_attn`: queries, keys, values), or, if they differ, for each the attribute path of the body with a number
            that its width is in proportion to (Phi-3's `qkv_proj`). A projection that interleaves them per head
            (GPT-NeoX) is one block.
        is_output: whether this is the branch's output projection, whose bias all workers share. Experts and a shared
            expert beside them have one each.
        optional: whether a body may lack the module.
        interleaved: indices of one neuron that lie next to each other in a block (2 for GPT-OSS, where gates and ups
            alternate); those of heads are counted.
    """

    module: str
    dim: int
    blocks: int | tuple[str, ...] = 1
    is_output: bool = False
    optional: bool = False
    interleaved: int = 1

    def names(self, known: Container[str]) -> tuple[str, str]:
        """Names of its weight and of its bias, if it has one.

        Args:
            known: names of all parameters of the body.
        """
        if self.module in known:
            return self.module, f"{self.module}_bias"
        prefix = f"{self.module}." if self.module else ""
        return f"{prefix}weight", f"{prefix}bias"


@dataclass(frozen=True)
class InnerLayers:
    """What the neuron strategy may cut inside a branch: a row of equal cells, each a hidden neuron or a head.

    All names are of the body, or of the layer if the body is several modules of it.

    Args:
        cuts: all layers that the cells run through, at least the output projection.
        heads: attribute path of the body with the number of cells, for attention that of key/value heads, because
            the queries that use one go with it; None if each index of a cut is a cell (an MLP's neurons).
        scaled: attributes of the body that count in proportion to the cells it has, such as GPT-2's `split_size`; of
            its config, which other layers share, "config.NAME".
        caches: keyword arguments of the body that hold a key/value cache, which training has no use for; of one that
            holds several "NAME.ATTRIBUTE", the body's own.
        tail: submodules of the body that run on its output, such as dropout; each takes and returns one tensor.
        before: submodules of the body that run before the cells and are not cut, of one that is a single module.
        per_head: submodules of the body that run on each head alike, such as Qwen3's norms of queries and keys; their
            parameters are shared by all heads. A body may lack them.
        by_head: keyword arguments of the body that are None or tensors with the model's heads along dim 1.
    """

    cuts: tuple[Cut, ...]
    heads: str | None = None
    scaled: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experts:
    """Experts in a branch's body, of which each token uses some: what they cost is less than what they weigh.

    Args:
        module: submodule of the body whose parameters have an expert for each index of their first dimension, or a
            ModuleList of experts.
        router: submodule of the body that chooses.
        num_active: attribute path of the body with the number of experts that a token uses.
        noise: attribute path of the body with the strength of noise that it draws for its input in training.
    """

    module: str
    router: str
    num_active: str
    noise: str | None = None


@dataclass(frozen=True)
class Branch:
    """A branch that a skip connection bypasses: `x + after(body(norm(x)))`.

    Args:
        name: of the part, "attention" or "mlp" (a user's model may use other words).
        norm: submodule of the layer that the branch starts with, or several that run one after the other; each takes
            and returns one tensor. None if there is none, or if it is not the branch's own: two branches read the same
            norm, or the norm is on the stream.
        body: submodule that does the work; or several that run one after the other, each on the output of the one
            before it, the first if that is a tuple.
        after: submodules between the body and the addition, such as dropout; each takes and returns one tensor.
        num_outputs: 1 if `body` returns a tensor, n if it returns a tuple of n whose first is the branch's output; of
            several modules this is about the first.
        inner: its neurons or heads; None if only the block strategy is possible, without scaled dense branches.
        handed_on: what the further outputs of the body are where it is not whole: the keyword argument of the same
            meaning, which it got from the layer before (T5's position bias), else None.
        uncut_reason: why there is no `inner`, for the message that refuses the neuron strategy.
        experts: in the body, if it is a mixture; the bodies of some layers may lack them.
        when: attribute paths of the layer with the values that they have where it has this branch, or with the type
            of what is there, for a class whose config decides what it computes; others of the class may have the same
            name.
        bypassed: as `when`, where the skip connection is the identity; elsewhere (a projection of it) the branch is no
            block, and only what is inside can be cut.
        parameters: of the layer itself that belong to the branch, each read before the last module of `after` runs; a
            layer may have None there.
    """

    name: str
    norm: str | tuple[str, ...] | None = None
    body: str | tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    num_outputs: int = 1
    inner: InnerLayers | None = None
    handed_on: tuple[str, ...] = ()
    uncut_reason: str = ""
    experts: Experts | None = None
    when: tuple[tuple[str, Any], ...] = ()
    bypassed: tuple[tuple[str, Any], ...] = ()
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.body:
            raise ValueError(f"branch {self.name!r}: body: name the submodule that does the work")
        if self.parameters and not self.after:  # the dense model has them until the last module has run
            raise ValueError(
                f"branch {self.name!r}: parameters: name in `after` a submodule that runs once {self.parameters[0]!r} "
                "was read, or leave the parameter out, and it is shared"
            )
        names = (*self.modules, *self.parameters)
        again = [name for index, name in enumerate(names) if _is_inside(name, names[:index])]
        if again:
            raise ValueError(
                f"branch {self.name!r}: {again[0]!r} is named twice, or inside of another module that is named; norm, "
                "body and after are modules that run one after the other, and parameters those of none of them"
            )

    def is_in(self, layer: nn.Module) -> bool:
        """Whether a layer of the described class has this branch."""
        return _meets(layer, self.when)

    def is_bypassed(self, layer: nn.Module) -> bool:
        """Whether the skip connection of such a layer is the identity."""
        return _meets(layer, self.bypassed)

    @property
    def norms(self) -> tuple[str, ...]:
        """Submodules of the layer before the bodies, in the order in which they run."""
        return (self.norm,) if isinstance(self.norm, str) else self.norm or ()

    @property
    def bodies(self) -> tuple[str, ...]:
        """Submodules of the layer that do the work, in the order in which they run."""
        return (self.body,) if isinstance(self.body, str) else self.body

    @property
    def root(self) -> str:
        """Submodule of the layer that the names of `inner` start at; empty for the layer itself."""
        return self.body if isinstance(self.body, str) else ""

    @property
    def modules(self) -> tuple[str, ...]:
        """Submodules of the layer that belong to the branch, in the order in which they run."""
        return (*self.norms, *self.bodies, *self.after)

    @property
    def num_outputs_of_modules(self) -> tuple[int, ...]:
        """Of each of `modules`; 0 for one that passes its input on where the branch is lacking."""
        return tuple(self.num_outputs if name == self.bodies[0] else 0 for name in self.modules)


def attribute(module: nn.Module, path: str) -> Any:
    """What is at an attribute path of a module, such as "config.num_key_value_heads"; AttributeError if nothing is."""
    return reduce(getattr, path.split("."), module)


def _meets(layer: nn.Module, conditions: tuple[tuple[str, Any], ...]) -> bool:
    found = ((attribute(layer, path), value) for path, value in conditions)
    return all(isinstance(own, value) if isinstance(value, type) else own == value for own, value in found)


def _is_inside(name: str, others: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in others)
