"""What a body returns beside the branch's output where it is not whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdp_deepspeed.architectures.branch import Branch


@dataclass(frozen=True)
class Outputs:
    """The outputs of a body: one, or a tuple whose first is the branch's.

    Args:
        count: of outputs; 0 for a module that passes its input on.
        handed_on: keyword arguments that are its further outputs, as far as there are some; else they are None, since
            attention's weights, say, would be those of some heads only.
    """

    count: int
    handed_on: tuple[str, ...] = ()

    @classmethod
    def of(cls, branch: Branch) -> Outputs:
        return cls(branch.num_outputs, branch.handed_on)

    def around(self, output: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the body returns with `output` as the branch's."""
        if self.count == 1:
            return output
        further = [kwargs.get(name) for name in self.handed_on]
        return (output, *further, *[None] * (self.count - 1 - len(further)))
