"""A state that was computed is the state after drawing."""

from __future__ import annotations

import pytest
import torch

from sdp_deepspeed.deferred_init.mersenne_twister import advance


def drawn(generator: torch.Generator, num_numbers: int) -> torch.Tensor:
    """The state after that many 32-bit numbers."""
    torch.empty(num_numbers, dtype=torch.int32, device="cpu").random_(generator=generator)
    return generator.get_state()


@pytest.mark.parametrize("first", [0, 1, 100, 623, 624, 625, 1000])
@pytest.mark.parametrize("num_numbers", [0, 1, 523, 524, 623, 624, 625, 1248, 65 * 624, 66 * 624, 300_001])
def test_state_after_so_many_numbers(first: int, num_numbers: int) -> None:
    """From a fresh seed, from within a block and from both its ends; by blocks and by a jump."""
    generator = torch.Generator().manual_seed(first)
    before = drawn(generator, first)
    kept = before.clone()
    assert torch.equal(advance(before, num_numbers), drawn(generator, num_numbers))
    assert torch.equal(before, kept)


def test_two_jumps_are_one_longer_jump() -> None:
    """Too far to draw: 10^12 numbers, and 10^12 once more."""
    state = torch.Generator().manual_seed(7).get_state()
    assert torch.equal(advance(advance(state, 10**12), 10**12), advance(state, 2 * 10**12))


def test_half_of_a_pair_of_normal_numbers_stays() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.empty(3, device="cpu").normal_(generator=generator)  # made two at a time
    before = generator.get_state()
    assert torch.equal(advance(before, 100_000), drawn(generator, 100_000))
    assert before[5000:].any()
