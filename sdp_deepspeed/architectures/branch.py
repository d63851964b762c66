"""Description of one residual branch of a layer, and of the neurons or heads inside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A linear layer in a branch's body, of which a worker keeps only the rows or columns of its neurons or heads.

    Args:
        module: submodule of the body, with a `weight` and perhaps a `bias`.
        dim: stored dimension of the weight that runs over the neurons or heads.
        blocks: equal blocks stacked along `dim`, each of which runs over all heads (3 for GPT-2's `c_attn`: queries,
            keys, values). A projection that interleaves them per head (GPT-NeoX) is one block.
        is_output: whether this is the branch's output projection, whose bias all workers share.
    """

    module: str
    dim: int
    blocks: int = 1
    is_output: bool = False


@dataclass(frozen=True)
class InnerLayers:
    """What the neuron strategy may cut inside a branch: a row of equal cells, each a hidden neuron or a head.

    Args:
        cuts: all layers that the cells run through, at least the output projection.
        heads: attribute path of the body with the number of cells, for attention that of key/value heads, because
            the queries that use one go with it; None if each index of a cut is a cell (an MLP's neurons).
        scaled: attributes of the body that count in proportion to the cells it has, such as GPT-2's `split_size`.
        caches: keyword arguments of the body that hold a key/value cache, which training has no use for.
        tail: submodules of the body that run on its output, such as dropout; each takes and returns one tensor.
        per_head: submodules of the body that run on each head alike, such as Qwen3's norms of queries and keys; their
            parameters are shared by all heads. A body may lack them.
    """

    cuts: tuple[Cut, ...]
    heads: str | None = None
    scaled: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class Branch:
    """A branch that a skip connection bypasses: `x + after(body(norm(x)))`.

    Args:
        name: of the part, "attention" or "mlp" (a user's model may use other words).
        norm: submodule of the layer that the branch starts with; it takes and returns one tensor.
        body: submodule that does the work.
        after: submodules between the body and the addition, such as dropout; each takes and returns one tensor.
        num_outputs: 1 if `body` returns a tensor, n if it returns a tuple of n whose first is the branch's output.
        inner: its neurons or heads; None if only the block strategy is possible, without scaled dense branches.
    """

    name: str
    norm: str
    body: str
    after: tuple[str, ...] = ()
    num_outputs: int = 1
    inner: InnerLayers | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """Submodules of the layer that belong to the branch, in the order in which they run."""
        return (self.norm, self.body, *self.after)
