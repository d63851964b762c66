"""Description of one residual branch of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Branch:
    """A branch that a skip connection by-passes: `x + after(body(norm(x)))`.

    Args:
        name: of the part, "attention" or "mlp" (a user's model may use other words).
        norm: submodule of the layer that the branch starts with; it takes and returns one tensor.
        body: submodule that does the work.
        after: submodules between the body and the addition, such as dropout; each takes and returns one tensor.
        num_outputs: 1 if `body` returns a tensor, n if it returns a tuple of n whose first is the branch's output.
    """

    name: str
    norm: str
    body: str
    after: tuple[str, ...] = ()
    num_outputs: int = 1

    @property
    def modules(self) -> tuple[str, ...]:
        """Submodules of the layer that belong to the branch, in the order in which they run."""
        return (self.norm, self.body, *self.after)
