"""The state of PyTorch's generator on the CPU after n more numbers, however many, in some milliseconds.

The generator is MT19937 (Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998): 624 words, replaced all
at once when they are used up. Each word is a sum (exclusive or) of earlier ones, so the word n places further on is a
sum of the next 19937: those at the exponents of x^n modulo the recurrence's characteristic polynomial (Haramoto,
Matsumoto, Nishimura, Panneton, L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number Generators", INFORMS J.
Comput. 20(3), 2008). Polynomials over two elements are integers here, bit i the coefficient of x^i.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint32]

_NUM_WORDS, _MIDDLE, _DEGREE = 624, 397, 19937
_UPPER, _LOWER, _MATRIX = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), 0x9908B0DF
_FEW_BLOCKS = 64  # are made one after the other
_STEP = _NUM_WORDS - _MIDDLE  # so many words of a block follow from the block before

# Where torch.get_rng_state() has what, in bytes; what else it has (the seed, half of a pair of normal numbers) stays.
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _NUM_WORDS)


def advance(state: torch.Tensor, num_numbers: int) -> torch.Tensor:
    """What `torch.get_rng_state()` gives once `num_numbers` more 32-bit numbers were drawn.

    Args:
        state: of a generator on the CPU, as `get_state` gives it (bytes).
        num_numbers: at least 0.
    """
    state = state.clone()
    raw = state.numpy()
    left, following = raw[_LEFT].view(np.int32), raw[_NEXT].view(np.uint64)
    in_block = int(left[0]) - 1  # numbers before the words are replaced
    if num_numbers <= in_block:
        following += np.uint64(num_numbers)
        left -= np.int32(num_numbers)
        return state
    num_blocks, used = divmod(num_numbers - in_block - 1, _NUM_WORDS)
    words = raw[_WORDS].view(np.uint64)
    words[:] = _later_block(words.astype(np.uint32), num_blocks + 1, jump=num_numbers // _NUM_WORDS - 1)
    following[0], left[0] = used + 1, _NUM_WORDS - used
    return state


def _later_block(words: Words, num_blocks: int, *, jump: int) -> Words:
    """The block `num_blocks` later.

    Args:
        jump: at most num_blocks - 1. It does not depend on where in a block a call begins, so that calls of one length
            need one polynomial.
    """
    words = _next_block(words)  # of a fresh seed the recurrence does not know all bits of the first word
    num_blocks -= 1
    if jump > _FEW_BLOCKS:
        words = _jumped(words, _exponents(jump))
        num_blocks -= jump
    for _ in range(num_blocks):
        words = _next_block(words)
    return words


def _next_block(words: Words) -> Words:
    """In stretches whose sources are there: `_STEP` words at a time, and the last one, which needs the first."""
    after = np.append(words, np.uint32(0))
    for start in range(0, _NUM_WORDS, _STEP):
        stop = min(start + _STEP, _NUM_WORDS - 1)
        sources = words[_MIDDLE:] if start == 0 else after[start - _STEP : stop - _STEP]
        after[start:stop] = _recurrence(words[start:stop], words[start + 1 : stop + 1], sources[: stop - start])
    after[_NUM_WORDS - 1 :] = _recurrence(words[-1:], after[:1], after[_MIDDLE - 1 : _MIDDLE])
    return after[:_NUM_WORDS]


def _recurrence(upper: Words, lower: Words, middle: Words) -> Words:
    mixed = (upper & _UPPER) | (lower & _LOWER)
    return middle ^ (mixed >> np.uint32(1)) ^ (np.uint32(_MATRIX) * (mixed & np.uint32(1)))


def _jumped(words: Words, exponents: npt.NDArray[np.intp]) -> Words:
    blocks = [words]
    for _ in range(-(-_DEGREE // _NUM_WORDS)):
        blocks.append(_next_block(blocks[-1]))
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(blocks), _NUM_WORDS)
    result = np.zeros(_NUM_WORDS, dtype=np.uint32)
    for start in range(0, len(exponents), 128):  # what fits into a cache
        result ^= np.bitwise_xor.reduce(windows[exponents[start : start + 128]], axis=0)
    return result


@lru_cache(maxsize=256)
def _exponents(num_blocks: int) -> npt.NDArray[np.intp]:
    """Those of x^(624 num_blocks) modulo the characteristic polynomial."""
    power = 1
    for bit in bin(_NUM_WORDS * num_blocks)[2:]:
        power = _reduced(int(bin(power)[2:], 4) << int(bit))  # the square has each bit at twice its place
    return np.flatnonzero(np.frombuffer(bin(power)[:1:-1].encode(), dtype=np.uint8) == ord("1"))


def _reduced(polynomial: int) -> int:
    *rest, _ = _characteristic()
    while high := polynomial >> _DEGREE:
        polynomial ^= high << _DEGREE
        for exponent in rest:
            polynomial ^= high << exponent
    return polynomial


@cache
def _characteristic() -> tuple[int, ...]:
    """Exponents of the characteristic polynomial, ascending (appendix A of the paper; 135 of them)."""
    whole = 1 << _NUM_WORDS | 1 << _MIDDLE
    one_less = whole >> 1
    powers = [1]  # of one_less
    for _ in range(31):
        powers.append(_product(powers[-1], one_less))
    result = _product(powers[31], whole)
    for bit in range(32):
        if _MATRIX >> bit & 1:
            result ^= _product(powers[30 - bit], whole) if bit < 31 else 1
    return tuple(bit for bit in range(result.bit_length()) if result >> bit & 1)


def _product(one: int, other: int) -> int:
    result = 0
    for exponent in range(other.bit_length()):
        if other >> exponent & 1:
            result ^= one << exponent
    return result
