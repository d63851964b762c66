"""What an optimizer keeps, read without an engine."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState, merged
from tests.helpers.trained_states import one_rank


class Waits(TorchDispatchMode):
    """Counts values that the host asks for; from a GPU each is a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_values = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_values += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


def test_counts_of_many_tensors_are_one_wait() -> None:
    """The fused kernel keeps one on the GPU for each."""
    state = one_rank()
    for _ in range(3):
        state.step()
    assert len(state.optimizer.groups[0].tensors) > 1
    with Waits() as waits:
        counts = OptimizerState(state.optimizer, state.rank_chunks()).counts()
    assert counts == [{"step": 3.0}]
    assert waits.num_values == 1


def test_counts_are_those_of_whoever_steps_something() -> None:
    of_ranks = [[None, {"step": 2.0}, None], [{"step": 3.0}, None, None]]
    assert merged(of_ranks) == [{"step": 3.0}, {"step": 2.0}, None]
