"""Does the dense model stay on every rank between the forward passes of an evaluation? All ranks answer alike.

It stays where a quarter of the memory is left beside it, for activations and whatever else comes, and for as long as an
eighth is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.masking.free_memory import FreeMemory
from sdp_deepspeed.sizes import bytes_text

BEGINS_ABOVE, STAYS_ABOVE = 1 / 4, 1 / 8  # of the memory
_WIDTH = 1021  # prime: rows that changed places are seen, as they begin at other columns


@dataclass(frozen=True)
class Vote:
    """What a rank says before a forward pass.

    Args:
        wants: False if it must not, True if it must whatever is left, None if memory decides.
        memory: None if nobody tells.
        has: bytes that it keeps already.
        needs: bytes to keep everything.
        is_valid: whether it keeps everything, and no weights of its own have changed since.
    """

    wants: bool | None
    memory: FreeMemory | None
    has: int
    needs: int
    is_valid: bool


@dataclass(frozen=True)
class Decision:
    """The same on all ranks.

    Args:
        keeps: whether the dense model stays after the next forward pass.
        is_valid: whether what is kept may be used in it.
        reason: for people.
    """

    keeps: bool
    is_valid: bool
    reason: str


def decide(votes: Sequence[Vote]) -> Decision:
    """From the votes of all ranks."""
    is_valid = all(vote.is_valid for vote in votes)
    keeps, reason = _may_keep(votes, STAYS_ABOVE if is_valid else BEGINS_ABOVE)
    return Decision(keeps, keeps and is_valid, reason)


def _may_keep(votes: Sequence[Vote], share: float) -> tuple[bool, str]:
    if any(vote.wants is False for vote in votes):
        return False, "not asked for"
    if all(vote.wants for vote in votes):
        return True, "asked for"
    if any(vote.memory is None for vote in votes):
        return False, "a rank's device does not tell how much memory it has"
    memories = [vote.memory for vote in votes if vote.memory is not None]
    worst, left, total = math.inf, 0, 0
    for pool in dict.fromkeys(memory.pool for memory in memories):
        there = [(vote, memory) for vote, memory in zip(votes, memories, strict=True) if memory.pool == pool]
        size = min(memory.total for _, memory in there)
        rest = min(memory.shared for _, memory in there)
        rest += sum(memory.own + vote.has - vote.needs for vote, memory in there)
        if (found := rest / size) < worst:
            worst, left, total = found, rest, size
    least = f"{bytes_text(max(0, left))} of {bytes_text(total)}"
    return worst >= share, f"{least} would be left where memory is shortest, {share:.1%} must be"


def fingerprint(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sums of the bits of all tensors, in words of eight bytes: nearly all changes of weights change it, whoever makes
    them and how. In words as long as an element the carries of many equal changes (signs, powers of two) get lost.

    Args:
        tensors: flat views of weights on `device`; some may be empty.

    Returns:
        int64, at most two thousand elements for each tensor.
    """
    sums = [torch.empty(0, dtype=torch.int64, device=device)]
    for tensor in tensors:
        flat = tensor.view(torch.uint8)
        flat = flat.clone() if flat.storage_offset() % 8 else flat  # words begin at multiples of their size
        num_bytes = flat.numel() // 8 * 8
        words = flat[:num_bytes].view(torch.int64)
        num_rows = words.numel() // _WIDTH
        columns = words[: num_rows * _WIDTH].view(num_rows, _WIDTH).sum(0)  # wraps
        sums += [columns, words[num_rows * _WIDTH :], flat[num_bytes:].long()]
    return torch.cat(sums)
