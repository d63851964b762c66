"""Digests tell tensors apart by any of their bits, wherever they are, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.common.measured_step import watched_host_memory
from sdp_deepspeed.distributed import replicas
from sdp_deepspeed.distributed.replicas import differing_replicas, digests
from tests.helpers.gatherers import outcomes_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8)
ROW_BYTES = 8 * replicas._ROW


def digest(tensor: torch.Tensor) -> bytes:
    (result,) = digests([tensor])
    return result


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, ROW_BYTES, ROW_BYTES + 3, 5 * ROW_BYTES + 8])
def test_every_bit_counts(count: int) -> None:
    """Of the first, the last and some other bytes: each bit flipped alone."""
    data = random_bytes(count)
    before = digest(data)
    assert digest(data.clone()) == before
    seen = {before}
    for byte in sorted({0, count // 3, count // 2, count - 1}):
        for bit in range(8):
            changed = data.clone()
            changed[byte] ^= 1 << bit
            seen.add(digest(changed))
    assert len(seen) == 1 + 8 * len({0, count // 3, count // 2, count - 1})


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_what_values_do_not_show(dtype: torch.dtype) -> None:
    """Signs of zeros, of all or of two; which NaN it is; order, rows and columns that change places."""
    values = torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    zeros = torch.zeros_like(values)
    nan, other_nan = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    other_nan.view(torch.uint8)[0, 0] ^= 1
    two_signs, two_columns = values.clone(), values.clone()
    two_signs[3, 3:5] *= -1
    two_signs[3, 7] *= -1
    two_columns[:, [4, 8]] = values[:, [8, 4]]
    variants = [values, -values, values.flip(0), values.flip(1), two_signs, two_columns, values.roll(4), values * 2]
    variants += [zeros, -zeros, nan, other_nan, values[:39], values.view(1000, 40).t().contiguous()]
    assert len(set(digests(variants))) == len(variants)


def test_pairs_of_high_bits() -> None:
    """Their products with odd weights are all alike, so that two of them would cancel out."""
    words = torch.zeros(64, dtype=torch.int64)
    pairs = []
    for bit in (63, 62, 55, 31):
        for first in range(0, 60, 3):
            changed = words.clone()
            changed[first] = changed[first + 1] = (1 << bit) if bit < 63 else -(1 << 63)
            pairs.append(changed)
    assert len(set(digests([words, *pairs]))) == 1 + len(pairs)


def test_lengths_count() -> None:
    zeros = torch.zeros(3 * ROW_BYTES, dtype=torch.uint8)
    lengths = [0, 1, 2, 7, 8, 9, 16, ROW_BYTES, 2 * ROW_BYTES, 3 * ROW_BYTES]
    assert len(set(digests(zeros[:length] for length in lengths))) == len(lengths)
    assert digests([]) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_elements_lie_does_not_count(dtype: torch.dtype) -> None:
    """Views with gaps, transposed ones, and those that begin inside a word are what their elements are in order."""
    values = random_bytes(4000).view(20, 200).to(dtype)
    padded = torch.zeros(21, 203, dtype=dtype)
    padded[1:, 3:] = values
    transposed = values.t().contiguous().t()
    shifted = torch.zeros(4001, dtype=dtype)
    shifted[1:] = values.view(-1)
    assert len({*digests([values, padded[1:, 3:], transposed, shifted[1:]])}) == 1
    assert digest(values.t()) != digest(values)


def test_the_way_of_gpus_gives_the_same() -> None:
    rows = random_bytes(3 * ROW_BYTES).view(torch.int64).view(3, -1)
    for weights in replicas._weights(rows.device):
        assert torch.equal(torch.mv(rows, weights), replicas._weighted_sums(rows, weights))


def test_what_digests_take_does_not_grow_with_the_tensors_and_is_gone() -> None:
    data = random_bytes(40 * ROW_BYTES)
    with watched_host_memory() as memory:
        digest(data)
    assert memory.at_end <= data.nbytes  # counted where it is looked at
    assert memory.peak - memory.at_end < 2 * 2**20 < data.nbytes


def test_weights_can_be_inverted() -> None:
    first, second = replicas._weights(torch.device("cpu"))
    assert first.bitwise_and(1).all()
    assert len({*first.tolist(), *second.tolist()}) == 2 * replicas._ROW


def test_tensors_that_differ_are_named() -> None:
    def work(rank: int, gatherer: Any) -> str:
        tensors = {name: torch.arange(5.0) for name in ("same", "other", "also same")}
        tensors["other"][4] += rank / 8
        return differing_replicas(tensors, gatherer)

    assert outcomes_of(3, work) == ["other"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    values = random_bytes(5 * ROW_BYTES + 3).to(dtype)
    assert digest(values.cuda()) == digest(values)
