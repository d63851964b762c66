"""What an error in the middle of a re-plan leaves is used by nobody, and nobody waits for the rank that had it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.monitored_barrier import MonitoredBarrier
from sdp_deepspeed.messages import listed


def refuse(call: str) -> NoReturn:
    """RuntimeError."""
    raise RuntimeError(
        f"{call} after engine.replan ended half-way in an error, which left weights and optimizer state unfinished: "
        "end this run, and start it again from its last checkpoint"
    )


@contextmanager
def wholly_or_never(module: nn.Module, last_acts: LastActs) -> Iterator[None]:
    """An error in the block is for good: the module is refused from then on to whoever runs it or takes its state dict
    without asking the engine, and whoever waits for this rank in a collective, or comes to one, hears of it.

    Args:
        last_acts: of this rank.
    """
    try:
        yield
    except BaseException as error:
        module.register_forward_pre_hook(_refuse_forward, prepend=True)
        module.register_state_dict_pre_hook(_refuse_state_dict)
        last_acts.fail(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise


@contextmanager
def who_ended_is_named(barrier: MonitoredBarrier) -> Iterator[None]:
    """Collectives in the block that fail since a process has ended say whose: the backend only knows addresses."""
    try:
        yield
    except RuntimeError as error:
        if ended := barrier.ended_ranks():
            raise RuntimeError(f"engine.replan: rank {listed(ended)} ended during the re-plan. {error}") from error
        raise


def _refuse_forward(*_: Any) -> NoReturn:
    refuse("a forward pass")


def _refuse_state_dict(*_: Any) -> NoReturn:
    refuse("state_dict()")
